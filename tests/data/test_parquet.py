"""Parquet and hub sources against stand-ins for the two optional libraries, and what is said without them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from titan5d.data.errors import DataError
from titan5d.data.sources import text_source

ROW_GROUPS = [["one", None, "two"], ["  ", "three"], ["four"]]


class StandInFile:
    """The part of pyarrow.parquet.ParquetFile that is used."""

    def __init__(self, path: Path) -> None:
        if Path(path).read_bytes() != b"PAR1":
            raise OSError("not a parquet file")
        self.schema_arrow = SimpleNamespace(names=["id", "text"])
        groups = SimpleNamespace(total_byte_size=10)
        self.metadata = SimpleNamespace(num_row_groups=len(ROW_GROUPS), row_group=lambda i: groups)

    def iter_batches(self, batch_size: int, row_groups: list[int], columns: list[str]) -> Iterator[Any]:
        assert columns == ["text"]
        for group in row_groups:
            yield SimpleNamespace(column=lambda i, g=group: SimpleNamespace(to_pylist=lambda: ROW_GROUPS[g]))


class StandInStream(list[dict[str, str]]):
    """The part of datasets.IterableDataset that is used."""

    num_shards = 2

    def shard(self, num_shards: int, index: int) -> StandInStream:
        assert num_shards == self.num_shards
        return StandInStream(self[index::num_shards])


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, split: str, streaming: bool) -> StandInStream:
        calls.append((name, config, split, streaming))
        if name == "owner/gone":
            raise ConnectionError("no such data set")
        return StandInStream({"text": f"{split} {i}"} for i in range(5))

    def load_dataset_builder(name: str, config: str | None) -> Any:
        if name == "owner/gone":
            raise ConnectionError("no such data set")
        splits = {"train": SimpleNamespace(num_bytes=100), "validation": SimpleNamespace(num_bytes=None)}
        return SimpleNamespace(info=SimpleNamespace(version="1.0", splits=splits), hash="abc")

    parquet = SimpleNamespace(ParquetFile=StandInFile)
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(parquet=parquet))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    fake = SimpleNamespace(load_dataset=load_dataset, load_dataset_builder=load_dataset_builder)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return calls


@pytest.mark.parametrize("piece_bytes", [1, 1000])
def test_parquet_reads_a_column_row_group_by_row_group(
    tmp_path: Path, stand_ins: list[tuple[Any, ...]], piece_bytes: int
) -> None:
    for name in ("a.parquet", "b.parquet"):
        (tmp_path / name).write_bytes(b"PAR1")
    source = text_source("parquet", str(tmp_path))
    pieces, skipped = source.plan(piece_bytes)
    assert len(pieces) == (6 if piece_bytes == 1 else 1)
    documents = [text for piece in pieces for text in source.documents(piece, skipped)]
    assert documents == ["one", "two", "three", "four"] * 2
    assert skipped == {"no text under the key": 2, "empty": 2}


def test_parquet_without_the_column_names_those_there_are(
    tmp_path: Path, stand_ins: list[tuple[Any, ...]]
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"no column 'body', it has id, text: name one as parquet\(id\)"):
        text_source("parquet", str(tmp_path), "body")
    (tmp_path / "a.parquet").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"cannot read .*a\.parquet as parquet"):
        text_source("parquet", str(tmp_path))


def test_hub_streams_every_shard_of_a_split(stand_ins: list[tuple[Any, ...]]) -> None:
    source = text_source("hub", "owner/name:en")
    assert source.total_bytes() == 100
    pieces, skipped = source.plan(1)
    assert len(pieces) == 2
    documents = [text for piece in pieces for text in source.documents(piece, Counter())]
    assert sorted(documents) == [f"train {i}" for i in range(5)] and not skipped
    assert set(stand_ins) == {("owner/name", "en", "train", True)}
    held_out = text_source("hub", "owner/name", split="validation")
    assert held_out.total_bytes() == 0  # not every data set tells
    assert held_out.fingerprint() != text_source("hub", "owner/name").fingerprint()
    text_source("hub", "owner/name::test").plan(1)
    assert stand_ins[-1] == ("owner/name", None, "test", True)
    with pytest.raises(
        DataError, match=r"cannot open the hub data set owner/gone split train.*no such data set"
    ):
        text_source("hub", "owner/gone").plan(1)
    with pytest.raises(DataError, match=r"owner/name\[:config\[:split\]\]"):
        text_source("hub", None)


def test_without_the_extra_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("datasets", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)  # what an import finds when there is no such package
    with pytest.raises(DataError, match=r"hub data sets need the optional extra: pip install titan5d\[hf\]"):
        text_source("hub", "owner/name")
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"parquet files need the optional extra: pip install titan5d\[hf\]"):
        text_source("parquet", str(tmp_path / "a.parquet"))
