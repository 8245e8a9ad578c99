"""What run_train.sh decides before it starts anything: refusals, ranks, the torchrun command, the environment."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from titan5d.launch import torchrun_ranks
from titan5d.launch.torchrun_ranks import (
    Nodes,
    Refused,
    Run,
    prepare,
    rank_environment,
    ranks_on_a_node,
    read_nodes,
    too_many,
    torchrun,
)

ONE = Nodes()


@dataclass
class Degrees:
    data_parallel_replicate_degree: int = 1
    data_parallel_shard_degree: int = -1
    context_parallel_degree: int = 1
    tensor_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1


@pytest.mark.parametrize(
    ("degrees", "device", "gpus", "nodes", "expected"),
    [
        (Degrees(), "cpu", 0, 1, 2),
        (Degrees(), "cuda", 8, 1, 8),
        (Degrees(data_parallel_shard_degree=1), "cpu", 0, 1, 1),
        (Degrees(data_parallel_shard_degree=4), "cpu", 0, 1, 4),
        (Degrees(tensor_parallel_degree=4), "cpu", 0, 1, 4),
        (Degrees(tensor_parallel_degree=2), "cpu", 0, 1, 2),
        (Degrees(2, 2, 1, 2, 1), "cpu", 0, 1, 8),
        (Degrees(2, 2, 1, 2, 1), "cpu", 0, 2, 4),
        (Degrees(2, 2, 1, 2, 1), "cuda", 8, 1, 8),
        (Degrees(1, 2), "cuda", 8, 1, 2),  # fewer than there are, if that is what the degrees say
        (Degrees(1, 16), "cuda", 8, 1, 8),  # more than there are: check() then refuses with the numbers
        (Degrees(tensor_parallel_degree=2), "cuda", 8, 2, 8),
        (Degrees(0, -1, -3, 0, 1), "cpu", 0, 1, 2),  # nonsense is check()'s to refuse
    ],
)
def test_ranks_are_what_the_degrees_ask_for(degrees: Degrees, device: str, gpus: int, nodes: int, expected: int):
    assert ranks_on_a_node(degrees, device, gpus, nodes) == expected  # type: ignore[arg-type]


def test_one_node_needs_nothing():
    assert read_nodes({}) == Nodes()
    assert read_nodes({"NNODES": "1", "MASTER_PORT": "1234"}) == Nodes(port=1234)


def test_several_nodes():
    environ = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "head"}
    assert read_nodes(environ) == Nodes(2, 1, "head", 29500)
    assert read_nodes({**environ, "MASTER_PORT": "1234"}).port == 1234


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"NNODES": "2", "NODE_RANK": "0"}, ["NNODES=2 needs MASTER_ADDR"]),
        ({"NNODES": "2", "MASTER_ADDR": "h"}, ["NNODES=2 needs NODE_RANK"]),
        ({"NNODES": "2"}, ["needs MASTER_ADDR", "needs NODE_RANK"]),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "h"}, ["NODE_RANK=2 is outside 0 to 1"]),
        ({"NNODES": "two"}, ["NNODES=two is not a whole number"]),
        ({"NNODES": "0"}, ["NNODES=0 must be at least 1"]),
        ({"MASTER_PORT": "99999"}, ["MASTER_PORT=99999 is not a port"]),
    ],
)
def test_what_is_missing_on_several_nodes_is_refused_at_once(environ: dict[str, str], words: list[str]):
    with pytest.raises(Refused) as refused:
        read_nodes(environ)
    for word in words:
        assert word in str(refused.value)


def test_a_run_without_gpus_gets_two_cpu_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torchrun_ranks, "count_gpus", lambda environ: 0)
    run = prepare(["--training.steps", "3"], {}, ONE)
    assert (run.arguments, run.ranks, run.device) == (["--training.steps", "3"], 2, "cpu")


def test_ngpu_and_device_come_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torchrun_ranks, "count_gpus", lambda environ: 8)
    monkeypatch.setattr(torchrun_ranks, "torch_build", lambda: ("2.13.0", True))
    flags = ["--training.global_batch_size", "-1"]  # fits any number of ranks
    run = prepare(flags, {}, ONE)
    assert (run.ranks, run.device) == (8, "cuda")
    run = prepare(flags, {"NGPU": "4", "DEVICE": "cpu"}, ONE)
    assert (run.arguments, run.ranks, run.device) == (["--training.device", "cpu", *flags], 4, "cpu")
    assert prepare([*flags, "--training.device", "cuda"], {"NGPU": "4", "DEVICE": "cpu"}, ONE).device == "cuda"


def refusal(argv: list[str], environ: dict[str, str]) -> str:
    with pytest.raises(Refused) as refused:
        prepare(argv, environ, ONE)
    return str(refused.value)


def test_refusals_name_the_setting_and_the_numbers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torchrun_ranks, "count_gpus", lambda environ: 0)
    assert "NGPU=0 must be at least 1" in refusal([], {"NGPU": "0"})
    assert "NGPU=all is not a whole number" in refusal([], {"NGPU": "all"})
    assert "DEVICE=gpu must be cpu or cuda" in refusal([], {"DEVICE": "gpu"})
    assert "there is none here" in refusal([], {"DEVICE": "cuda"})
    assert "training.stpes: unknown key; did you mean training.steps?" in refusal(["--training.stpes", "1"], {})
    assert "but this run has 3 ranks" in refusal(["--parallelism.data_parallel_shard_degree", "2"], {"NGPU": "3"})


def test_gpus_and_ranks_must_match(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torchrun_ranks, "count_gpus", lambda environ: 2)
    monkeypatch.setattr(torchrun_ranks, "torch_build", lambda: ("2.13.0+cpu", False))
    assert "torch 2.13.0+cpu is a build without them" in refusal([], {"DEVICE": "cuda"})
    monkeypatch.setattr(torchrun_ranks, "torch_build", lambda: ("2.13.0", True))
    assert "NGPU=4 ranks, but there are 2 GPUs" in refusal([], {"NGPU": "4"})


def test_a_model_that_fits_nowhere_here_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torchrun_ranks, "count_gpus", lambda environ: 0)
    text = refusal(["--config", "llama70b"], {"NGPU": "256"})
    assert "70,553,706,496 parameters" in text
    assert "GiB" in text


def test_more_cpu_ranks_than_memory_holds_are_refused():
    gib = 2**30
    assert too_many(2, 1 * gib) == []
    (problem,) = too_many(256, 16 * gib)
    assert "256 CPU ranks take at least 64.0 GiB" in problem
    assert "this machine has 16.0 GiB" in problem


def test_torchrun_on_one_node_takes_a_free_port_and_on_several_the_one_agreed():
    assert torchrun(ONE, 2)[1:] == [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        "--local-addr=127.0.0.1",
    ]
    assert torchrun(Nodes(2, 1, "head", 1234), 4)[3:] == [
        "--nproc-per-node=4",
        "--nnodes=2",
        "--node-rank=1",
        "--master-addr=head",
        "--master-port=1234",
    ]
    assert "--master-port=1234" in torchrun(Nodes(port=1234), 1)


def test_ranks_share_the_cores_and_what_is_set_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torchrun_ranks, "count_cores", lambda: 8)
    environ = rank_environment({"A": "b"}, Run([], 2, "cpu", 300))
    assert environ == {"A": "b", "OMP_NUM_THREADS": "4", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
    assert rank_environment({}, Run([], 32, "cpu", 300))["OMP_NUM_THREADS"] == "1"
    assert rank_environment({"OMP_NUM_THREADS": "3"}, Run([], 2, "cpu", 300))["OMP_NUM_THREADS"] == "3"
    assert rank_environment({}, Run([], 2, "cuda", 300)) == {"OMP_NUM_THREADS": "4"}


def test_the_launcher_starts_without_torch():
    program = "import sys, titan5d.launch.torchrun_ranks; print('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=root, check=True)
    assert result.stdout.strip() == "False"


def test_a_python_without_the_packages_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torchrun_ranks, "NEEDED", ("json", "no_such_package_a", "no_such_package_b"))
    with pytest.raises(Refused, match="has no no_such_package_a, no_such_package_b"):
        torchrun_ranks.check_python()


def test_a_torch_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torchrun_ranks, "torch_build", lambda: ("2.9.1+cu126", True))
    with pytest.raises(Refused, match=r"has torch 2\.9\.1\+cu126, titan5d needs 2\.11 or newer"):
        torchrun_ranks.check_python()


def test_an_elastic_run_must_work_on_every_number_of_nodes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torchrun_ranks, "count_gpus", lambda environ: 0)
    flags = ["--training.local_batch_size", "1", "--training.global_batch_size"]
    elastic = Nodes(4, 0, "head", 29500, fewest=2)
    with pytest.raises(Refused) as refused:
        prepare([*flags, "16"], {"NGPU": "2"}, elastic)
    assert "NNODES=2:4 lets the run go on with 3 nodes of 2 ranks" in str(refused.value)
    assert "numbers of nodes that work: 2, 4" in str(refused.value)
    assert prepare([*flags, "24"], {"NGPU": "2"}, elastic).ranks == 2
