"""A GGUF file's header (metadata and tensor table), and its tensors as memory-mapped bytes.

The `gguf` package's own reader builds a Python object for every entry of the vocabulary, which
takes seconds; this one takes a fraction of one. Knows the container only: no architectures and no
tensor names.
"""

import math
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32

_SCALARS = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: struct.Struct("<I"),
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.BOOL: struct.Struct("<?"),
    GGUFValueType.UINT64: struct.Struct("<Q"),
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
}
_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFTensor:
    """One row of the tensor table: where the tensor lies and how it is stored.

    `shape` is in PyTorch's order (slowest dimension first); `start` and `size` are in bytes of the
    file.
    """

    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    start: int
    size: int


class GGUFFile:
    """An open GGUF file.

    Attributes:
        path: The file.
        metadata: Every key of the header; arrays are lists.
        tensors: The tensor table by name, in file order.

    Raises:
        ValueError: Not a GGUF file, a version other than 2 or 3, a truncated file, one part of a
            split file, or a tensor encoding that the `gguf` package cannot dequantise.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.stat().st_size == 0:
            raise ValueError(f"{path} is empty, so it is not a GGUF file")
        self._bytes: npt.NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._parse(_Cursor(self._bytes.data))
        except (struct.error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is truncated or corrupt: {error}") from error
        if self.metadata.get("split.count", 1) > 1:
            raise ValueError(
                f"{path} is one of {self.metadata['split.count']} parts of a split GGUF, which is "
                "not supported; join them with `llama-gguf-split --merge`"
            )

    def read(self, name: str) -> torch.Tensor:
        """A copy of one tensor, dequantised to fp32; F32, F16 and BF16 keep their dtype."""
        entry = self.tensors[name]
        stored = self._bytes[entry.start : entry.start + entry.size]
        plain = _PLAIN.get(entry.quantization)
        if plain is not None:
            return torch.from_numpy(np.array(stored)).view(plain).reshape(entry.shape)
        return torch.from_numpy(dequantize(stored, entry.quantization)).reshape(entry.shape)

    def _parse(self, cursor: "_Cursor") -> None:
        if bytes(cursor.take(4)) != _MAGIC:
            raise ValueError(f"{self.path} does not start with 'GGUF', so it is not a GGUF file")
        version = cursor.scalar(GGUFValueType.UINT32)
        if version not in _VERSIONS:
            raise ValueError(f"{self.path} is GGUF version {version}; supported: 2, 3")
        num_tensors = cursor.scalar(GGUFValueType.UINT64)
        num_keys = cursor.scalar(GGUFValueType.UINT64)
        for _ in range(num_keys):
            key = cursor.string()
            self.metadata[key] = cursor.value(self._value_type(cursor))
        table = [self._table_row(cursor) for _ in range(num_tensors)]
        alignment = int(self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        if alignment < 1:
            raise ValueError(f"{self.path}: general.alignment is {alignment}, expected at least 1")
        data_start = -(-cursor.position // alignment) * alignment
        for name, shape, quantization, offset in table:
            self._add_tensor(name, shape, quantization, data_start + offset)

    def _table_row(
        self, cursor: "_Cursor"
    ) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = cursor.string()
        num_dims = cursor.scalar(GGUFValueType.UINT32)
        shape = tuple(cursor.scalar(GGUFValueType.UINT64) for _ in range(num_dims))[::-1]
        raw_type = cursor.scalar(GGUFValueType.UINT32)
        try:
            quantization = GGMLQuantizationType(raw_type)
        except ValueError:
            raise ValueError(
                f"{self.path}: tensor {name} has encoding {raw_type}, unknown to the installed "
                "gguf package; a newer gguf may know it"
            ) from None
        return name, shape, quantization, cursor.scalar(GGUFValueType.UINT64)

    def _add_tensor(
        self, name: str, shape: tuple[int, ...], quantization: GGMLQuantizationType, start: int
    ) -> None:
        if not _is_readable(quantization):
            raise ValueError(
                f"{self.path}: tensor {name} has encoding {quantization.name}, which cannot be "
                "dequantised; quantise the checkpoint otherwise, Q8_0 or Q4_K for instance"
            )
        block, block_bytes = GGML_QUANT_SIZES[quantization]
        if not shape or shape[-1] % block:
            raise ValueError(f"{self.path}: {name} {shape} does not fit {quantization.name} blocks")
        size = math.prod(shape) // block * block_bytes
        if start + size > self._bytes.size:
            raise ValueError(
                f"{self.path} is truncated: {name} ends at byte {start + size}, the file at "
                f"{self._bytes.size}"
            )
        if name in self.tensors:
            raise ValueError(f"{self.path}: tensor {name} appears twice")
        self.tensors[name] = GGUFTensor(
            shape=shape, quantization=quantization, start=start, size=size
        )

    def _value_type(self, cursor: "_Cursor") -> GGUFValueType:
        raw = cursor.scalar(GGUFValueType.UINT32)
        try:
            return GGUFValueType(raw)
        except ValueError:
            raise ValueError(f"{self.path} is corrupt: metadata value type {raw}") from None


@cache
def _is_readable(quantization: GGMLQuantizationType) -> bool:
    """Whether `GGUFFile.read` can: the gguf package knows the size of more than it dequantises."""
    if quantization in _PLAIN:
        return True
    block = np.zeros(GGML_QUANT_SIZES[quantization][1], dtype=np.uint8)
    try:
        dequantize(block, quantization)
    except NotImplementedError:  # how the gguf package says so; it has no list to ask
        return False
    return True


class _Cursor:
    """A read position in the header; short reads raise `struct.error`."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.position = 0

    def take(self, size: int) -> memoryview:
        end = self.position + size
        if end > len(self._view):
            raise struct.error(
                f"{size} bytes needed at {self.position}, file has {len(self._view)}"
            )
        piece = self._view[self.position : end]
        self.position = end
        return piece

    def scalar(self, kind: GGUFValueType) -> Any:
        codec = _SCALARS[kind]
        (value,) = codec.unpack_from(self._view, self.position)
        self.position += codec.size
        return value

    def string(self) -> str:
        return str(self.take(self.scalar(GGUFValueType.UINT64)), "utf-8")

    def value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            return self.scalar(kind)
        item = self.scalar(GGUFValueType.UINT32)
        if item not in (*_SCALARS, GGUFValueType.STRING):
            raise struct.error(f"array of metadata type {item} at {self.position}")
        count = self.scalar(GGUFValueType.UINT64)
        if item == GGUFValueType.STRING:
            return [self.string() for _ in range(count)]
        codec = _SCALARS[GGUFValueType(item)]
        flat = self.take(count * codec.size)
        return [value for (value,) in codec.iter_unpack(flat)]
