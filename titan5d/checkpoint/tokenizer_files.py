"""The files of a tokenizer beside exported weights, so that `AutoTokenizer` opens the folder."""

from __future__ import annotations

import json
from pathlib import Path

from titan5d.checkpoint.tensor_file import FileRecord, write_text
from titan5d.data.tokenizer import BPE4K, ByteTokenizer, load_tokenizer

BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")


def write_tokenizer(path: str, folder: Path) -> tuple[dict[str, FileRecord], dict[str, int]]:
    """Copies or makes the files of the tokenizer called `path` in a config.

    Returns the files' records, and the ids of BOS, EOS and padding for config.json. Raises OSError, DataError.
    """
    tokenizer = load_tokenizer(path)
    ends = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    if tokenizer.bos_id is not None:
        ends["bos_token_id"] = tokenizer.bos_id
    if path == "bytes":
        texts = {"tokenizer.json": _bytes_as_json()}
        names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    else:
        file = BPE4K if path == "bpe4k" else Path(path).expanduser()
        file = file / "tokenizer.json" if file.is_dir() else file
        texts = {"tokenizer.json": file.read_text(encoding="utf-8")}
        for name in BESIDE:
            if (file.parent / name).is_file():
                texts[name] = (file.parent / name).read_text(encoding="utf-8")
        names = _names(texts["tokenizer.json"], ends)
    if "tokenizer_config.json" not in texts:
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **names,
        }
        texts["tokenizer_config.json"] = json.dumps(config, indent=2)
    return {name: write_text(folder / name, text) for name, text in texts.items()}, ends


def _names(tokenizer_json: str, ends: dict[str, int]) -> dict[str, str]:
    """Ids -> the tokens' texts, for tokenizer_config.json."""
    import tokenizers

    made = tokenizers.Tokenizer.from_str(tokenizer_json)
    found = {key.removesuffix("_id"): made.id_to_token(number) for key, number in ends.items()}
    return {key: text for key, text in found.items() if text is not None}


def _bytes_as_json() -> str:
    """The byte tokenizer as a tokenizer.json: byte-level BPE without a single merge."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # The letters byte-level BPE writes bytes with: printable ones stand for themselves, the others follow from 256 on
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    for number, byte in enumerate(byte for byte in range(256) if byte not in letters):
        letters[byte] = chr(256 + number)
    made = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in letters.items()}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in ("<bos>", "<eos>", "<pad>")])
    assert made.get_vocab_size() == ByteTokenizer.vocab_size
    return made.to_str()
