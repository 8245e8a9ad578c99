"""Weights in Hugging Face's format, in and out: safetensors files, their index, config.json, the tokenizer's files.

    model.layers.0.attention.wq.weight       model.layers.0.self_attn.q_proj.weight          the same values
    model.layers.0.feed_forward.experts.w1   ...experts.0.gate_proj.weight, ...experts.1...  a stack, one by one

Names come from the family's file in models/. Values never move: the rotary layout is Hugging Face's. A tied head is
written once, under the embedding's name. Both directions hold one tensor at a time (of a stack: one expert).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from math import isclose
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan5d.checkpoint.agreement import Agreement
from titan5d.checkpoint.errors import CheckpointRefused, Damaged
from titan5d.checkpoint.source import Source, TensorFiles, read_whole
from titan5d.checkpoint.state import KEEP_TYPE
from titan5d.checkpoint.tensor_file import FileRecord, Spec, write_tensor_file, write_text
from titan5d.checkpoint.tokenizer_files import write_tokenizer
from titan5d.models.args import ModelArgs
from titan5d.models.families import FAMILIES

MAY_LACK = (".router.load", ".router.bias")
"""Ends of names that imported weights may lack: a router then starts as one that has not trained."""
INDEX = "model.safetensors.index.json"
FILE_BYTES = 5 * 10**9
"""Largest file written, unless one tensor alone is larger; what the Hub recommends."""
Names = Mapping[str, str | tuple[str, ...]]


@dataclass(frozen=True)
class Entry:
    """One tensor of the written files: our key, and its place in a stack if it comes from one."""

    name: str
    key: str
    place: int | None
    spec: Spec


def entries(source: Source, names: Names, dtype: torch.dtype | None) -> list[Entry]:
    """What the files will hold, in the order of the model.

    Raises CheckpointRefused when a weight has no name in Hugging Face's format, or is missing.
    """
    specs = {key: spec for key, spec in source.specs().items() if key.startswith("model.")}
    problems = [f"model.{ours} is missing" for ours in names if f"model.{ours}" not in specs]
    for key in specs:
        if key.removeprefix("model.") in names or key.endswith(".router.load"):
            continue
        if not (key.endswith(".router.bias") and not read_whole(source, key).any()):
            problems.append(f"{key} has no name in Hugging Face's format of this family, and is not zero")
    if problems:
        raise CheckpointRefused([f"this model cannot be exported: {'; '.join(problems[:5])}"])
    found = []
    for ours, theirs in names.items():
        spec = specs[f"model.{ours}"]
        kept = dtype is None or not spec.dtype.is_floating_point or ours.endswith(KEEP_TYPE)
        stored = spec.dtype if kept or dtype is None else dtype
        if isinstance(theirs, str):
            found.append(Entry(theirs, f"model.{ours}", None, Spec(stored, spec.shape)))
        else:
            one = Spec(stored, spec.shape[1:])
            found += [Entry(name, f"model.{ours}", place, one) for place, name in enumerate(theirs)]
    return found


def cut_into_files(found: Sequence[Entry], limit: int = FILE_BYTES) -> dict[str, list[Entry]]:
    """File name -> its tensors, in order, at most `limit` bytes each."""
    files: list[list[Entry]] = [[]]
    size = 0
    for entry in found:
        if files[-1] and size + entry.spec.bytes > limit:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.spec.bytes
    return {f"model-{n:05d}-of-{len(files):05d}.safetensors": one for n, one in enumerate(files, 1)}


def write_weights(
    source: Source, files: Mapping[str, Sequence[Entry]], folder: Path, part: int = 0, parts: int = 1
) -> dict[str, FileRecord]:
    """Writes the files that fall to this writer of `parts`. Raises OSError, Damaged."""
    records = {}
    for file in sorted(files)[part::parts]:
        by_name = {entry.name: entry for entry in files[file]}
        specs = {name: entry.spec for name, entry in by_name.items()}
        records[file] = write_tensor_file(folder / file, specs, partial(_read, source, by_name))
    return records


def _read(source: Source, by_name: Mapping[str, Entry], name: str) -> Tensor:
    entry = by_name[name]
    whole = torch.empty(entry.spec.shape, dtype=entry.spec.dtype)
    start = (0,) * whole.dim()
    if entry.place is None:
        source.read_into(entry.key, start, whole)
    else:
        source.read_into(entry.key, (entry.place, *start), whole[None])
    return whole


def write_description(
    files: Mapping[str, Sequence[Entry]], family: str, args: ModelArgs, tokenizer: str | None, folder: Path
) -> dict[str, FileRecord]:
    """Writes everything but the weights: index, config.json, tokenizer. Raises OSError, ValueError."""
    listed = [(entry, file) for file, found in files.items() for entry in found]
    index = {
        "metadata": {"total_size": sum(entry.spec.bytes for entry, _ in listed)},
        "weight_map": {entry.name: file for entry, file in listed},
    }
    dtype = str(listed[0][0].spec.dtype).removeprefix("torch.")
    described = FAMILIES[family].to_hf_config(args)
    records, ends = dict[str, FileRecord](), dict[str, int]()
    if tokenizer is not None:
        records, ends = write_tokenizer(tokenizer, folder)
    config = described | {"torch_dtype": dtype} | ends
    records[INDEX] = write_text(folder / INDEX, json.dumps(index, indent=1))
    records["config.json"] = write_text(folder / "config.json", json.dumps(config, indent=2))
    return records


class HuggingFaceSource:
    """A folder of safetensors as a source under our keys.

    Raises CheckpointRefused when the folder has no safetensors, or lacks some of the weights.
    """

    def __init__(self, folder: Path, names: Names) -> None:
        self._files = TensorFiles(folder)
        self._names = {f"model.{ours}": theirs for ours, theirs in names.items()}
        self._where: dict[str, str] = {}
        self._specs: dict[str, Spec] = {}
        there: dict[str, Spec] = {}
        for file in weight_files(folder):
            for name, spec in self._files.names(file).items():
                there[name], self._where[name] = spec, file
        missing = []
        for ours, theirs in self._names.items():
            parts = [theirs] if isinstance(theirs, str) else list(theirs)
            absent = [name for name in parts if name not in there]
            if absent:
                missing += [] if ours.endswith(MAY_LACK) else absent
                continue
            first = there[parts[0]]
            shape = first.shape if isinstance(theirs, str) else (len(parts), *first.shape)
            self._specs[ours] = Spec(first.dtype, shape)
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise CheckpointRefused([f"{folder} has no {', '.join(missing[:5])}{more}"])

    def specs(self) -> dict[str, Spec]:
        return self._specs

    def read_into(self, key: str, offset: Sequence[int], local: Tensor) -> None:
        theirs = self._names[key]
        region = tuple(slice(start, start + n) for start, n in zip(offset, local.shape, strict=True))
        if isinstance(theirs, str):
            local.copy_(self._files.slice(self._where[theirs], theirs, region))
            return
        for place, one in zip(range(region[0].start, region[0].stop), local, strict=True):
            name = theirs[place]
            one.copy_(self._files.slice(self._where[name], name, region[1:]))


def weight_files(folder: Path) -> list[str]:
    """The safetensors files of a folder. Raises CheckpointRefused when there are none."""
    if (folder / INDEX).is_file():
        try:
            files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise CheckpointRefused([f"{folder / INDEX} is no index of safetensors files"]) from None
        if any(not isinstance(file, str) or Path(file).name != file for file in files):
            raise CheckpointRefused([f"{folder / INDEX} names files outside of its folder"])
        if missing := [file for file in files if not (folder / file).is_file()]:
            raise CheckpointRefused([f"{folder} has no {', '.join(missing[:5])}, which its index names"])
        return files
    files = sorted(path.name for path in folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        pickled = sorted(path.name for path in folder.glob("*.bin")) if folder.is_dir() else []
        why = (
            f" ({', '.join(pickled[:3])}: pickles, which could run anything, are not read)" if pickled else ""
        )
        raise CheckpointRefused([f"{folder} holds no safetensors files{why}"])
    return files


def read_hf_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder. Raises CheckpointRefused."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointRefused([f"{folder / 'config.json'}: {error.strerror}"]) from None
    except ValueError as error:
        raise CheckpointRefused([f"{folder / 'config.json'} is no JSON: {error}"]) from None
    if not isinstance(config, dict):
        raise CheckpointRefused([f"{folder / 'config.json'} is no JSON object"])
    if "quantization_config" in config:
        raise CheckpointRefused(
            [f"{folder} holds quantized weights, which are not read; use the unquantized model"]
        )
    return config


def args_of(folder: Path, family: str) -> ModelArgs:
    """The sizes in a folder's config.json. Raises CheckpointRefused."""
    try:
        return FAMILIES[family].from_hf_config(read_hf_config(folder))
    except ValueError as error:
        raise CheckpointRefused([f"{folder}: {line}" for line in str(error).splitlines()]) from None


