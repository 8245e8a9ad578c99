"""Says again why a run hung or failed, from the records its ranks left: titan5d diagnose RUN_FOLDER [--json]

RUN_FOLDER is job.dump_folder; of several starts of a run the last with records counts, or name the folder of one start.
With machines that share no folder, copy their records into one folder first. Exit status 0; 2 if there is nothing to
read.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from titan5d.config.schema_execution import Comm
from titan5d.launch.record import read_records, read_ring, record_files
from titan5d.launch.traces import read_traces
from titan5d.launch.verdict import VERDICT, Verdict, judge


class NothingToRead(Exception):
    """There are no records; the text says where they were looked for."""


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="titan5d diagnose", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="RUN_FOLDER", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    given = parser.parse_args(argv)
    try:
        folder, prefix = find_records(given.folder)
        verdict = diagnose(folder, prefix)
    except NothingToRead as nothing:
        print(f"titan5d diagnose: {nothing}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps({"folder": str(folder), **asdict(verdict)}))
    else:
        print(f"{verdict.text}\nrecords: {folder}")
    return 0


def diagnose(folder: Path, prefix: str) -> Verdict:
    """The verdict of one start of a run: the one its ranks found, unless there are more records now than they had."""
    records = read_records(folder, prefix)
    saved = folder / VERDICT
    if saved.exists():
        values = json.loads(saved.read_text(encoding="utf-8"))
        if values["records"] == sorted(records):
            return Verdict(values["kind"], values["culprits"], values["text"], records=values["records"])
    records = {
        rank: replace(record, calls=read_ring(folder, prefix, record)) for rank, record in records.items()
    }
    world = max(record.world for record in records.values())
    return judge(records, read_traces(folder, prefix), world)


def find_records(folder: Path) -> tuple[Path, str]:
    """(folder of the last start with records, prefix of their names). Raises NothingToRead."""
    if not folder.is_dir():
        raise NothingToRead(f"there is no folder {folder}; give the run's job.dump_folder")
    defaults = Comm()
    for run_folder in (folder, folder.parent.parent):
        name, prefix = _names(run_folder, defaults)
        if run_folder != folder and record_files(folder, prefix):
            return folder, prefix
        starts = sorted((run_folder / name).glob("*/")) if run_folder == folder else []
        for start in reversed(starts):
            if record_files(start, prefix):
                return start, prefix
    if record_files(folder, defaults.save_traces_file_prefix):
        return folder, defaults.save_traces_file_prefix
    name, _ = _names(folder, defaults)
    raise NothingToRead(
        f"no rank has left a record in {folder / name}/*/ (comm.save_traces_folder) or in {folder} itself; ranks leave"
        " them when a collective takes longer than comm.train_timeout_seconds, or when one of them fails"
    )


def _names(run_folder: Path, defaults: Comm) -> tuple[str, str]:
    """(comm.save_traces_folder, comm.save_traces_file_prefix) of a run."""
    try:
        comm = tomllib.loads((run_folder / "config.toml").read_text(encoding="utf-8")).get("comm", {})
    except (OSError, tomllib.TOMLDecodeError):
        comm = {}
    return (
        comm.get("save_traces_folder", defaults.save_traces_folder),
        comm.get("save_traces_file_prefix", defaults.save_traces_file_prefix),
    )
