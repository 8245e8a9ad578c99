"""Token shards: what is read is what was written, and damage is found by size or checksum."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.data.corpora import marked_documents, shards_of
from titan5d.data.errors import DataError
from titan5d.data.shards import MAX_OPEN_SHARDS, TokenShards
from titan5d.data.tokenizer import ByteTokenizer

DOCUMENTS = [text[: 3 + 7 * i % 23] for i, text in enumerate(marked_documents(60, 30))]


def stream_of(documents: list[str]) -> tuple[list[int], list[int]]:
    """All tokens one after the other, and where each document starts."""
    tokens: list[int] = []
    starts = []
    for text in documents:
        starts.append(len(tokens))
        tokens += ByteTokenizer().with_ends(ByteTokenizer().encode(text))
    return tokens, starts


@pytest.mark.parametrize("piece_bytes", [40, 10_000])
def test_any_range_reads_back_across_shards(tmp_path: Path, piece_bytes: int) -> None:
    shards = shards_of(tmp_path, DOCUMENTS, piece_bytes=piece_bytes)
    tokens, starts = stream_of(DOCUMENTS)
    assert (shards.n_tokens, shards.n_documents) == (len(tokens), len(DOCUMENTS))
    assert shards.max_token_id == 257
    generator = np.random.default_rng(0)
    for _ in range(300):
        start, stop = sorted(generator.integers(0, len(tokens) + 1, 2).tolist())
        out = np.empty(stop - start, np.int64)
        shards.read_into(out, start)
        assert out.tolist() == tokens[start:stop]
        assert shards.document_starts(start, stop).tolist() == [p for p in starts if start <= p < stop]


def test_more_shards_than_are_kept_open(tmp_path: Path) -> None:
    documents = marked_documents(MAX_OPEN_SHARDS + 40, 6)
    shards = shards_of(tmp_path, documents, piece_bytes=7)
    assert len(shards.meta["shards"]) > MAX_OPEN_SHARDS
    tokens, _ = stream_of(documents)
    out = np.empty(shards.n_tokens, np.int64)
    shards.read_into(out, 0)
    assert out.tolist() == tokens


def test_damage_is_found(tmp_path: Path) -> None:
    folder = shards_of(tmp_path, DOCUMENTS).folder
    TokenShards(folder).verify()
    tokens = folder / "shard-00000.bin"
    content = tokens.read_bytes()
    tokens.write_bytes(content[:-2])
    with pytest.raises(
        DataError, match=rf"shard-00000\.bin has {len(content) - 2} bytes, its counts ask for {len(content)}"
    ):
        TokenShards(folder)
    tokens.write_bytes(b"\0\0" + content[2:])  # same size
    with pytest.raises(DataError, match=r"shard-00000: contents changed since they were written"):
        TokenShards(folder).verify()
    tokens.unlink()
    with pytest.raises(DataError, match=r"shard-00000\.bin is missing"):
        TokenShards(folder)


def test_folders_that_are_no_shards_say_why(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such folder \(make one with `titan5d data build`\)"):
        TokenShards(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"meta\.json is missing; make shards with"):
        TokenShards(tmp_path)
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(DataError, match="did not finish, run it again"):
        TokenShards(tmp_path)
    for content, message in (
        ("{", "cannot read"),
        ('{"format": "other"}', "its format is not"),
        ("[]", "its format is not"),
    ):
        (tmp_path / "meta.json").write_text(content)
        with pytest.raises(DataError, match=message):
            TokenShards(tmp_path)
    meta = shards_of(tmp_path / "real", DOCUMENTS).meta
    (tmp_path / "meta.json").write_text(json.dumps(meta | {"version": 99}))
    with pytest.raises(DataError, match="format version 99, this titan5d reads version 1"):
        TokenShards(tmp_path)
