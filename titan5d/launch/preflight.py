"""Before training: do all ranks run the same code, with the same libraries and the same config?

One small gather at every start; what differs is named by key or file with the ranks that have which value, and the
run is refused on all ranks alike. Different code on one node trains to the end and is wrong; a different config hangs
at the first collective of another size.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import titan5d
from titan5d.config.schema import Config
from titan5d.launch.wording import rank_list

MAY_DIFFER = ("training.cache_folder",)
"""Keys that need not be the same everywhere: a cache may lie elsewhere on each machine."""
SHOWN = 5
"""Differing keys or files that are named."""


class PreflightRefused(Exception):
    """Ranks do not fit together. `problems`: one sentence for each difference, the same on all ranks."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(f"refused: {problem}" for problem in problems))
        self.problems = list(problems)


@dataclass(frozen=True)
class Fingerprint:
    """What must be the same on all ranks, but for the host. `ranks_here`: of its node. `code`, `config`: hashes."""

    host: str
    ranks_here: int
    versions: tuple[tuple[str, str], ...]
    code: str
    config: str


def agree(config: Config) -> None:
    """Raises PreflightRefused, on all ranks alike, if they differ in code, libraries or config. Collective."""
    if dist.get_world_size() == 1:
        return
    files, keys = source_hashes(), flat(asdict(config))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    mine = Fingerprint(socket.gethostname(), here, versions(), _hash(files), _hash(keys))
    all_ranks = _gather(mine)
    problems = node_problems(all_ranks) + version_problems(all_ranks)
    if (
        len({rank.code for rank in all_ranks}) > 1
    ):  # the same answer on all ranks, so all of them go on to gather
        problems += code_problems(all_ranks, _gather(files))
    if len({rank.config for rank in all_ranks}) > 1:
        problems += config_problems(_gather(keys))
    if problems:
        raise PreflightRefused(problems)


def versions() -> tuple[tuple[str, str], ...]:
    """(library, version) of what the numbers depend on."""
    try:
        own = version("titan5d")
    except PackageNotFoundError:  # run from a folder of sources
        own = "not installed"
    return ("torch", str(torch.__version__)), ("Python", platform.python_version()), ("titan5d", own)


def source_hashes() -> dict[str, str]:
    """File of this package -> hash of its text."""
    folder = Path(titan5d.__file__).parent
    return {
        str(file.relative_to(folder.parent)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*.py"))
    }


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """ "section.key" -> its value as text, without keys that may differ."""
    values = {}
    for key, value in section.items():
        name = prefix + key
        if isinstance(value, Mapping):
            values.update(flat(value, f"{name}."))
        elif name not in MAY_DIFFER:
            values[name] = repr(value)
    return values


def node_problems(ranks: Sequence[Fingerprint]) -> list[str]:
    """A sentence if nodes have different numbers of ranks: where ranks lie is reckoned with one number."""
    found = [rank.ranks_here for rank in ranks]
    if len(set(found)) == 1:
        return []
    who = _who_has(found, [rank.host for rank in ranks])
    return [f"the number of ranks on a node is not the same on all nodes: {who}; start all with the same NGPU"]


def version_problems(ranks: Sequence[Fingerprint]) -> list[str]:
    """One sentence for each library of which there are several versions."""
    problems = []
    for index, (library, _) in enumerate(ranks[0].versions):
        found = [rank.versions[index][1] for rank in ranks]
        if len(set(found)) > 1:
            who = _who_has(found, [rank.host for rank in ranks])
            problems.append(f"{library} is not the same on all ranks: {who}; install one version everywhere")
    return problems


def code_problems(ranks: Sequence[Fingerprint], files: Sequence[Mapping[str, str]]) -> list[str]:
    """One sentence with the files of this package that are not the same on all ranks."""
    names = sorted({name for each in files for name in each})
    differ = [name for name in names if len({each.get(name) for each in files}) > 1]
    shown = ", ".join(differ[:SHOWN]) + (f" and {len(differ) - SHOWN} more" if len(differ) > SHOWN else "")
    who = _who_has([rank.code[:8] for rank in ranks], [rank.host for rank in ranks])
    return [
        f"the code of titan5d is not the same on all ranks, by hash: {who}; different: {shown}; put one commit on"
        " all machines"
    ]


def config_problems(configs: Sequence[Mapping[str, str]]) -> list[str]:
    """One sentence for each key with several values."""
    differ = [key for key in configs[0] if len({each.get(key) for each in configs}) > 1]
    problems = [
        f"{key} is not the same on all ranks: {_who_has([each.get(key) for each in configs])}; start all nodes"
        " with the same config and flags"
        for key in differ[:SHOWN]
    ]
    if len(differ) > SHOWN:
        problems.append(f"{len(differ) - SHOWN} more keys differ: {', '.join(differ[SHOWN:])}")
    return problems


def _who_has(values: Sequence[Hashable], hosts: Sequence[str] | None = None) -> str:
    """ "ranks 0-7 (host a) 2.13.0, rank 8 (host b) 2.12.1"."""
    ranks: dict[Hashable, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    parts = []
    for value, those in ranks.items():
        names = sorted({hosts[rank] for rank in those}) if hosts is not None else []
        where = f" ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else ""
        parts.append(f"{rank_list(those)}{where}: {value}")
    return "; ".join(parts)


def _hash(values: Mapping[str, str]) -> str:
    return hashlib.sha256("\n".join(f"{key} {value}" for key, value in values.items()).encode()).hexdigest()


def _gather(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found
