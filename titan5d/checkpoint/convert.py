"""Checkpoints of ours <-> folders in Hugging Face's format, without a run. One tensor is in memory at a time."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from titan5d.checkpoint.errors import CheckpointRefused, Damaged
from titan5d.checkpoint.hugging_face import (
    FILE_BYTES,
    HuggingFaceSource,
    args_of,
    cut_into_files,
    entries,
    read_hf_config,
    write_description,
    write_weights,
)
from titan5d.checkpoint.manifest import Chunk, Manifest, StoredTensor, read_manifest, verify, write_manifest
from titan5d.checkpoint.source import CheckpointSource
from titan5d.checkpoint.state import KEEP_TYPE
from titan5d.checkpoint.tensor_file import CODES, FileRecord, Spec, flush_folder, write_tensor_file
from titan5d.models.args import ModelArgs
from titan5d.models.families import FAMILIES


def to_hugging_face_folder(
    checkpoint: Path,
    out: Path,
    dtype: str | None = None,
    tokenizer: str | None = None,
    limit: int = FILE_BYTES,
) -> dict[str, FileRecord]:
    """Writes the weights of a checkpoint for transformers. Returns the files' records.

    Raises CheckpointRefused, Damaged, OSError.
    """
    manifest = read_manifest(checkpoint)
    if manifest.kind == "hugging_face":
        raise CheckpointRefused([f"{checkpoint} is in Hugging Face's format already"])
    if problems := verify(checkpoint, manifest):
        raise Damaged("; ".join(problems))
    family, args = model_of(checkpoint, manifest.model)
    wanted = None if dtype is None else getattr(torch, dtype)
    source = CheckpointSource(checkpoint, manifest)
    files = cut_into_files(entries(source, FAMILIES[family].hf_name_map(args), wanted), limit)
    partial = _begin(out)
    try:
        records = write_weights(source, files, partial) | write_description(
            files, family, args, tokenizer, partial
        )
    except ValueError as error:
        raise CheckpointRefused([str(error)]) from None
    _complete(partial, out)
    return records


def from_hugging_face(
    folder: Path, out: Path, dtype: str | None = None, limit: int = FILE_BYTES
) -> dict[str, FileRecord]:
    """Writes a folder's weights as a checkpoint of ours, step 0, to start runs from. Returns the files' records.

    Raises CheckpointRefused, Damaged, OSError.
    """
    family = family_of(read_hf_config(folder))
    args = args_of(folder, family)
    source = HuggingFaceSource(folder, FAMILIES[family].hf_name_map(args))
    manifest = Manifest(0, "weights", "converted", model={"name": family, "args": asdict(args)})
    wanted = None if dtype is None else getattr(torch, dtype)
    stored = {}
    for key, spec in source.specs().items():
        kept = wanted is None or not spec.dtype.is_floating_point or key.endswith(KEEP_TYPE)
        stored[key] = spec if kept or wanted is None else Spec(wanted, spec.shape)
    partial = _begin(out)

    def read(key: str) -> Tensor:
        whole = torch.empty(stored[key].shape, dtype=stored[key].dtype)
        source.read_into(key, (0,) * whole.dim(), whole)
        return whole

    for number, keys in enumerate(_groups(stored, limit)):
        file = f"weights-{number:05d}.safetensors"
        manifest.files[file] = write_tensor_file(partial / file, {key: stored[key] for key in keys}, read)
        for key in keys:
            spec = stored[key]
            chunk = Chunk(file, key, (0,) * len(spec.shape), spec.shape)
            manifest.tensors[key] = StoredTensor(CODES[spec.dtype], spec.shape, [chunk])
    write_manifest(partial, manifest)
    _complete(partial, out)
    return manifest.files


def model_of(checkpoint: Path, model: Mapping[str, Any]) -> tuple[str, ModelArgs]:
    """Family and sizes as a manifest has them. Raises CheckpointRefused."""
    try:
        family = model["name"]
        if family not in FAMILIES:
            raise CheckpointRefused([f"{checkpoint}: there is no model family {family!r}"])
        return family, TypeAdapter(ModelArgs).validate_python(model["args"])
    except (KeyError, TypeError, ValidationError) as error:
        raise CheckpointRefused([f"{checkpoint} does not say which model it holds: {error}"]) from None


def family_of(config: Mapping[str, Any]) -> str:
    """The family of a config.json. Raises CheckpointRefused naming those there are."""
    kinds = {
        "llama": "llama3",
        "mixtral": "mixtral",
        "qwen3": "qwen3",
        "qwen3_moe": "qwen3",
        "deepseek_v3": "deepseek_v3",
    }
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in kinds:
        raise CheckpointRefused([f"config.json: model_type = {kind!r}; there are {', '.join(kinds)}"])
    return kinds[kind]


def _groups(stored: Mapping[str, Spec], limit: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    size = 0
    for key, spec in stored.items():
        if groups[-1] and size + spec.bytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(key)
        size += spec.bytes
    return groups


def _begin(out: Path) -> Path:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointRefused([f"{out} exists and is not empty; name a new folder"])
    partial = out.with_name(f"{out.name}.partial-{secrets.token_hex(4)}")
    partial.mkdir(parents=True)
    return partial


def _complete(partial: Path, out: Path) -> None:
    """All at once: an interrupted conversion leaves no folder of that name."""
    flush_folder(partial)
    if out.exists():
        out.rmdir()
    partial.rename(out)
    flush_folder(out.parent)
