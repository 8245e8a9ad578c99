"""manifest.json: what a checkpoint holds, where, and the checksum of every file. Written last: without it, none.

    {"crc32": of the rest, "checkpoint": {
        "format": 1, "step": 400, "kind": "full", "layout": "...", "optimizer": "AdamW", "data": {...}, "run": {...},
        "model":   {"name": "llama3", "args": {...}},
        "tensors": {"model.layers.0.attention.wq.weight": {"dtype": "F32", "shape": [64, 64], "chunks":
                       [{"file": "rank-00000.safetensors", "name": "...", "offset": [0, 0], "shape": [32, 64]}, ...]}},
        "files":   {"rank-00000.safetensors": {"bytes": 1234, "crc32": 567}}}}

Plain JSON on purpose: the index of torch.distributed.checkpoint is a pickle, which runs whatever it is told to.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from titan5d.checkpoint.errors import Damaged
from titan5d.checkpoint.tensor_file import DTYPES, FileRecord, checksum_of, write_text

NAME = "manifest.json"
FORMAT = 1
Kind = Literal["full", "weights", "hugging_face"]


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor: where it lies in the whole, and under which name in which file."""

    file: str
    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """dtype: safetensors' code. shape: of the whole. chunks: disjoint blocks that make it up."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[Chunk]


@dataclass(frozen=True)
class Manifest:
    """A complete checkpoint.

    Attributes:
        step: the last optimizer step in it.
        kind: everything to go on with, the weights alone, or the weights in Hugging Face's format.
        layout: the degrees it was saved with, for people and for the random generators.
        optimizer: name of the rule whose state it holds; empty without.
        data: the loader's state; empty without.
        run: counters of the run so far.
        model: family and sizes.
        tensors: by key `model.<name>`, `optimizer.<field>.<name>` or `generators.<rank>.<field>`.
        files: every other file of the folder.
    """

    step: int
    kind: Kind
    layout: str = ""
    optimizer: str = ""
    data: dict[str, Any] = field(default_factory=dict)
    run: dict[str, float] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    format: int = FORMAT


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Marks the checkpoint in `folder` as complete. Raises OSError with the path."""
    body = asdict(manifest)
    text = json.dumps({"crc32": _checksum(body), "checkpoint": body}, separators=(",", ":"))
    write_text(folder / NAME, text)


def read_manifest(folder: Path) -> Manifest:
    """Reads what a checkpoint holds. Raises Damaged, naming the file, when it is not as it was written."""
    path = folder / NAME
    try:
        content = json.loads(path.read_bytes())
        body = content["checkpoint"]
        intact = content["crc32"] == _checksum(body)
    except FileNotFoundError:
        raise Damaged(_incomplete(folder)) from None
    except OSError as error:
        raise Damaged(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Damaged(f"{path} is no manifest of a checkpoint") from None
    if not intact:
        raise Damaged(f"{path} has changed since it was written (its checksum does not fit)")
    if body.get("format") != FORMAT:
        raise Damaged(f"{path} has format {body.get('format')!r}; this version reads format {FORMAT}")
    try:
        manifest = TypeAdapter(Manifest).validate_python(body)
    except ValidationError as error:
        raise Damaged(f"{path}: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from None
    files = {chunk.file for stored in manifest.tensors.values() for chunk in stored.chunks}
    for name in [*manifest.files, *files]:
        if Path(name).name != name or name not in manifest.files:  # never leave the folder
            raise Damaged(f"{path} names a file it may not: {name!r}")
    for key, stored in manifest.tensors.items():
        if stored.dtype not in DTYPES:
            raise Damaged(f"{path}: {key} has the unknown type {stored.dtype!r}")
    return manifest


def _incomplete(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: no such folder"
    if (folder / ".metadata").exists():
        return (
            f"{folder} is a torch.distributed.checkpoint folder: its .metadata is a pickle, which could run anything"
            " and is not read; bring its weights over as Hugging Face safetensors (checkpoint.initial_load_in_hf)"
        )
    return f"{folder} has no {NAME}: it was never completed, or is no checkpoint"


def _checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def missing_or_short(folder: Path, manifest: Manifest) -> list[str]:
    """Problems that need no reading: files that are gone or have another length."""
    problems = []
    for name, record in manifest.files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{path} is missing")
        elif path.stat().st_size != record.bytes:
            problems.append(f"{path} has {path.stat().st_size:,} bytes, {record.bytes:,} were written")
    return problems


def verify(folder: Path, manifest: Manifest, part: int = 0, parts: int = 1) -> list[str]:
    """Reads the files and compares their checksums: of `parts` readers, each takes every so many-th file."""
    problems = missing_or_short(folder, manifest)
    if problems:
        return problems
    for name in sorted(manifest.files)[part::parts]:
        try:
            if checksum_of(folder / name) != manifest.files[name]:
                problems.append(
                    f"{folder / name} has changed since it was written (its checksum does not fit)"
                )
        except OSError as error:
            problems.append(f"{error.filename}: {error.strerror}")
    return problems
