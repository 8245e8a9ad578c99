"""Opening a data set by its name: every kind, blends, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.data.corpora import marked_documents, quiet, shards_of
from titan5d.data import sources as sources_module
from titan5d.data.blend import Blend
from titan5d.data.dataset import Dataset
from titan5d.data.errors import DataError
from titan5d.data.open import check_dataset_against_model, open_dataset, parse_datasets
from titan5d.data.pysrc import PythonSources
from titan5d.data.tokenizer import ByteTokenizer, load_tokenizer

DOCUMENTS = marked_documents(20, 29)
STREAM = [token for text in DOCUMENTS for token in ByteTokenizer().with_ends(ByteTokenizer().encode(text))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The same 20 documents in every form."""
    (tmp_path / "lines.txt").write_text("\n".join(DOCUMENTS))
    (tmp_path / "rows.jsonl").write_text(
        "\n".join(json.dumps({"text": text, "body": text[:4]}) for text in DOCUMENTS)
    )
    (tmp_path / "files").mkdir()
    for i, text in enumerate(DOCUMENTS):
        (tmp_path / "files" / f"{i:03d}.txt").write_text(text)
    (tmp_path / "tokens.jsonl").write_text(json.dumps({"tokens": list(range(16))}))
    shards_of(tmp_path / "built", DOCUMENTS)
    return tmp_path


def opened(name: str, path: Path | str | None, folder: Path, **options: object) -> Dataset:
    return open_dataset(
        name, str(path) if path else None, ByteTokenizer(), 16, folder / "cache", log=quiet, **options
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("text", "lines.txt"),
        ("text", "files"),
        ("text_files", "files/*.txt"),
        ("text_lines", "files"),
        ("text", "files/*.txt"),
        ("jsonl", "rows.jsonl"),
        ("shards", "built/shards"),
    ],
)
def test_every_form_of_the_same_documents_gives_the_same_rows(folder: Path, name: str, path: str) -> None:
    dataset = opened(name, folder / path, folder)
    assert dataset.n_samples == len(STREAM) // 16
    assert (
        dataset.rows(np.arange(dataset.n_samples)).tokens.ravel().tolist() == STREAM[: len(STREAM) // 16 * 16]
    )
    assert dataset.fingerprint == opened("shards", folder / "built/shards", folder).fingerprint


def test_jsonl_reads_the_key_in_parentheses(folder: Path) -> None:
    dataset = opened("jsonl(body)", folder / "rows.jsonl", folder)
    assert bytes(dataset.rows(np.array([0])).tokens[0, 1:5].tolist()) == b"0000"
    assert dataset.rows(np.array([0])).tokens[0, 5] == 257


def test_tokens_are_rows(folder: Path) -> None:
    assert opened("tokens", folder / "tokens.jsonl", folder).rows(np.array([0])).tokens.tolist() == [
        list(range(16))
    ]


def test_blend_of_named_parts(folder: Path) -> None:
    lines: list[str] = []
    name = f"text:{folder}/lines.txt@0.7, jsonl(body):{folder}/rows.jsonl@0.3"
    dataset = open_dataset(name, None, ByteTokenizer(), 16, folder / "cache", log=lines.append)
    assert isinstance(dataset, Blend) and dataset.counts == [7, 3]
    assert "70.00%" in lines[-1] and "30.00%" in lines[-1] and dataset.fingerprint in lines[-1]


def test_pysrc_parts_come_from_the_installed_sources(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = folder / "site"
    site.mkdir()
    for i in range(200):
        (site / f"m{i}.py").write_text(
            f"# module number {i}, long enough to be taken as a document of the corpus\n"
        )

    def sources(split: str) -> PythonSources:
        return PythonSources(split, [("site", site)])  # type: ignore[arg-type]

    monkeypatch.setattr(sources_module, "PythonSources", sources)
    train, held_out = opened("pysrc", None, folder), opened("pysrc", None, folder, split="validation")
    assert train.n_samples > 20 * held_out.n_samples > 0
    with pytest.raises(DataError, match=r"pysrc .* takes no dataset_path"):
        opened("pysrc", "/somewhere", folder)


def test_document_mask_reaches_every_kind(folder: Path) -> None:
    for name, path in (("text", "lines.txt"), ("shards", "built/shards")):
        assert opened(name, folder / path, folder).rows(np.arange(4)).several_documents
        assert (
            not opened(name, folder / path, folder, document_mask=False).rows(np.arange(4)).several_documents
        )


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("texts", None, r"unknown data set 'texts': choose from pysrc, text, text_lines"),
        ("allenai/c4", None, r'For the hub: dataset = "hub", dataset_path = "allenai/c4"'),
        ("text(key)", "x", "only jsonl, parquet, hub take a key"),
        ("text:/a@0.5, jsonl:/b", None, r"'jsonl:/b' has no weight; a blend reads NAME:PATH@WEIGHT"),
        ("text:/a@0.5, jsonl:/b@much", None, "has no weight"),
        ("text:/a@0.5", "/b", "names its paths itself"),
        ("text, jsonl", None, "has no weight"),
    ],
)
def test_names_that_mean_nothing_are_refused(name: str, path: str | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_datasets(name, path)


def test_names_are_read_with_colons_and_at_signs_in_paths() -> None:
    specs = parse_datasets("pysrc@1, text:/a@b:c@2, jsonl(x y):/d@0.5", None)
    assert [(spec.name, spec.key, spec.path, spec.weight) for spec in specs] == [
        ("pysrc", "text", None, 1.0),
        ("text", "text", "/a@b:c", 2.0),
        ("jsonl", "x y", "/d", 0.5),
    ]
    assert parse_datasets("text:/a", None)[0].weight is None


def test_weights_must_be_positive(folder: Path) -> None:
    with pytest.raises(DataError, match="positive numbers"):
        opened(f"text:{folder}/lines.txt@1, jsonl:{folder}/rows.jsonl@-1", None, folder)
    with pytest.raises(DataError, match="positive numbers"):
        opened(f"text:{folder}/lines.txt@1, jsonl:{folder}/rows.jsonl@0", None, folder)


def test_shards_of_another_tokenizer_are_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"made with the tokenizer bytes .*the run uses bpe4k"):
        open_dataset("shards", str(folder / "built/shards"), load_tokenizer("bpe4k"), 16, log=quiet)
    with pytest.raises(DataError, match="needs dataset_path"):
        opened("shards", None, folder)


def test_ids_beyond_the_model_are_refused_with_both_numbers(folder: Path) -> None:
    dataset = opened("tokens", folder / "tokens.jsonl", folder)
    check_dataset_against_model(dataset, 16)
    with pytest.raises(ValueError, match=r"token id 15, but model\.vocab_size = 15 .*at least 16"):
        check_dataset_against_model(dataset, 15)
    with pytest.raises(ValueError, match=r"token id 257, but model\.vocab_size = 256"):
        check_dataset_against_model(opened("text", folder / "lines.txt", folder), 256)
