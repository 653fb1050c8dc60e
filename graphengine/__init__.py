"""graphengine: LLM decoding through pre-captured steps, sped up by speculation without changing one
output token.

Names are loaded on first use, which takes seconds (torch), so that the command line can answer
Ctrl-C before that.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capture.config import CaptureConfig
    from graphengine.config import CacheConfig, EngineConfig
    from graphengine.engine import Engine
    from graphengine.llm import LLM
    from graphengine.outputs import CompletionOutput, EngineStats, RequestOutput
    from graphengine.sampling.params import SamplingParams
    from graphengine.speculative_config import SpeculativeConfig

_HOMES = {
    "LLM": "graphengine.llm",
    "CacheConfig": "graphengine.config",
    "CaptureConfig": "capture.config",
    "CompletionOutput": "graphengine.outputs",
    "Engine": "graphengine.engine",
    "EngineConfig": "graphengine.config",
    "EngineStats": "graphengine.outputs",
    "RequestOutput": "graphengine.outputs",
    "SamplingParams": "graphengine.sampling.params",
    "SpeculativeConfig": "graphengine.speculative_config",
}
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'graphengine' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
