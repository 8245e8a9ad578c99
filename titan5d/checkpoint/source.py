"""Where tensors are read from: a complete checkpoint of ours here, Hugging Face's files in hugging_face.py.

A reader asks for a block of a tensor and gets it from whatever blocks were saved:

    saved by two ranks       [ 0 0 0 0 | 1 1 1 1 ]
    wanted by rank 1 of 3    [ . . . 0 | 1 1 . . ]        only these bytes are read
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from titan5d.checkpoint.errors import Damaged
from titan5d.checkpoint.manifest import Chunk, Manifest
from titan5d.checkpoint.tensor_file import DTYPES, Spec


class Source(Protocol):
    """Tensors by key."""

    def specs(self) -> dict[str, Spec]:
        """Type and shape of every tensor there is."""
        ...

    def read_into(self, key: str, offset: Sequence[int], local: Tensor) -> None:
        """Fills `local` with the block of that shape at `offset`, converted to its type. Raises Damaged."""
        ...


class TensorFiles:
    """Open safetensors files of one folder, each opened at its first use and mapped, not read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}

    def slice(self, file: str, name: str, region: tuple[slice, ...]) -> Tensor:
        """One region of one tensor. Raises Damaged, naming the file, when it cannot be read."""
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            if not region:
                return self._open[file].get_tensor(name)
            return self._open[file].get_slice(name)[region]
        except (SafetensorError, OSError) as error:
            raise Damaged(f"{self.folder / file}: {error}") from None

    def names(self, file: str) -> dict[str, Spec]:
        """What is in a file. Raises Damaged."""
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            found = {}
            for name in self._open[file].keys():  # noqa: SIM118  no mapping
                part = self._open[file].get_slice(name)
                if part.get_dtype() not in DTYPES:
                    raise Damaged(f"{self.folder / file}: {name} has the unknown type {part.get_dtype()}")
                found[name] = Spec(DTYPES[part.get_dtype()], tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise Damaged(f"{self.folder / file}: {error}") from None
        return found


class CheckpointSource:
    """A checkpoint of ours. Its files are not verified here (manifest.verify does)."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._files = TensorFiles(folder)

    def specs(self) -> dict[str, Spec]:
        return {key: Spec(DTYPES[one.dtype], one.shape) for key, one in self.manifest.tensors.items()}

    def read_into(self, key: str, offset: Sequence[int], local: Tensor) -> None:
        filled = 0
        for chunk, there, here in overlaps(self.manifest.tensors[key].chunks, offset, local.shape):
            part = self._files.slice(chunk.file, chunk.name, there)
            local[here].copy_(part)
            filled += part.numel()
        if filled != local.numel():
            raise Damaged(
                f"{self._files.folder}: {key} has {filled} of the {local.numel()} elements at {tuple(offset)}"
            )


def overlaps(
    chunks: Sequence[Chunk], offset: Sequence[int], shape: Sequence[int]
) -> Iterator[tuple[Chunk, tuple[slice, ...], tuple[slice, ...]]]:
    """Chunks that meet the block, with the region they share: in the chunk, and in the block."""
    for chunk in chunks:
        starts = [max(a, b) for a, b in zip(chunk.offset, offset, strict=True)]
        ends = [
            min(a + n, b + m) for a, n, b, m in zip(chunk.offset, chunk.shape, offset, shape, strict=True)
        ]
        if all(start < end for start, end in zip(starts, ends, strict=True)):
            there = tuple(slice(s - a, e - a) for s, e, a in zip(starts, ends, chunk.offset, strict=True))
            here = tuple(slice(s - b, e - b) for s, e, b in zip(starts, ends, offset, strict=True))
            yield chunk, there, here


def read_whole(source: Source, key: str) -> Tensor:
    """One tensor, all of it, in the type it is stored in."""
    spec = source.specs()[key]
    whole = torch.empty(spec.shape, dtype=spec.dtype)
    source.read_into(key, (0,) * whole.dim(), whole)
    return whole
