"""Training the BPE: the same documents give the same file, with exactly the asked number of ids."""

from __future__ import annotations

import json
from pathlib import Path

from titan5d.data.tokenizer import BPE4K, load_tokenizer
from titan5d.data.train_bpe import SPECIALS, VOCAB_SIZE, train_bpe
from titan5d.data.words import WORDS

DOCUMENTS = [
    Path(module.__file__ or "").read_text(encoding="utf-8") for module in (json.decoder, json.encoder)
]


def test_training_is_deterministic_and_of_the_asked_size(tmp_path: Path) -> None:
    first = train_bpe(DOCUMENTS, vocab_size=400)
    assert first == train_bpe(DOCUMENTS, vocab_size=400)
    (tmp_path / "tokenizer.json").write_text(first, encoding="utf-8")
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.vocab_size == 400
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2)
    assert all(tokenizer.decode(tokenizer.encode(text)) == text for text in DOCUMENTS)


def test_committed_tokenizer_is_one_of_this_trainer(tmp_path: Path) -> None:
    ours = json.loads(train_bpe(DOCUMENTS, vocab_size=300))
    committed = json.loads(BPE4K.read_text(encoding="utf-8"))
    assert len(committed["model"]["vocab"]) == VOCAB_SIZE
    assert [token["content"] for token in committed["added_tokens"]] == list(SPECIALS)
    assert committed["pre_tokenizer"]["pretokenizers"][0]["pattern"] == {"Regex": WORDS}
    assert committed["pre_tokenizer"] == ours["pre_tokenizer"] and committed["decoder"] == ours["decoder"]
