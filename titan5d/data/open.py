"""Opens a data set by the name it has in the TOML.

    dataset = "pysrc"
    dataset = "jsonl"          dataset_path = "/data/web/*.jsonl"
    dataset = "jsonl(content)" dataset_path = ...                       the text is under another key
    dataset = "text:/a.txt@0.7, jsonl:/b@0.3"                           a blend: NAME[:PATH]@WEIGHT, ...

Text is tokenized once into the cache (cache.py), so after opening there are two kinds: token shards and rows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from titan5d.data.blend import Blend
from titan5d.data.build import Log
from titan5d.data.cache import cached_shards
from titan5d.data.corpus import find_files
from titan5d.data.dataset import Dataset
from titan5d.data.errors import DataError
from titan5d.data.packing import PackedShards
from titan5d.data.pysrc import Split
from titan5d.data.rows import TokenRows
from titan5d.data.shards import TokenShards
from titan5d.data.sources import DEFAULT_KEY, KEYED_NAMES, TEXT_NAMES, text_source
from titan5d.data.tokenizer import Tokenizer

NAMES = (*TEXT_NAMES, "shards", "tokens")


@dataclass(frozen=True)
class DatasetSpec:
    """One data set as named in the TOML; weight is None outside blends."""

    name: str
    key: str
    path: str | None
    weight: float | None


def open_dataset(
    name: str,
    path: str | None,
    tokenizer: Tokenizer,
    seq_len: int,
    cache_dir: Path | None = None,
    split: Split = "train",
    document_mask: bool = True,
    workers: int | None = None,
    log: Log = print,
) -> Dataset:
    """The data set `name` at `path`, as rows of `seq_len` tokens.

    cache_dir: where tokenized text is kept (default ~/.cache/titan5d/data). split: matters for `pysrc` (holds one
    percent out) and `hub`; elsewhere the path says what is read. workers: processes that tokenize, default one
    per core. log: gets one line per event; pass one that does nothing on all ranks but one.

    Raises DataError naming what is wrong with name, path, file or line.
    """
    specs = parse_datasets(name, path)
    parts = [
        _open_one(spec, tokenizer, seq_len, cache_dir, split, document_mask, workers, log) for spec in specs
    ]
    dataset: Dataset = (
        parts[0] if specs[0].weight is None else Blend(parts, [spec.weight or 0.0 for spec in specs])
    )
    log(f"data: {split} on {dataset.description}; fingerprint {dataset.fingerprint}")
    return dataset


def check_dataset_against_model(dataset: Dataset, model_vocab_size: int) -> None:
    """Raises DataError when the data holds a token id for which the model has no row; names both numbers."""
    if dataset.max_token_id >= model_vocab_size:
        raise DataError(
            f"the data holds token id {dataset.max_token_id}, but model.vocab_size = {model_vocab_size} has rows "
            f"0..{model_vocab_size - 1} only. Set model.vocab_size to at least {dataset.max_token_id + 1}. "
            f"Data set: {dataset.description}"
        )


def parse_datasets(name: str, path: str | None) -> list[DatasetSpec]:
    """The parts of a `dataset` entry: one without weight, or a blend whose parts all have one."""
    parts = [part.strip() for part in name.split(",")]
    if len(parts) == 1 and "@" not in name and ":" not in name:
        return [_parse_one(name.strip(), path, None)]
    if path:
        raise DataError(f"dataset = {name!r} names its paths itself; dataset_path = {path!r} must go")
    specs = []
    for part in parts:
        head, _, tail = part.rpartition("@")
        weight = _number(tail) if head else None
        if weight is None and len(parts) > 1:
            raise DataError(
                f"dataset = {name!r}: {part!r} has no weight; a blend reads NAME:PATH@WEIGHT, NAME:PATH@WEIGHT, ..."
            )
        named, _, where = (head if weight is not None else part).partition(":")
        specs.append(_parse_one(named.strip(), where.strip() or None, weight))
    return specs


def _parse_one(name: str, path: str | None, weight: float | None) -> DatasetSpec:
    match = re.fullmatch(r"(\w+)(?:\((.+)\))?", name)
    if match is None or match[1] not in NAMES:
        hub = f'. For the hub: dataset = "hub", dataset_path = "{name}"' if "/" in name else ""
        raise DataError(f"unknown data set {name!r}: choose from {', '.join(NAMES)}{hub}")
    if match[2] and match[1] not in KEYED_NAMES:
        raise DataError(f"data set {name!r}: only {', '.join(KEYED_NAMES)} take a key in parentheses")
    return DatasetSpec(match[1], match[2] or DEFAULT_KEY, path, weight)


def _open_one(
    spec: DatasetSpec,
    tokenizer: Tokenizer,
    seq_len: int,
    cache_dir: Path | None,
    split: Split,
    document_mask: bool,
    workers: int | None,
    log: Log,
) -> Dataset:
    if spec.name == "tokens":
        return TokenRows(find_files(spec.path, (".jsonl", ".json")), seq_len, document_mask)
    if spec.name == "shards":
        if not spec.path:
            raise DataError("the data set `shards` needs dataset_path: a folder made by `titan5d data build`")
        shards = TokenShards(Path(spec.path).expanduser())
        built_with = shards.meta["tokenizer"]
        if built_with["fingerprint"] != tokenizer.fingerprint:
            raise DataError(
                f"the shards in {spec.path} were made with the tokenizer {built_with['name']} "
                f"({built_with['fingerprint']}), the run uses {tokenizer.name} ({tokenizer.fingerprint}): set "
                "model.tokenizer_path to the former or build the shards again"
            )
    else:
        source = text_source(spec.name, spec.path, spec.key, split)
        shards = cached_shards(source, tokenizer, cache_dir, workers, log)
    return PackedShards(shards, seq_len, document_mask)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
