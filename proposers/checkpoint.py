"""DraftCheckpoint: a directory of config.json and weights, as draft heads are published.

Reads safetensors, one file or shards, and `pytorch_model.bin`, of which nothing but tensors is
unpickled. Owns the accounting: every parameter gets its tensor, every tensor has a place. Knows no
architecture; whole models are opened by the engine.
"""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import safetensors
import torch

Tensor = torch.Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED_FILE = "pytorch_model.bin"
# Dtypes of parameters, as safetensors calls them.
FLOATS: Final = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# What torch.load raises, given bytes that it did not write.
UNREADABLE: Final = (
    pickle.UnpicklingError,
    RuntimeError,
    OSError,
    EOFError,
    LookupError,
    ValueError,
    struct.error,
)
WEIGHTS = Path(__file__).parent / "weights"
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """An opened checkpoint.

    Attributes:
        path: the directory.
        config: contents of its config.json.
        shapes: of every tensor, by name.
        dtypes: of every tensor, by name, as safetensors calls them.
        read: one tensor in its stored dtype, by name.
    """

    path: Path
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    read: Callable[[str], Tensor]

    @classmethod
    def open(cls, path: str | Path) -> DraftCheckpoint:
        """Read config.json and the headers of the weights.

        Args:
            path: a directory, or the name of a checkpoint that comes with the package
                (`shipped`).

        Raises:
            ValueError: nothing there, or a file that cannot be read; the message names it.
        """
        directory = Path(path).expanduser()
        if not directory.is_dir():
            directory = shipped().get(str(path), directory)
        if not directory.is_dir():
            raise ValueError(
                f"{str(path)!r} is no directory; expected one with config.json and {SINGLE_FILE} "
                f"or {PICKLED_FILE}, or the name of one that comes with the package: "
                f"{', '.join(shipped()) or 'none'}"
            )
        config = _read_json(directory / "config.json")
        files = _safetensors_files(directory)
        if files:
            headers, read = _open_safetensors(files)
        elif (directory / PICKLED_FILE).is_file():
            headers, read = _open_pickled(directory / PICKLED_FILE)
        else:
            raise ValueError(
                f"{directory} has no weights: neither {SINGLE_FILE}, {INDEX_FILE} nor "
                f"{PICKLED_FILE}"
            )
        shapes = {name: shape for name, (shape, _) in headers.items()}
        dtypes = {name: dtype for name, (_, dtype) in headers.items()}
        return cls(directory, config, shapes, dtypes, read)

    def check(
        self,
        destinations: Mapping[str, Tensor],
        *,
        ignores: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """Hold the headers to what is wanted; tensors may be on the meta device.

        Args:
            destinations: name in the checkpoint -> what it is to fill.
            ignores: names that may be there without a destination; default: all.

        Raises:
            ValueError: a destination without a tensor, a tensor without a destination, a shape that
                differs, or numbers that are stored as no float.
        """
        missing = [name for name in destinations if name not in self.shapes]
        if missing:
            raise ValueError(f"{self.path} lacks {len(missing)} parameters: {_some(missing)}")
        unused = [name for name in self.shapes if name not in destinations and not ignores(name)]
        if unused:
            raise ValueError(
                f"{self.path} holds {len(unused)} tensors that its architecture has no place for: "
                f"{_some(unused)}"
            )
        for name, tensor in destinations.items():
            if self.shapes[name] != tuple(tensor.shape):
                raise ValueError(
                    f"{self.path}: {name} has shape {list(self.shapes[name])}, its config and the "
                    f"target imply {list(tensor.shape)}"
                )
            if self.dtypes[name] not in FLOATS:  # a copy would cast it, without its scales
                raise ValueError(
                    f"{self.path}: {name} is stored as {self.dtypes[name]}; allowed are "
                    f"{', '.join(FLOATS)}: quantised checkpoints are not supported"
                )

    def load(
        self,
        destinations: Mapping[str, Tensor],
        *,
        ignores: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """Fill every destination, converting to its dtype.

        Args:
            destinations: name in the checkpoint -> the tensor or view to write.
            ignores: names that may be there without a destination.

        Raises:
            ValueError: as `check`; nothing has been read then.
        """
        self.check(destinations, ignores=ignores)
        with torch.no_grad():
            for name, tensor in destinations.items():
                tensor.copy_(self.read(name))


def shipped() -> dict[str, Path]:
    """Checkpoints that come with the package, by name."""
    folders = sorted(WEIGHTS.iterdir()) if WEIGHTS.is_dir() else []
    return {folder.name: folder for folder in folders if (folder / "config.json").is_file()}


def _safetensors_files(directory: Path) -> list[Path]:
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    if not (directory / INDEX_FILE).is_file():
        return []
    weight_map = _read_json(directory / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{directory / INDEX_FILE}: weight_map must be a non-empty object")
    names = sorted({str(name) for name in weight_map.values()})
    strange = [name for name in names if Path(name).name != name]
    if strange:
        raise ValueError(f"{directory / INDEX_FILE}: {strange[0]!r} is not a plain file name")
    return [directory / name for name in names]


# Shape and dtype of every tensor, by name, and what reads one.
Opened = tuple[dict[str, tuple[tuple[int, ...], str]], Callable[[str], Tensor]]


def _open_safetensors(files: Sequence[Path]) -> Opened:
    handles: dict[str, Any] = {}
    headers: dict[str, tuple[tuple[int, ...], str]] = {}
    for path in files:
        try:
            handle: Any = safetensors.safe_open(path, framework="pt")
        except (safetensors.SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from error
        for name in handle.keys():  # noqa: SIM118  (the handle is no mapping)
            if name in handles:
                raise ValueError(f"{path}: tensor {name} is in another shard too")
            handles[name], part = handle, handle.get_slice(name)
            headers[name] = tuple(part.get_shape()), part.get_dtype()
    return headers, lambda name: handles[name].get_tensor(name)


def _open_pickled(path: Path) -> Opened:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UNREADABLE as error:
        raise ValueError(f"{path} is not a file of tensors alone: {error}") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
    ):
        raise ValueError(f"{path} does not hold a state dict")
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise ValueError(f"{path}: {name} is {tensor.layout} on {tensor.device}: not numbers")
    called = {dtype: name for name, dtype in FLOATS.items()}
    headers = {
        name: (tuple(tensor.shape), called.get(tensor.dtype, str(tensor.dtype)))
        for name, tensor in tensors.items()
    }
    return headers, tensors.__getitem__


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return parsed


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
