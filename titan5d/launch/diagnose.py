"""Says again why a run hung or failed, from the records its ranks left: titan5d diagnose RUN_FOLDER [--json]

RUN_FOLDER is job.dump_folder; of several starts of a run the last with records counts, or name the folder of one start.
With machines that share no folder, copy their records into one folder first. What is damaged is left out, and named at
the end. Exit status 0; 2 if there is nothing to read.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from titan5d.config.schema_execution import Comm
from titan5d.launch.record import UNREADABLE, RankRecord, read_records, read_ring, record_files, unreadable
from titan5d.launch.traces import Traces, read_traces
from titan5d.launch.verdict import (
    SHOWN_RANKS,
    VERDICT,
    Verdict,
    judge,
    later_record,
    read_verdict,
)
from titan5d.launch.wording import rank_list


class NothingToRead(Exception):
    """There are no records; the text says where they were looked for."""


@dataclass(frozen=True)
class Diagnosis:
    """What the folder of one start says.

    Attributes:
        later: of ranks that left their records after the verdict.
        left_out: a sentence for each file that cannot be read.
    """

    verdict: Verdict
    later: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="titan5d diagnose", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="RUN_FOLDER", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    given = parser.parse_args(argv)
    left_out: list[str] = []
    try:
        folder, prefix = find_records(given.folder, left_out)
        found = diagnose(folder, prefix)
    except NothingToRead as nothing:
        print("; ".join([f"titan5d diagnose: {nothing}", *left_out]), file=sys.stderr)
        return 2
    left_out += found.left_out
    if given.json:
        more = {"later": found.later, "left_out": left_out}
        print(json.dumps({"folder": str(folder), **asdict(found.verdict), **more}))
    else:
        lines = [found.verdict.text, *found.later, f"records: {folder}"]
        print("\n".join([*lines, *(f"left out: {sentence}" for sentence in left_out)]))
    return 0


def diagnose(folder: Path, prefix: str) -> Diagnosis:
    """Says the verdict that the ranks of one start found once more; judges if there is none, or if there are records of
    its time that the one who judged could not see (of machines that share no folder).

    Raises NothingToRead.
    """
    left_out: list[str] = []
    records = read_records(folder, prefix, left_out)
    damaged = set(record_files(folder, prefix)) - set(records)
    verdict: Verdict | None = None
    try:
        verdict = read_verdict(folder)
    except FileNotFoundError:
        pass
    except UNREADABLE as error:
        left_out.append(unreadable(folder / VERDICT, error))
    later: list[str] = []
    seen = records
    if verdict is not None:
        more = {rank: record for rank, record in records.items() if rank not in verdict.records}
        after = {rank: record for rank, record in more.items() if record.at > verdict.at}
        later = _later(after, verdict)
        if len(after) == len(more):
            return Diagnosis(verdict, later, left_out)
        # who called something after the verdict would look as if it had never been late
        seen = {rank: record for rank, record in records.items() if rank not in after}
    if not seen:
        raise NothingToRead("; ".join([f"nothing in {folder} can be read", *left_out]))
    seen = {
        rank: replace(record, calls=read_ring(folder, prefix, record, left_out))
        for rank, record in seen.items()
    }
    try:
        traces = read_traces(folder, prefix)
    except OSError as error:
        traces = Traces()
        left_out.append(unreadable(Path(str(error.filename)), error))
    judged = judge(seen, traces, max(record.world for record in seen.values()), damaged)
    return Diagnosis(judged, later, left_out)


def _later(records: Mapping[int, RankRecord], verdict: Verdict) -> list[str]:
    shown = [later_record(record, verdict) for _, record in sorted(records.items())[:SHOWN_RANKS]]
    others = sorted(records)[SHOWN_RANKS:]
    return [*shown, f"... and so did {rank_list(others)}"] if others else shown


def find_records(folder: Path, left_out: list[str]) -> tuple[Path, str]:
    """(folder of the last start with records, prefix of their names). Raises NothingToRead.

    `left_out`: gets a sentence about a config that cannot be read.
    """
    if not folder.is_dir():
        raise NothingToRead(f"there is no folder {folder}; give the run's job.dump_folder")
    defaults = Comm()
    for run_folder in dict.fromkeys((folder, folder.parent.parent)):
        name, prefix = _names(run_folder, defaults, left_out)
        if run_folder != folder and _is_start(folder, prefix):
            return folder, prefix
        starts = sorted((run_folder / name).glob("*/")) if run_folder == folder else []
        for start in reversed(starts):
            if _is_start(start, prefix):
                return start, prefix
    if _is_start(folder, defaults.save_traces_file_prefix):
        return folder, defaults.save_traces_file_prefix
    name, _ = _names(folder, defaults, [])
    raise NothingToRead(
        f"no rank has left a record in {folder / name}/*/ (comm.save_traces_folder) or in {folder} itself; ranks leave"
        " them when a collective takes longer than comm.train_timeout_seconds, or when one of them fails"
    )


def _is_start(folder: Path, prefix: str) -> bool:
    """Whether there is something to read; a verdict is enough."""
    return bool(record_files(folder, prefix)) or (folder / VERDICT).exists()


def _names(run_folder: Path, defaults: Comm, left_out: list[str]) -> tuple[str, str]:
    """(comm.save_traces_folder, comm.save_traces_file_prefix) of a run."""
    names = {
        "save_traces_folder": defaults.save_traces_folder,
        "save_traces_file_prefix": defaults.save_traces_file_prefix,
    }
    file = run_folder / "config.toml"
    try:
        comm = tomllib.loads(file.read_text(encoding="utf-8")).get("comm", {})
        if not isinstance(comm, dict):
            raise ValueError("comm is no table")
        given = {name: comm[name] for name in names if name in comm}
        if not all(isinstance(value, str) for value in given.values()):
            raise ValueError("a name in comm is no text")
        names |= given
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # ValueError: no text, or no TOML
        left_out.append(unreadable(file, error))
    return names["save_traces_folder"], names["save_traces_file_prefix"]
