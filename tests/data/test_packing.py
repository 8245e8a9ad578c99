"""Packing: every token once, targets and positions inside their document, against a plain loop."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.corpora import packed, shards_of
from titan5d.data.dataset import IGNORE
from titan5d.data.packing import PackedShards
from titan5d.data.tokenizer import ByteTokenizer, Tokenizer

BOS, EOS = 256, 257


class NoBos(ByteTokenizer):
    bos_id = None
    fingerprint = "no bos"


def plain_rows(documents: list[list[int]], seq_len: int) -> list[list[tuple[int, int, int, int]]]:
    """(token, label, position, document id) of each place of each row, one token after the other."""
    stream = []
    for number, document in enumerate(documents):
        for token, following in pairwise([*document, IGNORE]):
            stream.append((number, token, following))
    rows = []
    for start in range(0, len(stream) - seq_len + 1, seq_len):
        row: list[tuple[int, int, int, int]] = []
        for place, (number, token, following) in enumerate(stream[start : start + seq_len]):
            same = place > 0 and number == stream[start + place - 1][0]
            position = row[-1][2] + 1 if same else 0
            document_id = 0 if place == 0 else row[-1][3] + (not same)
            row.append((token, following, position, document_id))
        rows.append(row)
    return rows


def rows_of(dataset: PackedShards) -> list[list[tuple[int, int, int, int]]]:
    rows = dataset.rows(np.arange(dataset.n_samples))
    stacked = np.stack([rows.tokens, rows.labels, rows.positions, rows.document_ids], axis=-1)
    return [[tuple(place) for place in row] for row in stacked.tolist()]


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    seq_len=st.integers(1, 24),
    piece_bytes=st.sampled_from([25, 10_000]),
    tokenizer=st.sampled_from([ByteTokenizer(), NoBos()]),
)
def test_rows_are_those_of_a_plain_loop(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    seq_len: int,
    piece_bytes: int,
    tokenizer: Tokenizer,
) -> None:
    texts = [chr(97 + i % 26) * length for i, length in enumerate(lengths)]
    shards = shards_of(tmp_path_factory.mktemp("pack"), texts, tokenizer, piece_bytes)
    dataset = PackedShards(shards, seq_len)
    expected = plain_rows([tokenizer.with_ends(tokenizer.encode(text)) for text in texts], seq_len)
    assert rows_of(dataset) == expected
    assert dataset.n_samples * seq_len + dataset.dropped_tokens == shards.n_tokens


def test_last_token_of_a_document_has_no_target(tmp_path: Path) -> None:
    """Public case 034: documents of 10, 22 and 32 tokens in a row of 64, with an EOS and no BOS."""
    texts = ["a" * 9, "b" * 21, "c" * 31]
    first = PackedShards(shards_of(tmp_path / "1", texts, NoBos()), 64).rows(np.array([0]))
    assert np.flatnonzero(first.labels[0] == IGNORE).tolist() == [9, 31, 63]  # 64 - 3 valid targets
    assert first.tokens[0][[9, 31, 63]].tolist() == [EOS] * 3
    other = PackedShards(shards_of(tmp_path / "2", [*texts[:2], "X" + "c" * 30], NoBos()), 64).rows(
        np.array([0])
    )
    for name in ("tokens", "labels", "positions", "document_ids"):  # nothing about documents 1 and 2 changes
        assert (getattr(first, name)[0, :32] == getattr(other, name)[0, :32]).all()


def test_long_document_is_split_and_each_token_used_once(tmp_path: Path) -> None:
    """Public case 036: one document of 1000 tokens and ten of 20, rows of 64."""
    texts = ["".join(chr(0x21 + i % 90) for i in range(998)), *(f"{i}" * 18 for i in range(10))]
    dataset = packed(tmp_path, texts, 64)
    consumed = dataset.rows(np.arange(dataset.n_samples)).tokens.ravel().tolist()
    total = [token for text in texts for token in ByteTokenizer().with_ends(ByteTokenizer().encode(text))]
    assert len(total) == 1200
    assert consumed == total[: len(consumed)]
    assert len(consumed) + dataset.dropped_tokens == 1200
    assert f"{dataset.dropped_tokens} tokens at the end fill no row" in dataset.description
    labels = dataset.rows(np.arange(14)).labels.ravel()
    assert labels.tolist() == total[1:897]  # across the rows of the long document, no target is lost


def test_rows_of_one_document_need_no_document_mask(tmp_path: Path) -> None:
    dataset = packed(tmp_path, ["a" * 62, "b" * 62, "c" * 30, "d" * 30], 64)
    assert not dataset.rows(np.array([0, 1])).several_documents
    assert dataset.rows(np.array([1, 2])).several_documents


def test_without_document_mask_rows_are_one_document_but_targets_stay(tmp_path: Path) -> None:
    texts = ["a" * 9, "b" * 21, "c" * 99]
    masked = packed(tmp_path / "1", texts, 32).rows(np.arange(4))
    rows = packed(tmp_path / "2", texts, 32, document_mask=False).rows(np.arange(4))
    assert not rows.several_documents and (rows.document_ids == 0).all()
    assert (rows.positions == np.arange(32)).all()
    assert (rows.labels == masked.labels).all() and (rows.tokens == masked.tokens).all()
    assert masked.several_documents and (masked.positions != rows.positions).any()


def test_types_are_those_of_the_model(tmp_path: Path) -> None:
    rows = packed(tmp_path, ["a" * 9, "b" * 21], 16).rows(np.array([1, 0]))
    assert [array.dtype for array in (rows.tokens, rows.labels, rows.positions)] == [np.int64] * 3
    assert rows.document_ids.dtype == np.int32
    assert all(
        array.flags.c_contiguous for array in (rows.tokens, rows.labels, rows.positions, rows.document_ids)
    )
