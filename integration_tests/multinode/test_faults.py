"""What goes wrong between nodes: all processes end or recover in bounded time, and the log says which rank and why.

    fault                          no restarts                     MAX_RESTARTS > 0
    a rank is killed or raises     all nodes end, status 1         resumes, same losses
    a node is gone                 the others end, status 1        NNODES=1:2 goes on with one; NNODES=2 waits for it
    node 0 (the meeting) is gone   the others end, status 1        the others wait for it, status 1 if it stays away
    the cable is cut               status 1 after comm.train_timeout_seconds, or goes on if it is back before
    a rank hangs in Python         status 1 after that and 30 s    resumes
    a node never comes             status 1 after comm.init_timeout_seconds

Steps are short and checkpoints frequent; the moment of the fault is a step that has been logged.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from integration_tests.multinode.job import HANG, RAISE, Job, job
from integration_tests.multinode.network import Network
from tests.checkpoint.runs import metrics, run, words

STEPS, SAVED_EVERY, AT = 40, 5, 12
FLAGS: dict[str, Any] = {
    "training__steps": STEPS,
    "lr_scheduler__total_steps": STEPS,
    "checkpoint__interval": SAVED_EVERY,
    "model__n_layers": 2,
    "comm__init_timeout_seconds": 60,
    "comm__train_timeout_seconds": 8,
}
STARTS = 60.0
"""Seconds, generous, for ranks to start (again) on a busy machine."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run(folder, "one", 1, **FLAGS) == [0]
    return losses(folder, "one")


def losses(folder: Path, name: str) -> list[float]:
    lines = metrics(folder, name)
    assert sorted(lines) == list(range(1, STEPS + 1))
    return [lines[step]["loss"] for step in sorted(lines)]


@contextmanager
def disturbed(net: Network, folder: Path, **how: Any) -> Iterator[Job]:
    """A job that has just logged step AT."""
    flags = {**FLAGS, **how.pop("flags", {})}
    with job(net, folder, words(folder, "run", **flags), folder / "run", **how) as running:
        running.wait_for_step(AT)
        yield running


def assert_went_on(running: Job, folder: Path, undisturbed: list[float], node: int = 0) -> None:
    assert "continuing after step" in running.log(node)
    assert losses(folder, "run") == pytest.approx(undisturbed, rel=1e-6)


def test_a_killed_rank_ends_the_run_and_the_log_says_which(tmp_path: Path, two_nodes: Network) -> None:
    with disturbed(two_nodes, tmp_path, ranks=2) as running:
        os.kill(running.ranks(1)[1], signal.SIGKILL)
        assert running.statuses(within=45) == {0: 1, 1: 1}
        assert "node 1 of 2" in running.log(1) and "rank 3 died without a word" in running.log(1)
        assert "exitcode  : -9" in running.log(1), "torchrun's report"
        assert "no rank failed here by itself" in running.log(0)
        assert f"the log of {two_nodes.address(1)} says why" in running.log(0)


def test_after_a_killed_rank_the_run_resumes_with_the_same_losses(
    tmp_path: Path, two_nodes: Network, undisturbed: list[float]
) -> None:
    with disturbed(two_nodes, tmp_path, restarts=1) as running:
        os.kill(running.ranks(1)[0], signal.SIGKILL)
        assert running.statuses(within=STARTS) == {0: 0, 1: 0}
        assert "rank 1 died without a word" in running.log(1), "told also when the run goes on"
        assert_went_on(running, tmp_path, undisturbed)


