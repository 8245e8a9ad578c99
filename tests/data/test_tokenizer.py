"""Tokenizers: ids are those of the library, specials come exactly once, and a misfit is refused with both numbers."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from titan5d.data.errors import DataError
from titan5d.data.tokenizer import (
    BPE4K,
    ByteTokenizer,
    JsonTokenizer,
    check_against_model,
    cut_long_text,
    load_tokenizer,
)

TEXTS = [
    "",
    "hello world",
    "def f(x):\n    return x + 1\n",
    "naïve café — 東京 🙂",
    "a" * 5000,
    "\x00\t\r\n\x1c  \x0b",
]


@pytest.fixture(scope="module")
def bpe4k() -> JsonTokenizer:
    tokenizer = load_tokenizer("bpe4k")
    assert isinstance(tokenizer, JsonTokenizer)
    return tokenizer


@pytest.fixture(scope="module")
def library() -> Library:
    """The same tokenizer.json as the library reads it, told to leave special tokens in text alone."""
    tokenizer = Library.from_file(str(BPE4K))
    tokenizer.encode_special_tokens = True
    return tokenizer


def make_tokenizer(
    folder: Path, specials: list[str], config: dict[str, object] | None = None, adds_bos: bool = False
) -> JsonTokenizer:
    """A byte-level BPE of some 300 ids in `folder`; with `adds_bos` its post-processor puts specials[0] in front."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    library.decoder = decoders.ByteLevel()
    library.train_from_iterator([Path(json.__file__).read_text(encoding="utf-8")], trainer)
    if adds_bos:
        library.post_processor = processors.TemplateProcessing(
            single=f"{specials[0]} $A", special_tokens=[(specials[0], library.token_to_id(specials[0]))]
        )
    library.enable_truncation(max_length=8)  # as left over from fine-tuning
    library.enable_padding(length=8)
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = load_tokenizer(str(folder))
    assert isinstance(loaded, JsonTokenizer)
    return loaded


def test_bytes_are_utf8_with_three_specials() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé") == [97, 0xC3, 0xA9]
    assert tokenizer.with_ends([1]) == [256, 1, 257]
    assert (tokenizer.vocab_size, tokenizer.pad_id) == (259, 258)
    assert all(tokenizer.decode(tokenizer.with_ends(tokenizer.encode(text))) == text for text in TEXTS)


def test_bpe4k_has_4096_ids_and_loses_nothing(bpe4k: JsonTokenizer) -> None:
    assert bpe4k.vocab_size == 4096
    assert len({bpe4k.bos_id, bpe4k.eos_id, bpe4k.pad_id}) == 3
    for text in TEXTS:
        assert bpe4k.decode(bpe4k.encode(text)) == text
    source = Path(json.__file__).read_text(encoding="utf-8")
    assert len(source) / len(bpe4k.encode(source)) > 3  # characters a token, on code


def test_ids_are_those_of_the_library(bpe4k: JsonTokenizer, library: Library) -> None:
    for text in [*TEXTS, Path(pytest.__file__).read_text(encoding="utf-8")]:
        assert bpe4k.encode(text) == library.encode(text, add_special_tokens=False).ids
    assert bpe4k.encode_batch(TEXTS) == [bpe4k.encode(text) for text in TEXTS]


@settings(deadline=None, max_examples=200)
@given(st.text(st.characters(max_codepoint=127) | st.sampled_from(" \n\t_.09aZ"), max_size=200))
def test_remembered_words_give_the_ids_of_the_library(
    bpe4k: JsonTokenizer, library: Library, text: str
) -> None:
    assert bpe4k.encode(text) == library.encode(text, add_special_tokens=False).ids


def test_special_tokens_written_in_a_text_stay_text(bpe4k: JsonTokenizer) -> None:
    text = "before <|end_of_text|> after, né <|begin_of_text|>"
    for copy in (bpe4k, pickle.loads(pickle.dumps(bpe4k))):  # workers get a pickled copy
        ids = copy.encode(text)
        assert bpe4k.eos_id not in ids and bpe4k.bos_id not in ids
        assert copy.decode(ids) == text
        assert copy.fingerprint == bpe4k.fingerprint


