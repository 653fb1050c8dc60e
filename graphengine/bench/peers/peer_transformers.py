"""Peer process: Hugging Face transformers, eager, greedy. Run by `peer.py`, not imported.

Arguments: checkpoint (a directory or a .gguf file), dtype, threads. Speaks one JSON object a line:
first a description of itself, then for each `{"prompts", "num_tokens"}` on stdin the token ids and
the seconds from the end of the first decode step to the end of the last. Imports nothing of this
project, so that the peer is as its users have it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

try:
    import torch
    import transformers
except ImportError as error:
    PROBLEM = f"{error}; install transformers to compare against it"
else:
    PROBLEM = ""


def main() -> None:
    path, dtype, num_threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever the libraries print must not get between the answers
    if PROBLEM:
        _answer(answers, {"error": PROBLEM})
        return
    torch.set_num_threads(num_threads)
    transformers.utils.logging.set_verbosity_error()
    try:
        model = _load(path, getattr(torch, dtype))
    except (ImportError, OSError, ValueError) as error:
        # Reading a .gguf, transformers needs gguf and accelerate.
        _answer(answers, {"error": f"transformers cannot load {path.name}: {error}"})
        return
    name = f"transformers {transformers.__version__} eager {dtype}"
    _answer(answers, {"name": name, "pid": os.getpid(), "threads": torch.get_num_threads()})
    for line in sys.stdin:
        _answer(answers, _generate(model, **json.loads(line)))


def _load(path: Path, dtype: torch.dtype) -> Any:
    loader = transformers.AutoModelForCausalLM
    if path.is_file():
        model = loader.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    else:
        model = loader.from_pretrained(path, dtype=dtype)
    return model.eval()


def _generate(model: Any, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
    width = max(map(len, prompts))
    padding = [[0] * (width - len(prompt)) for prompt in prompts]
    ids = torch.tensor([pad + prompt for pad, prompt in zip(padding, prompts, strict=True)])
    mask = torch.tensor([[0] * len(pad) + [1] * (width - len(pad)) for pad in padding])
    ends: list[float] = []

    class Clock(transformers.StoppingCriteria):  # type: ignore[misc]
        """Notes when each step ended; stops nothing."""

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            ends.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            generation_config=transformers.GenerationConfig(
                do_sample=False,
                max_new_tokens=num_tokens,
                eos_token_id=None,
                pad_token_id=0,
                use_cache=True,
            ),
            stopping_criteria=transformers.StoppingCriteriaList([Clock()]),
        )
    return {"token_ids": out[:, width:].tolist(), "decode_seconds": ends[-1] - ends[0]}


def _answer(stream: Any, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        main()
