"""Text to token ids and back: bytes (needs nothing), or any Hugging Face `tokenizer.json`.

`encode` never adds a special token and never lets text turn into one: a document that contains the letters
"</s>" is encoded as those letters. BOS and EOS come in at exactly one place (`with_ends`), so a tokenizer whose own
post-processor adds a BOS still gives one BOS per document.
"""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import tokenizers

from titan5d.data.errors import DataError
from titan5d.data.words import WordMemory, cuts_words_like_ours

ASSETS = Path(__file__).resolve().parent.parent / "assets"
BPE4K = ASSETS / "bpe4k.json"

# Encoding is done in pieces of at most this many characters: the library needs about 100 bytes of memory per
# character, so a 5 MB line would take half a gigabyte in one go.
MAX_ENCODE_CHARS = 1 << 18

# Names under which public tokenizers keep their BOS and EOS; asked only when no tokenizer_config.json says more.
COMMON_BOS = ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "<|startoftext|>", "[BOS]")
COMMON_EOS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
COMMON_PAD = ("<|pad|>", "<pad>", "<|finetune_right_pad_id|>", "[PAD]")


class Tokenizer(ABC):
    """What the data room asks of a tokenizer.

    vocab_size: highest token id + 1, specials included (a vocabulary with holes counts the holes).
    bos_id: id put before each document, or None when this tokenizer has no BOS.
    eos_id: id put after each document. pad_id: id for filling up (the EOS when there is no padding token).
    fingerprint: 16 hex digits; equal for equal behaviour whatever the file's name.
    """

    name: str
    vocab_size: int
    bos_id: int | None
    eos_id: int
    pad_id: int
    fingerprint: str

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of `text`, no BOS or EOS."""

    @abstractmethod
    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """`[encode(text) for text in texts]`, faster."""

    @abstractmethod
    def decode(self, ids: list[int]) -> str:
        """Text of `ids`; special tokens are left out, broken UTF-8 becomes U+FFFD."""

    def with_ends(self, ids: list[int]) -> list[int]:
        """The ids of a whole document: BOS (if this tokenizer has one), `ids`, EOS."""
        return [*ids, self.eos_id] if self.bos_id is None else [self.bos_id, *ids, self.eos_id]


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes 0..255, then BOS 256, EOS 257, PAD 258."""

    name = "bytes"
    vocab_size = 259
    bos_id: int | None = 256
    eos_id = 257
    pad_id = 258
    fingerprint = hashlib.sha256(b"titan5d byte tokenizer 1").hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class JsonTokenizer(Tokenizer):
    """A `tokenizer.json` read by the `tokenizers` library.

    BOS and EOS are those of the `tokenizer_config.json` beside it, else of well-known names in the vocabulary.
    No BOS is added where the config says `"add_bos_token": false` or where BOS and EOS are one token (GPT-2).
    Raises DataError when the file cannot be read or no EOS can be found.
    """

    def __init__(self, file: Path, name: str | None = None) -> None:
        self._file = file
        self.name = name or str(file)
        try:
            content = file.read_bytes()
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library raises plain Exception on bad JSON
            raise DataError(f"cannot read the tokenizer {file}: {error}") from error
        self._tokenizer.no_truncation()  # settings left over from fine-tuning would cut documents
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # text never becomes a special token
        self._words = WordMemory(self._tokenizer) if cuts_words_like_ours(self._tokenizer) else None
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        config = _read_config(file)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        eos = _special_id("eos_token", config, vocab, COMMON_EOS, file)
        if eos is None:
            raise DataError(
                f"the tokenizer {file} has no end-of-document token: none of {', '.join(COMMON_EOS)} is in its "
                f'vocabulary. Name it in {file.parent / "tokenizer_config.json"}: {{"eos_token": "..."}}'
            )
        bos = _special_id("bos_token", config, vocab, COMMON_BOS, file)
        pad = _special_id("pad_token", config, vocab, COMMON_PAD, file)
        self.eos_id = eos
        self.bos_id = None if bos == eos or config.get("add_bos_token") is False else bos
        self.pad_id = eos if pad is None else pad
        specials = f"bos {self.bos_id} eos {self.eos_id}".encode()
        self.fingerprint = hashlib.sha256(content + specials).hexdigest()[:16]

    def __reduce__(self) -> tuple[type[JsonTokenizer], tuple[Path, str]]:
        return JsonTokenizer, (
            self._file,
            self.name,
        )  # the library's own pickling forgets encode_special_tokens

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        pieces = [cut_long_text(text) for text in texts]
        ids: list[list[int]] = [[] for _ in texts]
        together: list[tuple[int, str]] = []  # short texts are encoded in one call
        for i, cut in enumerate(pieces):
            if self._words is not None and texts[i].isascii():
                ids[i] = [token for piece in cut for token in self._words.encode(piece)]
            elif len(cut) > 1:
                ids[i] = [token for piece in cut for token in self._encode([piece])[0]]
            else:
                together.append((i, texts[i]))
        encoded = self._encode([text for _, text in together])
        for (i, _), text_ids in zip(together, encoded, strict=True):
            ids[i] = text_ids
        return ids

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [
            encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def load_tokenizer(path: str) -> Tokenizer:
    """`bytes`, `bpe4k`, a `tokenizer.json`, or a folder that holds one. Raises DataError naming what was tried."""
    if path == "bytes":
        return ByteTokenizer()
    if path == "bpe4k":
        return JsonTokenizer(BPE4K, "bpe4k")
    given = Path(path).expanduser()
    file = given / "tokenizer.json" if given.is_dir() else given
    if not file.is_file():
        raise DataError(
            f"no tokenizer at {path!r}: {file} does not exist. Give `bytes`, `bpe4k`, a tokenizer.json or a folder "
            "that holds one"
        )
    return JsonTokenizer(file)


def check_against_model(tokenizer: Tokenizer, model_vocab_size: int) -> None:
    """Raises DataError (a ValueError) when the model has no row for some token id; names both numbers.

    A model with more rows than the tokenizer has ids is fine: the vocabulary is often rounded up.
    """
    ids = {"highest token id": tokenizer.vocab_size - 1, "EOS id": tokenizer.eos_id}
    if tokenizer.bos_id is not None:
        ids["BOS id"] = tokenizer.bos_id
    too_high = [f"{name} {i}" for name, i in ids.items() if i >= model_vocab_size]
    if too_high:
        raise DataError(
            f"tokenizer {tokenizer.name} does not fit the model: {', '.join(too_high)}, but model.vocab_size = "
            f"{model_vocab_size} has rows 0..{model_vocab_size - 1} only. Set model.vocab_size to at least "
            f"{max(ids.values()) + 1} or take another tokenizer"
        )


def cut_long_text(text: str, max_chars: int = MAX_ENCODE_CHARS) -> list[str]:
    """`text` in pieces of at most `max_chars`, cut before a space that stands between two non-spaces.

    Byte-level BPE starts a new word there anyway, so the ids are the same as without the cut. Text without
    such a space is cut at max_chars; then a token at the cut may differ. Joined, the pieces are the text.
    """
    pieces = []
    start = 0
    while len(text) - start > max_chars:
        window = text[start + max_chars // 2 : start + max_chars + 1]
        # The last safe place: searching the reversed window finds it without walking through all of them.
        found = re.search(r"\S \S", window[::-1])
        stop = start + max_chars // 2 + len(window) - found.start() - 2 if found else start + max_chars
        pieces.append(text[start:stop])
        start = stop
    pieces.append(text[start:])
    return pieces


def _read_config(file: Path) -> dict[str, Any]:
    """The tokenizer_config.json beside a tokenizer.json; empty when there is none."""
    config_file = file.parent / "tokenizer_config.json"
    if not config_file.is_file():
        return {}
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {config_file}: {error}") from error
    return config if isinstance(config, dict) else {}


def _special_id(
    key: str, config: dict[str, Any], vocab: dict[str, int], common: tuple[str, ...], file: Path
) -> int | None:
    """Id of the token that `config[key]` names, else of the first well-known name in `vocab`, else None."""
    if key in config:
        token = config[key]
        content = token.get("content") if isinstance(token, dict) else token
        if content is None:
            return None
        if content not in vocab:
            raise DataError(
                f"{file}: tokenizer_config.json names {key} {content!r}, which is not in the vocabulary"
            )
        return vocab[content]
    return next((vocab[name] for name in common if name in vocab), None)
