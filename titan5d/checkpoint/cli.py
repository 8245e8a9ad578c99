"""`titan5d checkpoint` and `titan5d convert`: look at checkpoints, check them, turn them into Hugging Face's format.

    titan5d checkpoint ls outputs                          every checkpoint of a run
    titan5d checkpoint inspect outputs/checkpoint/step-400 what is in one
    titan5d checkpoint verify outputs                      read every byte, compare with the checksums
    titan5d convert to-hf outputs/checkpoint/step-400 OUT  for transformers
    titan5d convert from-hf FOLDER OUT                     for checkpoint.initial_load_path

Exit status: 0 done and good, 1 something is damaged, 2 refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from titan5d.checkpoint.convert import from_hugging_face, to_hugging_face_folder
from titan5d.checkpoint.errors import CheckpointRefused, Damaged
from titan5d.checkpoint.folder import step_folders
from titan5d.checkpoint.manifest import NAME, Manifest, read_manifest, verify


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    """ls, inspect, verify."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="ls|inspect|verify")
    for name, text in (
        ("ls", "the checkpoints of a run"),
        ("inspect", "what is in a checkpoint"),
        ("verify", "read every byte and compare with the checksums"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("folder", type=Path, help="a run, its checkpoint folder, or one checkpoint")
        command.add_argument("--json", action="store_true", help="one JSON object for programs")


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """to-hf, from-hf."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="to-hf|from-hf")
    for name, text in (("to-hf", "ours -> Hugging Face"), ("from-hf", "Hugging Face -> ours")):
        command = commands.add_parser(name, help=text)
        command.add_argument("source", type=Path, help="folder to read")
        command.add_argument("out", type=Path, help="folder to write; must not exist, or be empty")
        command.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as it is")
        if name == "to-hf":
            command.add_argument(
                "--tokenizer", help="bytes, bpe4k, a tokenizer.json or its folder, to put beside"
            )
        command.add_argument("--file-gb", type=float, default=5.0, help="largest file written; default: 5")


def run_checkpoint(args: argparse.Namespace) -> int:
    """ls, inspect or verify."""
    try:
        folders = find(args.folder)
        if args.action == "inspect":
            if len(folders) != 1:
                names = ", ".join(folder.name for folder in folders)
                raise CheckpointRefused([f"{args.folder} holds {names}; name one of them"])
            return _inspect(folders[0], args.json)
        return _list(folders, args.json, read=args.action == "verify")
    except CheckpointRefused as refused:
        print(refused, file=sys.stderr)
        return 2
    except Damaged as error:
        print(f"damaged: {error}", file=sys.stderr)
        return 1


def run_convert(args: argparse.Namespace) -> int:
    """to-hf or from-hf."""
    try:
        limit = int(args.file_gb * 1e9)
        if args.action == "to-hf":
            files = to_hugging_face_folder(args.source, args.out, args.dtype, args.tokenizer, limit)
        else:
            files = from_hugging_face(args.source, args.out, args.dtype, limit)
    except CheckpointRefused as refused:
        print(refused, file=sys.stderr)
        return 2
    except Damaged as error:
        print(f"damaged: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"failed: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"{args.out}: {len(files)} files, {sum(one.bytes for one in files.values()) / 1e9:.3f} GB")
    return 0


def find(folder: Path) -> list[Path]:
    """The checkpoints meant by a path, newest first. Raises CheckpointRefused when there are none."""
    if (folder / NAME).is_file():
        return [folder]
    for place in (folder, folder / "checkpoint"):
        if steps := step_folders(place):
            return list(steps.values())
    if folder.is_dir() and folder.name.startswith("step-"):
        return [folder]
    raise CheckpointRefused([f"{folder} holds no checkpoint (no step-N, no {NAME})"])


def _list(folders: list[Path], as_json: bool, read: bool) -> int:
    rows: list[dict[str, Any]] = []
    for folder in folders:
        try:
            manifest = read_manifest(folder)
            problems = verify(folder, manifest) if read else []
        except Damaged as error:
            rows.append(
                {"checkpoint": str(folder), "state": "incomplete or damaged", "problems": [str(error)]}
            )
            continue
        state = "damaged" if problems else "good" if read else "complete"
        rows.append({"checkpoint": str(folder), "state": state, "problems": problems, **_row(manifest)})
    if as_json:
        print(json.dumps({"checkpoints": rows}))
    else:
        for row in rows:
            size = (
                f"{row['bytes'] / 1e9:9.3f} GB  {row['kind']:<12} {row['layout']}" if "bytes" in row else ""
            )
            print(f"{row['checkpoint']}  {row['state']}  {size}".rstrip())
            for problem in row["problems"]:
                print(f"    {problem}")
    bad = [row for row in rows if row["problems"]]
    return 1 if read and bad else 0


def _row(manifest: Manifest) -> dict[str, Any]:
    size = sum(record.bytes for record in manifest.files.values())
    return {"step": manifest.step, "kind": manifest.kind, "layout": manifest.layout, "bytes": size}


def _inspect(folder: Path, as_json: bool) -> int:
    manifest = read_manifest(folder)
    facts = _row(manifest) | {
        "optimizer": manifest.optimizer,
        "data": manifest.data,
        "run": manifest.run,
        "model": manifest.model,
        "files": {name: record.bytes for name, record in manifest.files.items()},
    }
    if as_json:
        tensors = {
            key: {"dtype": one.dtype, "shape": one.shape, "blocks": len(one.chunks)}
            for key, one in manifest.tensors.items()
        }
        print(json.dumps(facts | {"tensors": tensors}))
        return 0
    for name, value in facts.items():
        print(f"{name:<10} {value}")
    for key, one in manifest.tensors.items():
        shape = "x".join(map(str, one.shape)) or "scalar"
        print(f"{one.dtype:>5} {shape:>16} in {len(one.chunks):>3}  {key}")
    return 0
