"""Peer process: Hugging Face transformers, eager. Run by `process.py`, not imported."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
import peer_protocol as protocol  # type: ignore[import-not-found]

try:
    import torch
    import transformers
except ImportError as error:
    PROBLEM = f"{error}; install transformers to compare against it"
else:
    PROBLEM = ""


def start(options: dict[str, Any]) -> tuple[dict[str, Any], protocol.Generate]:
    if PROBLEM:
        raise protocol.Refusal(PROBLEM)
    torch.set_num_threads(options["threads"])
    transformers.utils.logging.set_verbosity_error()
    path, k = Path(options["model"]), options["k"]
    try:
        model = _load(path, getattr(torch, options["dtype"]))
    except (ImportError, OSError, ValueError) as error:
        # Reading a .gguf, transformers needs gguf and accelerate.
        raise protocol.Refusal(f"transformers cannot load {path.name}: {error}") from error
    settings: dict[str, Any] = {"do_sample": False, "use_cache": True}
    if k:
        settings["prompt_lookup_num_tokens"] = k
    what = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    description = {
        "version": transformers.__version__,
        "what": f"eager {options['dtype']}, generate({what})",
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
    }

    def generate(prompts: protocol.Prompts, num_tokens: int) -> Iterator[protocol.Delivery]:
        if k and len(prompts) > 1:
            raise protocol.Refusal("transformers looks drafts up for one request at a time")
        return _generate(model, prompts, num_tokens, settings)

    return description, generate


def _load(path: Path, dtype: torch.dtype) -> Any:
    loader = transformers.AutoModelForCausalLM
    if path.is_file():
        model = loader.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    else:
        model = loader.from_pretrained(path, dtype=dtype)
    return model.eval()


def _generate(
    model: Any, prompts: protocol.Prompts, num_tokens: int, settings: dict[str, Any]
) -> Iterator[protocol.Delivery]:
    width = max(map(len, prompts))
    padding = [[0] * (width - len(prompt)) for prompt in prompts]
    ids = torch.tensor([[*pad, *prompt] for pad, prompt in zip(padding, prompts, strict=True)])
    mask = torch.tensor([[0] * len(pad) + [1] * (width - len(pad)) for pad in padding])
    ends: list[tuple[float, int]] = []
    begin = time.perf_counter()

    class Clock(transformers.StoppingCriteria):  # type: ignore[misc]
        """Notes when each step ended, and with how many tokens; stops nothing."""

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            ends.append((time.perf_counter() - begin, input_ids.shape[1] - width))
            return torch.zeros(len(input_ids), dtype=torch.bool)

    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            generation_config=transformers.GenerationConfig(
                max_new_tokens=num_tokens, eos_token_id=None, pad_token_id=0, **settings
            ),
            stopping_criteria=transformers.StoppingCriteriaList([Clock()]),
        )
    done = 0
    for now, count in ends:
        for index, row in enumerate(out[:, width:].tolist()):
            yield now, index, row[done:count]
        done = count


if __name__ == "__main__":
    protocol.serve(start)
