"""Peer process: vLLM, its engine stepped in this process. Run by `process.py`, not imported."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
import peer_protocol as protocol  # type: ignore[import-not-found]

KV_GIB = 2
MAX_MODEL_LEN = 2048

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # no second process, no copies
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(KV_GIB))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

try:
    import torch
    import vllm
    from vllm.sampling_params import RequestOutputKind
except ImportError as error:
    PROBLEM = f"{error}; install vllm (on CPU: vllm-cpu) where this Python finds it"
else:
    PROBLEM = ""


def start(options: dict[str, Any]) -> tuple[dict[str, Any], protocol.Generate]:
    if PROBLEM:
        raise protocol.Refusal(PROBLEM)
    torch.set_num_threads(options["threads"])
    k = options["k"]
    settings: dict[str, Any] = {
        "dtype": options["dtype"],
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": options["max_num_seqs"],
        "enable_prefix_caching": False,
    }
    if k:
        settings["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": k,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        }
    engine = vllm.LLM(model=options["model"], skip_tokenizer_init=True, **settings).llm_engine

    def generate(prompts: protocol.Prompts, num_tokens: int) -> Iterator[protocol.Delivery]:
        params = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        begin = time.perf_counter()
        for index, prompt in enumerate(prompts):
            engine.add_request(str(index), {"prompt_token_ids": list(prompt)}, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - begin
            for output in outputs:
                if output.outputs[0].token_ids:
                    yield now, int(output.request_id), list(output.outputs[0].token_ids)

    what = f"vllm.LLM({', '.join(f'{name}={value!r}' for name, value in settings.items())})"
    return {"version": vllm.__version__, "what": what, "pid": os.getpid()}, generate


if __name__ == "__main__":
    protocol.serve(start)
