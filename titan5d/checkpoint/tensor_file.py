"""Tensors in one file, in the safetensors format: written piece by piece, read slice by slice.

    8 bytes: length n    n bytes: JSON {name: {dtype, shape, data_offsets}}    the tensors' bytes, one after the other

Nothing in such a file can run. The safetensors package writes only what is all in memory, twice; this writer holds one
tensor at a time, sums up a checksum on the way, and returns when the bytes are on the disk.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Spec:
    """Type and shape of a tensor that is yet to be read or made."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


@dataclass(frozen=True)
class FileRecord:
    """Length in bytes and CRC-32 of a file, as it was written."""

    bytes: int
    crc32: int


def write_tensor_file(path: Path, specs: Mapping[str, Spec], produce: Callable[[str], Tensor]) -> FileRecord:
    """Writes the tensors `produce(name)` for every name of `specs`, one at a time, and flushes them to the disk.

    Raises OSError with the path; ValueError when a tensor is not what its spec says.
    """
    # Wide types first, so that every tensor starts at a multiple of its element size
    order = sorted(specs, key=lambda name: -specs[name].dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        start, end = end, end + specs[name].bytes
        header[name] = {
            "dtype": CODES[specs[name].dtype],
            "shape": list(specs[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start_of_file = len(text).to_bytes(8, "little") + text
    checksum = zlib.crc32(start_of_file)
    try:
        with path.open("wb") as out:
            out.write(start_of_file)
            for name in order:
                raw = _bytes(name, produce(name), specs[name])
                checksum = zlib.crc32(raw, checksum)
                out.write(raw)
                del raw  # and with it the tensor, before the next one is made
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        raise with_path(error, path) from error
    return FileRecord(len(start_of_file) + end, checksum)


def _bytes(name: str, tensor: Tensor, spec: Spec) -> memoryview:
    if Spec(tensor.dtype, tuple(tensor.shape)) != spec:
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {spec}")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def checksum_of(path: Path) -> FileRecord:
    """Reads a whole file. Raises OSError with the path."""
    checksum, length = 0, 0
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 22):
                checksum = zlib.crc32(piece, checksum)
                length += len(piece)
    except OSError as error:
        raise with_path(error, path) from error
    return FileRecord(length, checksum)


def write_text(path: Path, text: str) -> FileRecord:
    """Writes a small file and flushes it to the disk. Raises OSError with the path."""
    raw = text.encode()
    try:
        with path.open("wb") as out:
            out.write(raw)
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        raise with_path(error, path) from error
    return FileRecord(len(raw), zlib.crc32(raw))


def flush_folder(folder: Path) -> None:
    """Flushes the names in a folder to the disk: a file is found again only then."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def with_path(error: OSError, path: Path) -> OSError:
    """The same error, naming the file: the write that fails does not know it."""
    return OSError(error.errno, error.strerror, str(path))
