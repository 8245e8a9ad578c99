"""Files of a checkpoint: what is written is what is read, and damage is found and named."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from titan5d.checkpoint.errors import CheckpointRefused, Damaged
from titan5d.checkpoint.folder import (
    Lock,
    check_writable,
    complete,
    complete_steps,
    keep_latest,
    partial_name,
    remove_leftovers,
    step_folders,
)
from titan5d.checkpoint.manifest import Chunk, Manifest, StoredTensor, read_manifest, verify, write_manifest
from titan5d.checkpoint.source import CheckpointSource, overlaps
from titan5d.checkpoint.tensor_file import Spec, checksum_of, write_tensor_file


def make(folder: Path, step: int = 1) -> Manifest:
    """A complete checkpoint of one tensor (6, 4), saved in two blocks."""
    folder.mkdir(parents=True)
    whole = torch.arange(24, dtype=torch.float32).view(6, 4)
    manifest = Manifest(step, "full")
    chunks = []
    for rank, rows in enumerate((slice(0, 4), slice(4, 6))):
        name, file = f"w@{rank}", f"rank-0000{rank}.safetensors"
        part = whole[rows]
        spec = Spec(part.dtype, tuple(part.shape))
        manifest.files[file] = write_tensor_file(folder / file, {name: spec}, lambda _, part=part: part)
        chunks.append(Chunk(file, name, (rows.start, 0), tuple(part.shape)))
    manifest.tensors["w"] = StoredTensor("F32", (6, 4), chunks)
    write_manifest(folder, manifest)
    return manifest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_the_safetensors_package_reads_what_is_written(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(5, 3), (), (0,), (7,)]
    tensors = {
        f"t{n}": torch.randint(2, shape, generator=generator).to(dtype) for n, shape in enumerate(shapes)
    }
    tensors["turned"] = torch.randint(2, (4, 6), generator=generator).to(dtype).T
    tensors["odd"] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    specs = {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    path = tmp_path / "a.safetensors"
    record = write_tensor_file(path, specs, tensors.__getitem__)
    assert record == checksum_of(path) and record.bytes == path.stat().st_size
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def produce(name: str) -> torch.Tensor:
        assert not any(tensor() is not None for tensor in made)
        tensor = torch.full((4,), float(name))
        made.append(weakref.ref(tensor))
        return tensor

    specs = {str(number): Spec(torch.float32, (4,)) for number in range(3)}
    write_tensor_file(tmp_path / "a.safetensors", specs, produce)
    assert len(made) == 3


def test_any_block_is_read_from_any_blocks(tmp_path: Path) -> None:
    source = CheckpointSource(tmp_path / "c", make(tmp_path / "c"))
    whole = torch.arange(24, dtype=torch.float32).view(6, 4)
    for top in range(6):
        for bottom in range(top + 1, 7):
            local = torch.full((bottom - top, 2), -1, dtype=torch.bfloat16)
            source.read_into("w", (top, 1), local)
            assert torch.equal(local.float(), whole[top:bottom, 1:3])
    assert not list(overlaps(source.manifest.tensors["w"].chunks[:1], (4, 0), (2, 4)))
    hole = CheckpointSource(tmp_path / "c", source.manifest)
    del hole.manifest.tensors["w"].chunks[1]
    with pytest.raises(Damaged, match="16 of the 24"):
        hole.read_into("w", (0, 0), torch.empty(6, 4))


def test_every_flipped_byte_and_every_cut_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    manifest = make(folder)
    assert read_manifest(folder) == manifest and verify(folder, manifest) == []
    for name in ("rank-00000.safetensors", "rank-00001.safetensors", "manifest.json"):
        path = folder / name
        good = path.read_bytes()
        for place in range(0, len(good), 7):
            path.write_bytes(good[:place] + bytes([good[place] ^ 16]) + good[place + 1 :])
            assert _damage(folder), f"{name} byte {place}"
        path.write_bytes(good[:-1])
        assert str(path) in _damage(folder)
        path.unlink()
        assert name in _damage(folder)
        path.write_bytes(good)
    assert not _damage(folder)
    # each of several readers takes its share, and together they miss none
    (folder / "rank-00001.safetensors").write_bytes(good[:1] * manifest.files["rank-00001.safetensors"].bytes)
    assert sum(len(verify(folder, manifest, part, 3)) for part in range(3)) == 1


def _damage(folder: Path) -> str:
    try:
        return "; ".join(verify(folder, read_manifest(folder)))
    except Damaged as error:
        return str(error)


def test_a_manifest_cannot_lead_out_of_its_folder(tmp_path: Path) -> None:
    manifest = make(tmp_path / "c")
    manifest.tensors["w"].chunks[0] = Chunk("../secret", "w@0", (0, 0), (4, 4))
    write_manifest(tmp_path / "c", manifest)
    with pytest.raises(Damaged, match=r"\.\./secret"):
        read_manifest(tmp_path / "c")


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["pickle", "random"])
@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors", ".metadata", "model.bin"])
def test_a_poisoned_file_runs_nothing(tmp_path: Path, kind: str, name: str) -> None:
    """Case 095, in every tool that reads checkpoints."""
    folder, marker = tmp_path / "run" / "step-1", tmp_path / "marker"
    make(folder)
    poison = pickle.dumps(Touch(marker)) if kind == "pickle" else bytes(range(256)) * 8
    (folder / name).write_bytes(poison)
    if name in (".metadata", "model.bin"):
        (folder / "manifest.json").unlink()
    from titan5d.__main__ import main

    for words in (
        ["checkpoint", "ls", str(folder)],
        ["checkpoint", "inspect", str(folder)],
        ["checkpoint", "verify", str(folder)],
        ["convert", "to-hf", str(folder), str(tmp_path / "out")],
        ["convert", "from-hf", str(folder), str(tmp_path / "out")],
    ):
        status = main(words)
        assert status in (1, 2) or words[1] in ("ls", "inspect"), words
    assert not marker.exists() and not (tmp_path / "out").exists()
    pickle.loads(pickle.dumps(Touch(marker)))
    assert marker.exists()  # the poison works where it is read


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    """Case 053."""
    for name in ("step-3.tmp", "best", "step-abc", "step-99", "step-007"):
        (tmp_path / name).mkdir()
    for step in range(1, 9):
        make(tmp_path / f"step-{step}", step)
        keep_latest(tmp_path, 2, step)
    assert complete_steps(tmp_path) == [8, 7] and list(step_folders(tmp_path)) == [99, 8, 7]
    left = {"step-3.tmp", "best", "step-abc", "step-99", "step-007", "step-7", "step-8"}
    assert {path.name for path in tmp_path.iterdir()} == left
    assert keep_latest(tmp_path, 0, 8) == [] and keep_latest(tmp_path, 1, 8) == [7]
    assert complete_steps(tmp_path) == [8]
    make(tmp_path / "step-2", 2)  # a run that went back: what it has just saved stays
    assert keep_latest(tmp_path, 1, 2) == [8] and complete_steps(tmp_path) == [2]


def test_what_a_crash_leaves_is_removed_and_nothing_else(tmp_path: Path) -> None:
    made = [partial_name(5), partial_name(5).replace("partial", "leaving"), "step-5.partial-old", "step-5"]
    for name in made:
        (tmp_path / name).mkdir()
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"step-5.partial-old", "step-5"}


def test_a_checkpoint_takes_the_place_of_what_has_its_name(tmp_path: Path) -> None:
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-4" / "half").write_text("")
    make(tmp_path / "step-4.partial-00000000", 4)
    complete(tmp_path / "step-4.partial-00000000", 4)
    assert [path.name for path in tmp_path.iterdir()] == ["step-4"] and complete_steps(tmp_path) == [4]


def test_two_jobs_on_one_folder(tmp_path: Path) -> None:
    lock = Lock(tmp_path)
    with pytest.raises(CheckpointRefused, match=f"process {os.getpid()} on"):
        Lock(tmp_path)
    lock.release()
    Lock(tmp_path).release()
    # killed outright, its holder leaves no lock behind
    program = "import sys, os; from pathlib import Path; from titan5d.checkpoint.folder import Lock\n"
    program += "Lock(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60, check=False)
    assert ended.returncode == -9 and json.loads((tmp_path / ".lock").read_text())["pid"] != os.getpid()
    Lock(tmp_path).release()


def test_room_and_permission_are_checked(tmp_path: Path) -> None:
    assert check_writable(tmp_path / "new", 0, 1000) == []
    assert not any((tmp_path / "new").iterdir())
    (problem,) = check_writable(tmp_path, 0, 10**18)
    assert "1000000000.00 GB" in problem and str(tmp_path) in problem
    (tmp_path / "file").write_text("")
    (problem,) = check_writable(tmp_path / "file" / "below", 0, 0)
    assert "errno" in problem and str(tmp_path / "file") in problem
