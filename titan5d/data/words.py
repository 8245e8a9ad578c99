"""How our own BPE cuts text into words, and a faster way to encode ASCII text that is cut like that.

BPE never merges across words, so the ids of a text are the ids of its words in a row, and a word met before need
not be encoded again. Code repeats its words so much that looking them up is four times as fast as the library.
"""

from __future__ import annotations

import json
import re

import tokenizers
from tokenizers import Regex, pre_tokenizers

# A word takes one leading space, dot or underscore along; numbers go in groups of three digits; a run of
# white space leaves its last space to the word behind it.
WORDS = r"[ _.]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The same for ASCII text, in the syntax of Python's re.
ASCII_WORDS = re.compile(r"[ _.]?[A-Za-z]+|[0-9]{1,3}| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII)

MAX_REMEMBERED_CHARS = 1 << 25


def word_splitter() -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer of our BPE: words, then their bytes."""
    words = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([words, to_bytes])


def cuts_words_like_ours(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether a tokenizer changes no character and cuts text exactly as `word_splitter` does."""
    if tokenizer.normalizer is not None or tokenizer.pre_tokenizer is None:
        return False
    ours = tokenizers.Tokenizer(tokenizers.models.BPE())
    ours.pre_tokenizer = word_splitter()
    return bool(_pre_tokenizer(tokenizer) == _pre_tokenizer(ours))


class WordMemory:
    """Encodes ASCII text word by word and remembers the ids of each word. Same ids as the tokenizer itself."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: dict[str, list[int]] = {}
        self._chars = 0

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, which must be ASCII."""
        words = ASCII_WORDS.findall(text)
        new = [word for word in dict.fromkeys(words) if word not in self._ids]
        self._chars += sum(map(len, new))
        if self._chars > MAX_REMEMBERED_CHARS:
            self._ids.clear()
            new = list(dict.fromkeys(words))
            self._chars = sum(map(len, new))
        encoded = self._tokenizer.encode_batch_fast(new, add_special_tokens=False)
        self._ids.update((word, encoding.ids) for word, encoding in zip(new, encoded, strict=True))
        ids: list[int] = []
        for word in words:
            ids += self._ids[word]
        return ids


def _pre_tokenizer(tokenizer: tokenizers.Tokenizer) -> object:
    return json.loads(tokenizer.to_str())["pre_tokenizer"]
