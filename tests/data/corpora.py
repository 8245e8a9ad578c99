"""Small corpora for the tests of the data room, and a slow, plain reading of the same documents to compare with."""

from __future__ import annotations

from pathlib import Path

from titan5d.data.build import build_shards
from titan5d.data.corpus import LineFiles
from titan5d.data.packing import PackedShards
from titan5d.data.shards import TokenShards
from titan5d.data.tokenizer import ByteTokenizer, Tokenizer


def quiet(line: str) -> None:
    """A log that keeps nothing."""


def shards_of(
    folder: Path, documents: list[str], tokenizer: Tokenizer | None = None, piece_bytes: int | None = None
) -> TokenShards:
    """Token shards of documents, one a line."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "corpus.txt"
    file.write_text("".join(f"{text}\n" for text in documents), encoding="utf-8")
    source = LineFiles([file], str(file))
    return build_shards(
        source, tokenizer or ByteTokenizer(), folder / "shards", workers=1, piece_bytes=piece_bytes, log=quiet
    )


def packed(folder: Path, documents: list[str], seq_len: int, **options: bool) -> PackedShards:
    """Rows of `seq_len` byte tokens of documents, one a line."""
    return PackedShards(shards_of(folder, documents), seq_len, **options)


def marked_documents(n: int, length: int) -> list[str]:
    """n documents of `length` characters; document i begins with its number."""
    return [f"{i:04d}".ljust(length, "x") for i in range(n)]


class CountedRows:
    """A data set of `n_samples` rows whose tokens all are the row's own id: what was read can be read off."""

    description = "counted rows"
    fingerprint = "counted"

    def __init__(self, n_samples: int, seq_len: int = 4) -> None:
        self.n_samples, self.seq_len = n_samples, seq_len
        self.max_token_id = n_samples - 1

    def rows(self, sample_ids):  # type: ignore[no-untyped-def]
        import numpy as np

        from titan5d.data.dataset import Rows

        tokens = np.repeat(sample_ids[:, None], self.seq_len, axis=1)
        positions = np.broadcast_to(np.arange(self.seq_len), tokens.shape).copy()
        return Rows(tokens, tokens.copy(), positions, np.zeros(tokens.shape, np.int32), False)
