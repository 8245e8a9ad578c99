"""Ranks that differ in code, libraries or config are refused before training, each difference named with its ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.launch.forked import fork_ranks
from tests.train.test_runs import TINY, write_rows
from titan5d.config.load import load_config
from titan5d.hardware import find_device
from titan5d.launch import link_speed, preflight
from titan5d.launch.link_speed import AxisSpeed, speeds_text
from titan5d.launch.local_ranks import run_ranks
from titan5d.launch.preflight import PreflightRefused, agree
from titan5d.launch.run import train
from titan5d.parallel.mesh import Meshes
from titan5d.topology import Topology


def _agree(different: str) -> list[str]:
    rank = dist.get_rank()
    config = load_config([])
    if rank == 2 and different == "config":
        config.training.seq_len = 77
        config.optimizer.lr = 0.5
    if different == "cache":
        config.training.cache_folder = f"/somewhere/{rank}"
    if rank >= 2 and different == "torch":
        preflight.versions = lambda: (("torch", "9.9"), ("Python", "3.11.1"), ("titan5d", "1"))
    elif different == "torch":
        preflight.versions = lambda: (("torch", "2.13.0"), ("Python", "3.11.1"), ("titan5d", "1"))
    if rank == 1 and different == "code":
        original = preflight.source_hashes
        preflight.source_hashes = lambda: {**original(), "titan5d/train/loss.py": "another"}
    try:
        agree(config)
    except PreflightRefused as refused:
        return refused.problems
    return []


@pytest.mark.parametrize(
    ("different", "expected"),
    [
        ("nothing", []),
        ("cache", []),
        (
            "config",
            [
                ["training.seq_len is not the same on all ranks: ranks 0, 1, 3: 256; rank 2: 77"],
                ["optimizer.lr is not the same on all ranks", "rank 2: 0.5"],
            ],
        ),
        (
            "torch",
            [["torch is not the same on all ranks: ranks 0, 1 (", "): 2.13.0; ranks 2, 3 (", "): 9.9"]],
        ),
        (
            "code",
            [["the code of titan5d is not the same", "ranks 0, 2, 3 (", "different: titan5d/train/loss.py;"]],
        ),
    ],
)
def test_what_differs_is_named_on_all_ranks(different: str, expected: Sequence[Sequence[str]]) -> None:
    results = run_ranks(_agree, 4, different)
    assert results[0] == results[1] == results[2] == results[3]
    found = sorted(results[0], key=lambda problem: not problem.startswith("training"))
    assert len(found) == len(expected)
    for problem, parts in zip(found, expected, strict=True):
        assert all(part in problem for part in parts), problem


def test_nodes_with_different_numbers_of_ranks_are_named() -> None:
    ranks = [
        preflight.Fingerprint(host, here, (), "code", "config") for host, here in (("a", 1), ("b", 2), ("b", 2))
    ]
    (problem,) = preflight.node_problems(ranks)
    assert "rank 0 (a): 1; ranks 1, 2 (b): 2; start all with the same NGPU" in problem
    assert preflight.node_problems(ranks[1:]) == []


def test_a_run_with_another_config_on_one_rank_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("")
    rows = write_rows(tmp_path / "rows.jsonl")
    flags: dict[str, Any] = {**TINY, "training.dataset_path": rows, "job.dump_folder": tmp_path / "run"}
    words = ["--config", str(tmp_path / "empty.toml"), *(f"--{key}={value}" for key, value in flags.items())]

    def body(rank: int) -> None:
        assert train([*words, f"--optimizer.lr={0.1 + rank}"]) == 2

    started = time.monotonic()
    ended = fork_ranks(body, 2, tmp_path, 30)
    assert [rank.status for rank in ended] == [0, 0]
    assert "refused: optimizer.lr is not the same on all ranks: rank 0: 0.1; rank 1: 1.1" in ended[0].stderr
    assert "refused" not in ended[1].stderr
    assert time.monotonic() - started < 30 and not (tmp_path / "run").exists()


def _measured(topology: Topology, has_experts: bool) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("titan5d").addHandler(handler)
    logging.getLogger("titan5d").setLevel(logging.INFO)
    meshes = Meshes(topology, "cpu", has_experts=has_experts)
    started = time.monotonic()
    link_speed.measure(meshes, torch.device("cpu"), ranks_on_a_node=2)
    assert time.monotonic() - started < 20
    return lines


def test_links_and_ranks_are_measured() -> None:
    for lines in run_ranks(_measured, 4, Topology(dp_shard=2, tp=2), False):
        shard, tp, ranks = lines
        assert shard.startswith("preflight: axis shard, 2 ranks across nodes: ")
        assert tp.startswith("preflight: axis tp, 2 ranks inside a node: ")
        assert " GB/s, a small all-reduce " in tp and "(nothing is assumed of this device)" in tp
        assert ranks.startswith("preflight: matrix products of the median rank: ")


def test_links_of_experts_are_measured_where_rows_travel() -> None:
    for *lines, _ in run_ranks(_measured, 4, Topology(dp_shard=4, ep=2, etp=2), True):
        assert [line.split(",")[0] for line in lines] == [f"preflight: axis {a}" for a in ("shard", "ep", "ep_etp")]
    for *lines, _ in run_ranks(_measured, 4, Topology(dp_shard=4, ep=2), True):
        assert [line.split(",")[0] for line in lines] == [f"preflight: axis {a}" for a in ("shard", "efsdp", "ep")]


def test_slow_links_and_ranks_are_named_beside_the_assumption() -> None:
    h100 = find_device("h100-80g")
    fine = AxisSpeed("tp", [0, 1], True, 400e9, 2e-5, 410e9).text(h100)
    assert fine == (
        "axis tp, 2 ranks inside a node: 400 GB/s, a small all-reduce 20 us (planned with: 450 GB/s, 3 us a hop)"
    )
    slow = AxisSpeed("shard", [8, 9], False, 5e9, 2e-5, 48e9).text(h100)
    assert slow.endswith("(planned with: 50 GB/s, 10 us a hop); SLOW: ranks 8, 9 reach 10% of 50 GB/s")
    assert "SLOW: rank 2 50%, rank 0 79% of it" in speeds_text([79e12, 100e12, 50e12, 100e12, 101e12])
    assert "slowest 90% of it" in speeds_text([90e12, 100e12, 100e12])
