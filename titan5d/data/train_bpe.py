"""Trains titan5d/assets/bpe4k.json, the 4,096-token BPE of the quick start, on the installed Python sources.

    python -m titan5d.data.train_bpe bpe4k.json

Byte-level BPE (Sennrich et al. 2016, https://arxiv.org/abs/1508.07909): every text can be encoded. The same
documents give the same file, byte for byte. The committed file is what runs use; the documents change with the
installed versions, so a new training is a new tokenizer.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from titan5d.data.pysrc import PythonSources
from titan5d.data.words import word_splitter

VOCAB_SIZE = 4096
SPECIALS = ("<|begin_of_text|>", "<|end_of_text|>", "<|pad|>")


def train_bpe(documents: Iterable[str], vocab_size: int = VOCAB_SIZE) -> str:
    """The tokenizer.json of a byte-level BPE with `vocab_size` ids, of which 256 are bytes and 3 specials."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = word_splitter()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in SPECIALS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer.to_str(pretty=False)


def training_documents() -> Iterator[str]:
    """Every third document of the training part of `pysrc`, about 22 MB: more gives the same compression."""
    source = PythonSources("train")
    pieces, _ = source.plan(1 << 20)
    for piece in pieces[::3]:
        yield from source.documents(piece, Counter())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m titan5d.data.train_bpe OUT.json")
    Path(sys.argv[1]).write_text(train_bpe(training_documents()), encoding="utf-8")
