"""Ready-made rows: used exactly as they are, padded without effect, refused with file, line and numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from titan5d.data.errors import DataError
from titan5d.data.rows import TokenRows


def token_rows(folder: Path, rows: list[object], seq_len: int = 8, **options: bool) -> TokenRows:
    file = folder / "rows.jsonl"
    file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return TokenRows([file], seq_len, **options)


def test_full_rows_are_used_as_they_are(tmp_path: Path) -> None:
    rows = [
        {"tokens": list(range(8)), "labels": [5, -100, 7, -100, 9, 10, 300, 0]},
        {"tokens": [8] * 8, "labels": [-100] * 8},
    ]
    dataset = token_rows(tmp_path, rows)
    read = dataset.rows(np.array([1, 0]))
    assert read.tokens.tolist() == [rows[1]["tokens"], rows[0]["tokens"]]
    assert read.labels.tolist() == [rows[1]["labels"], rows[0]["labels"]]
    assert (read.positions == np.arange(8)).all() and not read.several_documents
    assert [array.dtype for array in (read.tokens, read.labels, read.positions)] == [np.int64] * 3
    assert (dataset.n_samples, dataset.max_token_id) == (2, 300)


def test_short_rows_are_padded_in_a_document_of_their_own(tmp_path: Path) -> None:
    read = token_rows(tmp_path, [{"tokens": [4, 5, 6], "labels": [5, 6, 7]}]).rows(np.array([0]))
    assert read.tokens.tolist() == [[4, 5, 6, 0, 0, 0, 0, 0]]
    assert read.labels.tolist() == [[5, 6, 7] + [-100] * 5]
    assert read.document_ids.tolist() == [[0, 0, 0, -1, -1, -1, -1, -1]] and read.several_documents
    assert read.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]


def test_without_labels_the_next_token_of_the_document(tmp_path: Path) -> None:
    rows = [{"tokens": [1, 2, 3, 4]}, {"tokens": [1, 2, 3, 4], "document_ids": [3, 3, 5, 5]}]
    read = token_rows(tmp_path, rows, seq_len=4).rows(np.arange(2))
    assert read.labels.tolist() == [[2, 3, 4, -100], [2, -100, 4, -100]]
    assert read.document_ids.tolist() == [[0] * 4, [3, 3, 5, 5]]
    assert read.positions.tolist() == [[0, 1, 2, 3], [0, 1, 0, 1]]


def test_given_positions_are_kept(tmp_path: Path) -> None:
    row = {"tokens": [1, 2, 3, 4], "positions": [3, 2, 1, 0]}
    assert token_rows(tmp_path, [row], seq_len=6).rows(np.array([0])).positions.tolist() == [
        [3, 2, 1, 0, 0, 1]
    ]


def test_without_document_mask_a_row_is_one_document(tmp_path: Path) -> None:
    rows = token_rows(
        tmp_path, [{"tokens": [1, 2, 3, 4], "document_ids": [0, 0, 1, 1]}], 4, document_mask=False
    )
    read = rows.rows(np.array([0]))
    assert not read.several_documents and read.positions.tolist() == [[0, 1, 2, 3]]
    assert read.labels.tolist() == [[2, -100, 4, -100]]


def test_padding_is_marked_with_and_without_document_mask(tmp_path: Path) -> None:
    short = [{"tokens": [1, 2, 3], "document_ids": [0, 0, 1]}, {"tokens": [1, 2, 3, 4]}]
    for document_mask, ids in ((True, [0, 0, 1, -1]), (False, [0, 0, 0, -1])):
        rows = token_rows(tmp_path, short, 4, document_mask=document_mask)
        assert rows.rows(np.array([0])).document_ids.tolist() == [ids]
        assert rows.rows(np.array([0])).several_documents and not rows.rows(np.array([1])).several_documents


def test_fingerprint_follows_the_contents(tmp_path: Path) -> None:
    before = token_rows(tmp_path, [{"tokens": [1, 2]}]).fingerprint
    assert token_rows(tmp_path, ["\n", {"tokens": [1, 2], "labels": [2, -100]}]).fingerprint == before
    assert token_rows(tmp_path, [{"tokens": [1, 2], "labels": [-100, -100]}]).fingerprint != before


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"tokens": list(range(9))},
            r"rows\.jsonl, line 2: the row has 9 tokens, seq_len = 8: cut .* seq_len to 9",
        ),
        ({"tokens": [1, 2], "labels": [2]}, r'line 2: 2 tokens but 1 "labels"'),
        ({"tokens": [1, -1]}, r'line 2: -1 in "tokens" is outside 0\.\.'),
        ({"tokens": [1], "labels": [-7]}, r"line 2: a label is a token id or -100"),
        ({"tokens": [1], "labels": [-101]}, r'line 2: -101 in "labels" is outside'),
        ({"tokens": [1.5]}, r'line 2: "tokens" is no list of whole numbers'),
        ({"tokens": [True]}, r'line 2: "tokens" is no list of whole numbers'),
        ({"tokens": "text"}, r'line 2: "tokens" is no list of whole numbers'),
        ({"tokens": [2**40]}, r'line 2: 1099511627776 in "tokens" is outside'),
        ({"tokens": []}, "line 2: the row has no token"),
        ({"labels": [1]}, 'line 2: a row is a JSON object with "tokens"'),
        ([1, 2], 'line 2: a row is a JSON object with "tokens"'),
        ({"tokens": [1], "label": [1]}, r"line 2: unknown keys \['label'\]"),
        ({"tokens": [1, 2, 3], "document_ids": [0, 1, 0]}, "line 2: a document id comes back"),
        ({"tokens": [1], "positions": [8]}, r'line 2: 8 in "positions" is outside 0\.\.7'),
        ("{broken\n", "line 2: broken JSON"),
    ],
)
def test_row_that_cannot_be_used_is_named(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        token_rows(tmp_path, [{"tokens": [1]}, row])


def test_no_rows_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the files are empty"):
        token_rows(tmp_path, ["\n"])
    with pytest.raises(DataError, match=r"cannot read .*gone"):
        TokenRows([tmp_path / "gone"], 8)
