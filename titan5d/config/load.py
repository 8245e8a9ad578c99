"""TOML file + `extends` + flags -> one validated Config, all errors at once.

    --config llama3_8b --training.steps 100 --compile.enable --parallelism.tensor_parallel_degree=2

File and flag obey the same rules: flags are parsed as TOML values, laid over the file's table, and the whole is
validated once. The rules across keys are check.py's.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import tomli_w
from pydantic import TypeAdapter, ValidationError

from titan5d.config.schema import Config
from titan5d.config.spellings import modern_spellings

QUICKSTART = "quickstart"
"""The config of a call without --config."""


class ConfigError(Exception):
    """Everything that is wrong with a config, ready to be shown. The process ends with exit status 2."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(
            "\n".join([f"refused: {count} in the config", *(f"  - {line}" for line in self.problems)])
        )


def load_config(argv: Sequence[str], notes: list[str] | None = None) -> Config:
    """Reads `--config NAME|FILE` (default: the quick start) and `--section.key value` flags into a Config.

    What a user should hear of without being stopped (an older spelling that was understood) is appended to `notes`.
    Raises ConfigError with every problem found.
    """
    name, flags = parse_flags(argv)
    path = find_config(name or QUICKSTART)
    table = read_toml(path)
    for keys, value in flags:
        _put(table, keys, value)
    table = modern_spellings(table, notes if notes is not None else [])
    config = validate(table)
    config.job.config_file = str(path)
    return config


def parse_flags(argv: Sequence[str]) -> tuple[str | None, list[tuple[list[str], Any]]]:
    """Splits the command line into the config's name and (dotted path, value) pairs. A flag without value is true."""
    name, flags, problems = None, [], []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            problems.append(f"`{word}` is not a flag; write --section.key value")
            continue
        key, equals, text = word[2:].partition("=")
        if not equals:
            text = words.pop(0) if words and not words[0].startswith("--") else "true"
        if key in ("config", "job.config_file"):
            name = text
        elif "." not in key:
            problems.append(f"--{key}: a flag has the form --section.key value{_similar(key, _all_keys())}")
        else:
            keys = key.split(".")
            flags.append((keys, _flag_value(keys, text)))
    if problems:
        raise ConfigError(problems)
    return name, flags


def find_config(name: str) -> Path:
    """A file path as it is, or a name looked up in `train_configs/` (beside the package, then here)."""
    beside = Path(__file__).resolve().parents[2] / "train_configs"
    places = [Path(name)]
    for folder in (Path("train_configs"), beside):
        places += [folder / name, folder / f"{name}.toml"]
    for place in places:
        if place.is_file():
            return place
    known = sorted(file.stem for file in beside.glob("*.toml"))
    raise ConfigError(
        [f"--config {name}: no such file, and no such name in train_configs/ (there are: {', '.join(known)})"]
    )


def read_toml(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Reads a TOML file laid over the one it `extends` (a path relative to it, or a name in train_configs/)."""
    path = path.resolve()
    if path in seen:
        chain = " -> ".join(str(one) for one in (*seen, path))
        raise ConfigError([f"extends: {chain} comes back to itself"])
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError([f"{path}: {error}"]) from error
    parent = table.pop("extends", None)
    if parent is None:
        return table
    if not isinstance(parent, str):
        raise ConfigError([f"{path}: extends = {parent!r} must be the name of one TOML file"])
    beside = path.parent / parent
    base = read_toml(beside if beside.is_file() else find_config(parent), (*seen, path))
    return merge(base, table)


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Lays one table over another; tables merge key by key, everything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def validate(table: dict[str, Any]) -> Config:
    """Checks types and names of a whole table. Raises ConfigError naming every key that is wrong."""
    try:
        # Through JSON because pydantic's strict mode then still turns 1 into 1.0 where a float is asked for.
        return TypeAdapter(Config).validate_json(json.dumps(table, default=str))
    except ValidationError as error:
        raise ConfigError([_explain(one) for one in error.errors()]) from None


def _explain(error: Any) -> str:
    # pydantic ends the path of a union with the member it tried; those are no keys
    keys = [str(part) for part in error["loc"]]
    dotted = ".".join(keys[: _known_depth(keys)])
    if error["type"] == "unexpected_keyword_argument":
        *parents, last = keys
        section = ".".join(parents)
        here = [key for key in _all_keys() if key.rpartition(".")[0] == section]
        elsewhere = [key for key in _all_keys() if key.rpartition(".")[2] == last]
        hint = (
            f"; it is called {elsewhere[0]} here"
            if elsewhere
            else _similar(".".join(keys), here or _all_keys())
        )
        return f"{'.'.join(keys)}: unknown key{hint}"
    return f"{dotted} = {json.dumps(error['input'])}: {error['msg'].replace('Input should be', 'should be')}"


def _known_depth(keys: list[str]) -> int:
    names = set(_all_keys())
    for depth in range(len(keys), 0, -1):
        if ".".join(keys[:depth]) in names:
            return depth
    return len(keys)


def _similar(word: str, candidates: list[str]) -> str:
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _all_keys(kind: Any = Config, prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name, hint in get_type_hints(kind).items():
        if name.startswith("__"):
            continue
        keys.append(prefix + name)
        if is_dataclass(hint):
            keys += _all_keys(hint, f"{prefix}{name}.")
    return keys


def _flag_value(keys: list[str], text: str) -> Any:
    """Parses a flag's text as a TOML value; as plain text where the key takes text or TOML cannot read it."""
    hint: Any = Config
    for key in keys:
        hint = get_type_hints(hint).get(key) if is_dataclass(hint) else None
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if str in kinds and not any(get_origin(kind) is list for kind in kinds) and text[:1] not in ("'", '"'):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _put(table: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError([f"--{'.'.join(keys)}: {key} is a value, not a section"])
    table[keys[-1]] = value


def to_toml(config: Config) -> str:
    """The resolved config as TOML; keys that are not set (None) are left out, as TOML has no null."""

    def without_none(table: dict[str, Any]) -> dict[str, Any]:
        return {k: without_none(v) if isinstance(v, dict) else v for k, v in table.items() if v is not None}

    return tomli_w.dumps(without_none(asdict(config)))
