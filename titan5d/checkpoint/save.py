"""Saving: each block is written by one of the ranks that hold it, each rank into one file of its own.

    all ranks    rank-0000r.safetensors   ->   checksums to rank 0
    rank 0       manifest.json            ->   flushed, then the folder gets its name

    step-8.partial-1a2b3c4d/                                   step-8/

A crash at any moment leaves an incomplete folder under another name, or the complete one. Who writes what is settled
once: blocks that several ranks hold (replicas) are shared out so that all write about the same number of bytes.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from titan5d.checkpoint.agreement import Agreement
from titan5d.checkpoint.errors import SaveFailed
from titan5d.checkpoint.folder import complete, partial_name
from titan5d.checkpoint.manifest import Chunk, Manifest, StoredTensor, write_manifest
from titan5d.checkpoint.state import KEEP_TYPE, Block
from titan5d.checkpoint.tensor_file import CODES, FileRecord, Spec, write_tensor_file

Home = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Written:
    """What one rank has put on the disk, or why it could not."""

    files: dict[str, FileRecord] = field(default_factory=dict)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def share_out(blocks: Sequence[Block], agreement: Agreement) -> set[Home]:
    """Which of its blocks this rank writes: each block has one writer, and writers have equal work. Collective."""
    mine = {(block.key, block.offset): block.local.nbytes for block in blocks}
    holders: dict[Home, list[int]] = {}
    sizes: dict[Home, int] = {}
    for rank, theirs in enumerate(agreement.gather(mine)):
        for home, size in theirs.items():
            holders.setdefault(home, []).append(rank)
            sizes[home] = size
    load = [0] * agreement.ranks
    chosen: set[Home] = set()
    for home in sorted(holders, key=lambda home: (-sizes[home], home)):
        writer = min(holders[home], key=lambda rank: (load[rank], rank))
        load[writer] += sizes[home]
        if writer == agreement.rank:
            chosen.add(home)
    return chosen


def blocks_to_write(blocks: Sequence[Block], chosen: set[Home]) -> dict[str, Block]:
    """This rank's share under the names in its file."""
    return {_name(block): block for block in blocks if block.home in chosen}


def _name(block: Block) -> str:
    if tuple(block.local.shape) == block.shape:
        return block.key
    return f"{block.key}@{','.join(map(str, block.offset))}"


def write_share(
    partial: Path,
    rank: int,
    blocks: Mapping[str, Block],
    dtype: torch.dtype | None,
    copies: Mapping[str, Tensor],
) -> Written:
    """Writes this rank's file; problems are returned, not raised, since the other ranks must hear of them.

    Args:
        dtype: type of the written weights; None = as they are.
        copies: what to write instead of the live memory, by name.
    """
    file = f"rank-{rank:05d}.safetensors"
    if not blocks:
        return Written()

    def stored_dtype(block: Block) -> torch.dtype:
        weights = block.key.startswith("model.") and not block.key.endswith(KEEP_TYPE)
        weights = weights and block.local.is_floating_point()
        return dtype if dtype is not None and weights else block.local.dtype

    specs = {name: Spec(stored_dtype(block), tuple(block.local.shape)) for name, block in blocks.items()}
    try:
        record = write_tensor_file(
            partial / file, specs, lambda name: copies.get(name, blocks[name].local).to(specs[name].dtype)
        )
    except OSError as error:
        return Written(problems=[f"{error.filename}: {error.strerror} (errno {error.errno})"])
    tensors = dict[str, StoredTensor]()
    for name, block in blocks.items():
        chunk = Chunk(file, name, block.offset, specs[name].shape)
        tensors[block.key] = _added(tensors.get(block.key), CODES[specs[name].dtype], block.shape, chunk)
    return Written({file: record}, tensors)


def _added(there: StoredTensor | None, code: str, shape: tuple[int, ...], chunk: Chunk) -> StoredTensor:
    return StoredTensor(code, shape, [*(there.chunks if there else []), chunk])


def begin(folder: Path, step: int, agreement: Agreement) -> Path:
    """Makes the folder that all ranks write into. Collective. Raises SaveFailed on all ranks."""
    partial = agreement.from_rank_0(folder / partial_name(step))
    problems = []
    if agreement.rank == 0:
        try:
            partial.mkdir(parents=True)
        except OSError as error:
            problems.append(f"{partial}: {error.strerror} (errno {error.errno})")
    if problems := agreement.problems(problems):
        raise SaveFailed(_failed(step, problems))
    return partial


def finish(partial: Path, manifest: Manifest, written: Written, agreement: Agreement) -> None:
    """Completes the checkpoint of which every rank has `written` its share. Collective. Raises SaveFailed on all ranks.

    Args:
        manifest: without its tensors and files.
    """
    step = manifest.step
    parts = agreement.gather(written)
    problems = [f"rank {rank}: {one}" for rank, part in enumerate(parts) for one in part.problems]
    if agreement.rank == 0 and not problems:
        for part in parts:
            manifest.files.update(part.files)
            for key, stored in part.tensors.items():
                there = manifest.tensors.setdefault(key, StoredTensor(stored.dtype, stored.shape, []))
                there.chunks.extend(stored.chunks)
        try:
            write_manifest(partial, manifest)
            complete(partial, step)
        except OSError as error:
            problems = [f"{error.filename}: {error.strerror} (errno {error.errno})"]
    problems = agreement.from_rank_0(problems)
    if problems:
        if agreement.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise SaveFailed(_failed(step, problems))


def _failed(step: int, problems: list[str]) -> str:
    return f"the checkpoint of step {step} could not be saved: {'; '.join(problems)}"
