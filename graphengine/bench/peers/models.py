"""The same weights in the form that a peer reads, made once and kept in the cache.

vLLM reads Hugging Face directories, llama.cpp .gguf files in the dtype that they are run in. Owns
the two conversions, by transformers and by llama.cpp's own tool.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import save_file

from capture.cache import cache_dir, cache_key, writable_dir
from graphengine.bench.peers.process import PeerPlace
from graphengine.models.locate import ModelLocation

_QUANTIZE: Final = "llama-quantize"
_DTYPES: Final = {"bfloat16": "BF16", "float32": "F32"}
_DONE: Final = "done"  # the last file that is written


def peer_model(place: PeerPlace, location: ModelLocation, dtype: str) -> Path:
    """The checkpoint for a peer.

    Args:
        location: ours.
        dtype: that everybody runs in.

    Raises:
        ValueError: it cannot be had in the form that the peer reads.
    """
    if place.name == "vllm" and location.kind == "gguf":
        return _kept(location.path, dtype, "hf", _as_directory)
    if place.name == "llama.cpp":
        if location.kind != "gguf":
            raise ValueError(
                f"--against llama.cpp: it reads .gguf files, and the model is {location.path}"
            )
        return _kept(location.path, dtype, "gguf", partial(_requantize, place)) / "model.gguf"
    return location.path


Make = Callable[[Path, Path, str], None]  # source, folder to write to, dtype


def _kept(source: Path, dtype: str, form: str, make: Make) -> Path:
    facts = source.stat()
    key = cache_key(
        {
            "source": str(source),
            "bytes": facts.st_size,
            "time": facts.st_mtime_ns,
            "dtype": dtype,
            "form": form,
        }
    )
    folder = writable_dir(cache_dir() / "peer_models" / key)
    if not (folder / _DONE).exists():
        make(source, folder, dtype)
        (folder / _DONE).touch()
    return folder


def _as_directory(source: Path, folder: Path, dtype: str) -> None:
    """A .gguf file as a Hugging Face directory without a tokenizer: prompts are token ids."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=getattr(torch, dtype)
    )
    config = model.config.to_dict()
    config.pop("quantization_config", None)  # of the file that these weights came out of
    config |= {"architectures": [type(model).__name__], "dtype": dtype}
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")


def _requantize(place: PeerPlace, source: Path, folder: Path, dtype: str) -> None:
    """A .gguf file in another encoding."""
    tool = shutil.which(_QUANTIZE, path=None if place.path is None else str(place.path))
    if tool is None:
        raise ValueError(f"--against llama.cpp: there is no {_QUANTIZE} beside llama-server")
    target = folder / "model.gguf"
    command = [tool, "--allow-requantize", str(source), str(target), _DTYPES[dtype]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{_QUANTIZE} failed: {done.stderr.strip()[-300:]}")