def _same(theirs: Any, ours: Any) -> bool:
    """Equal, numbers up to the digits that a config.json has."""
    if is_dataclass(theirs) and type(theirs) is type(ours):
        return all(_same(getattr(theirs, one.name), getattr(ours, one.name)) for one in fields(theirs))
    if isinstance(theirs, float) and isinstance(ours, float):
        return isclose(theirs, ours, rel_tol=1e-9)
    return bool(theirs == ours)


def open_hugging_face(folder: Path, family: str, args: ModelArgs, agreement: Agreement) -> HuggingFaceSource:
    """The weights of a folder for a run's model. Collective. Raises CheckpointRefused on all ranks."""
    problems, source = list[str](), None
    try:
        theirs = args_of(folder, family)
        problems += [
            f"{folder / 'config.json'} has {one.name} = {getattr(theirs, one.name)!r}, this run"
            f" {getattr(args, one.name)!r}"
            for one in fields(ModelArgs)
            if one.name not in ("balance", "max_seq_len")
            and not _same(getattr(theirs, one.name), getattr(args, one.name))
        ]
        if not problems:
            source = HuggingFaceSource(folder, FAMILIES[family].hf_name_map(args))
    except CheckpointRefused as refused:
        problems += refused.problems
    except Damaged as error:
        problems.append(str(error))
    problems = agreement.problems(problems)
    if problems or source is None:
        raise CheckpointRefused(problems)
    return source