def test_a_node_that_never_comes(tmp_path: Path, two_nodes: Network) -> None:
    argv = words(tmp_path, "run", **{**FLAGS, "comm__init_timeout_seconds": 8})
    with job(two_nodes, tmp_path, argv, tmp_path / "run", started=1) as running:
        assert running.statuses(within=60) == {0: 1}
        assert "1 of 2 nodes joined (10.77.0.1)" in running.log(0) and "given up after 8 s" in running.log(0)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_node_that_finds_no_node_0(tmp_path: Path, two_nodes: Network) -> None:
    argv = words(tmp_path, "run", **{**FLAGS, "comm__init_timeout_seconds": 6})
    with job(two_nodes, tmp_path, argv, tmp_path / "run", started=0) as running:
        running.start(1)
        assert running.statuses(within=40) == {1: 1}
        assert "node 1 of 2 finds nothing at 10.77.0.1:29555" in running.log(1)


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_rank_that_raises(
    tmp_path: Path, two_nodes: Network, undisturbed: list[float], restarts: int
) -> None:
    with disturbed(two_nodes, tmp_path, restarts=restarts) as running:
        os.kill(running.ranks(1)[0], RAISE)
        expected = 0 if restarts else 1
        assert running.statuses(within=STARTS) == {0: expected, 1: expected}
        assert "first to fail was rank 1" in running.log(1)
        assert "RuntimeError: injected failure" in running.log(1)
        if restarts:
            assert_went_on(running, tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_rank_stuck_in_python(
    tmp_path: Path, two_nodes: Network, undisturbed: list[float], restarts: int
) -> None:
    """The others give up after 8 s; torchrun asks the stuck rank to end and kills it 30 s later."""
    with disturbed(two_nodes, tmp_path, restarts=restarts) as running:
        os.kill(running.ranks(1)[0], HANG)
        expected = 0 if restarts else 1
        assert running.statuses(within=8 + 30 + STARTS) == {0: expected, 1: expected}
        assert "rank 0 " in running.log(0) and "rank 1" in running.log(0)
        if restarts:
            assert_went_on(running, tmp_path, undisturbed)


@pytest.mark.slow
def test_without_a_node_an_elastic_run_goes_on_with_the_rest(
    tmp_path: Path, two_nodes: Network, undisturbed: list[float]
) -> None:
    """Half the ranks, the same global batches, so the same losses (contract 5)."""
    with disturbed(two_nodes, tmp_path, restarts=3, nodes="1:2") as running:
        two_nodes.kill_node(1)
        del running.nodes[1]
        assert running.statuses(within=STARTS) == {0: 0}
        assert_went_on(running, tmp_path, undisturbed)
        assert {line["consumed_samples"] for line in metrics(tmp_path, "run").values()} == {
            8 * step for step in range(1, STEPS + 1)
        }


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("restarts", [0, 2])
def test_a_node_that_is_killed_and_comes_back(
    tmp_path: Path, two_nodes: Network, undisturbed: list[float], restarts: int, node: int
) -> None:
    """Also node 0, which hosts the meeting."""
    with disturbed(two_nodes, tmp_path, restarts=restarts) as running:
        two_nodes.kill_node(node)
        if not restarts:
            assert running.statuses(within=30)[1 - node] == 1
            return
        time.sleep(5)
        running.start(node)
        assert running.statuses(within=2 * STARTS) == {0: 0, 1: 0}
        assert_went_on(running, tmp_path, undisturbed)
        assert ("has lost the meeting on node 0 and joins again" in running.log(1)) == (node == 0)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", [{"restarts": 0}, {"restarts": 2}, {"restarts": 3, "nodes": "1:2"}])
def test_without_node_0_the_others_end(tmp_path: Path, two_nodes: Network, how: dict[str, Any]) -> None:
    """It hosts the meeting. With restarts they give it 20 s to come back."""
    with disturbed(two_nodes, tmp_path, flags={"comm__init_timeout_seconds": 20}, **how) as running:
        two_nodes.kill_node(0)
        del running.nodes[0]
        assert running.statuses(within=90) == {1: 1}
        assert "10.77.0.1" in running.log(1)
        if how["restarts"]:
            assert "finds nothing at 10.77.0.1:29555" in running.log(1)
            assert "given up after 20 s" in running.log(1)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_node_0_may_come_long_after_the_others(
    tmp_path: Path, two_nodes: Network, undisturbed: list[float]
) -> None:
    """Later than the minute torchrun itself looks for it."""
    argv = words(tmp_path, "run", **{**FLAGS, "comm__init_timeout_seconds": 120})
    with job(two_nodes, tmp_path, argv, tmp_path / "run", started=0, restarts=1) as running:
        running.start(1)
        time.sleep(80)
        running.start(0)
        assert running.statuses(within=2 * STARTS) == {0: 0, 1: 0}
        assert losses(tmp_path, "run") == pytest.approx(undisturbed, rel=1e-6)


@pytest.mark.slow
def test_a_cable_that_is_back_before_the_time_limit(
    tmp_path: Path, two_nodes: Network, undisturbed: list[float]
) -> None:
    with disturbed(two_nodes, tmp_path, flags={"comm__train_timeout_seconds": 60}) as running:
        two_nodes.link(1, "down")
        time.sleep(10)
        two_nodes.link(1, "up")
        assert running.statuses(within=STARTS) == {0: 0, 1: 0}
        assert "continuing after step" not in running.log(0)
        assert losses(tmp_path, "run") == pytest.approx(undisturbed, rel=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("restarts", [0, 3])
def test_a_cable_that_is_cut_for_30_seconds(
    tmp_path: Path, two_nodes: Network, undisturbed: list[float], restarts: int
) -> None:
    with disturbed(two_nodes, tmp_path, restarts=restarts) as running:
        two_nodes.link(1, "down")
        time.sleep(30)
        two_nodes.link(1, "up")
        statuses = running.statuses(within=90)
        if restarts:
            assert statuses == {0: 0, 1: 0}
            assert_went_on(running, tmp_path, undisturbed)
        else:
            assert statuses == {0: 1, 1: 1}
        assert "2 of 2 ranks wait" in running.log(0) and "look at the network" in running.log(0)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_elastic_run_goes_on_without_a_node_that_stays_cut_off(
    tmp_path: Path, two_nodes: Network, undisturbed: list[float]
) -> None:
    with disturbed(two_nodes, tmp_path, restarts=3, nodes="1:2") as running:
        two_nodes.link(1, "down")
        assert running.nodes[0].wait(timeout=90) == 0
        assert_went_on(running, tmp_path, undisturbed)
        assert running.statuses(within=120)[1] == 1, "the other one gives up, too"
