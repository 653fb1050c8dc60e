"""graphengine: LLM decoding through pre-captured steps, sped up by speculation without changing one
output token.
"""

from capture.config import CaptureConfig
from graphengine.config import CacheConfig, EngineConfig, SpeculativeConfig
from graphengine.engine import Engine
from graphengine.llm import LLM
from graphengine.outputs import CompletionOutput, EngineStats, RequestOutput
from graphengine.sampling.params import SamplingParams

__all__ = [
    "LLM",
    "CacheConfig",
    "CaptureConfig",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
]