def test_bos_comes_once_even_if_the_tokenizer_adds_its_own(tmp_path: Path) -> None:
    """Public case 044, third part."""
    tokenizer = make_tokenizer(tmp_path, ["<s>", "</s>"], adds_bos=True)
    assert tokenizer.bos_id is not None
    ids = tokenizer.with_ends(tokenizer.encode("the fox and the dog"))
    assert ids.count(tokenizer.bos_id) == 1 and ids[0] == tokenizer.bos_id
    assert ids.count(tokenizer.eos_id) == 1 and ids[-1] == tokenizer.eos_id


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, ["<s>", "</s>"])
    text = "the quick brown fox jumps over the lazy dog " * 20
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("the")) < 8


def test_config_beside_the_tokenizer_names_the_specials(tmp_path: Path) -> None:
    specials = ["<s>", "</s>", "<go>", "<stop>"]
    named = make_tokenizer(
        tmp_path / "a", specials, {"bos_token": "<go>", "eos_token": {"content": "<stop>"}}
    )
    assert (named.bos_id, named.eos_id) == (2, 3)
    assert (
        make_tokenizer(tmp_path / "b", specials, {"bos_token": "<go>", "add_bos_token": False}).bos_id is None
    )
    assert make_tokenizer(tmp_path / "c", specials, {"bos_token": None}).bos_id is None
    assert make_tokenizer(tmp_path / "d", ["<|endoftext|>"], {"bos_token": "<|endoftext|>"}).bos_id is None
    with pytest.raises(DataError, match=r"eos_token '<nowhere>'.*not in the vocabulary"):
        make_tokenizer(tmp_path / "e", specials, {"eos_token": "<nowhere>"})
    with pytest.raises(DataError, match=r"no end-of-document token.*tokenizer_config\.json"):
        make_tokenizer(tmp_path / "f", ["<odd>"])


def test_tokenizer_that_does_not_fit_the_model_is_refused_with_both_numbers(tmp_path: Path) -> None:
    """Public case 044, first and second part."""
    tokenizer = make_tokenizer(tmp_path, ["<s>", "</s>"])
    assert tokenizer.vocab_size == 300
    with pytest.raises(ValueError, match=r"highest token id 299.*model\.vocab_size = 256.*at least 300"):
        check_against_model(tokenizer, 256)
    with pytest.raises(
        ValueError, match=r"highest token id 258, EOS id 257, BOS id 256, but model\.vocab_size = 256"
    ):
        check_against_model(ByteTokenizer(), 256)
    check_against_model(tokenizer, 300)
    check_against_model(tokenizer, 512)  # rounded up: fine
    with pytest.raises(ValueError, match="299"):
        check_against_model(tokenizer, 299)


@pytest.mark.parametrize("name", ["nowhere", "nowhere/tokenizer.json"])
def test_missing_tokenizer_says_what_works(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not exist. Give `bytes`, `bpe4k`"):
        load_tokenizer(str(tmp_path / name))


def test_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"cannot read the tokenizer .*tokenizer\.json"):
        load_tokenizer(str(tmp_path))


@given(st.text("ab \n", max_size=300), st.integers(4, 40))
def test_cut_text_is_whole_and_short(text: str, max_chars: int) -> None:
    pieces = cut_long_text(text, max_chars)
    assert "".join(pieces) == text
    assert all(len(piece) <= max_chars for piece in pieces)


def test_cutting_a_long_text_does_not_change_its_ids(library: Library) -> None:
    text = "é " + " ".join(f"word{i} is=({i})" for i in range(4000))
    pieces = cut_long_text(text, 1000)
    assert len(pieces) > 50
    ids = [i for piece in pieces for i in library.encode(piece, add_special_tokens=False).ids]
    assert ids == library.encode(text, add_special_tokens=False).ids
