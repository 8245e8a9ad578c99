"""Where the time of a step goes: phases, and waiting for collectives by mesh axis."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.train.test_runs import run, write_rows
from titan5d.launch.local_ranks import run_ranks
from titan5d.metrics.exposed import ExposedCommunication
from titan5d.metrics.names import tensorboard_scalars
from titan5d.metrics.phases import BETWEEN, StepPhases
from titan5d.metrics.stopwatch import Stopwatch
from titan5d.parallel.mesh import Meshes
from titan5d.topology import Topology

CPU = torch.device("cpu")
NAP = 0.1


def _times() -> dict[str, float]:
    phases = StepPhases(CPU)
    for _ in range(2):
        with phases.step():
            with phases("backward"):
                time.sleep(NAP)
                with phases("optimizer"):
                    time.sleep(2 * NAP)
                time.sleep(NAP)
            time.sleep(NAP)  # in no phase
    return phases.metrics()


def test_phases_never_overlap_and_are_given_by_step() -> None:
    (found,) = run_ranks(_times, 1)
    assert found == pytest.approx({"time_backward": 2 * NAP, "time_optimizer": 2 * NAP}, rel=0.2)


def test_the_current_phase_can_be_read_at_any_time() -> None:
    phases = StepPhases(CPU)
    seen = [(phases.current, phases.since)]
    with phases("data"):
        seen.append((phases.current, phases.since))
        with suppress(RuntimeError), phases("forward"):
            seen.append((phases.current, phases.since))
            raise RuntimeError
        seen.append((phases.current, phases.since))
    seen.append((phases.current, phases.since))
    assert [name for name, _ in seen] == [BETWEEN, "data", "forward", "data", BETWEEN]
    since = [when for _, when in seen]
    assert since == sorted(since) and since[-1] <= time.monotonic()


def test_a_phase_costs_microseconds() -> None:
    phases, calls = StepPhases(CPU), 2000
    begin = time.perf_counter()
    for _ in range(calls):
        with phases("forward"):
            pass
    assert (time.perf_counter() - begin) / calls < 100e-6  # about 3 on an idle machine; a step has tens


def _waits() -> dict[str, float]:
    """Rank 3 is late for its tensor group (2, 3); the data groups hide all of what they do."""
    meshes = Meshes(Topology(dp_shard=2, tp=2), "cpu")
    phases, rank = StepPhases(CPU, meshes.groups()), dist.get_rank()
    before = dist.ProcessGroup.allreduce, dist.Work.wait
    dist.barrier()
    with phases.step():
        work = dist.all_reduce(torch.ones(1), group=meshes.group("dp_shard"), async_op=True)
        if rank == 3:
            time.sleep(NAP)
        dist.all_reduce(torch.ones(1), group=meshes.group("tp"))
        if rank != 3:
            time.sleep(2 * NAP)
        work.wait()
    assert before == (dist.ProcessGroup.allreduce, dist.Work.wait)
    dist.all_reduce(torch.ones(1), group=meshes.group("tp"))  # outside of a step
    mine = dict(phases._watch._seconds)
    return mine | phases.metrics()


def test_waits_count_for_the_axis_that_was_waited_for() -> None:
    found = run_ranks(_waits, 4)
    assert [rank["exposed/tp"] > 0.9 * NAP for rank in found] == [False, False, True, False]
    assert all(rank["exposed/dp_shard"] < NAP / 2 for rank in found)
    means = {key: value for key, value in found[0].items() if key.startswith("time_")}
    assert means.keys() == {"time_exposed/tp", "time_exposed/dp_shard"}
    assert means["time_exposed/tp"] == pytest.approx(sum(rank["exposed/tp"] for rank in found) / 4)
    assert all(rank.items() >= means.items() for rank in found)


class _Event:
    pass


class _Stream:
    """A stream as FSDP2 uses it."""

    waited = 0

    def record_event(self) -> _Event:
        return _Event()

    def wait_event(self, event: _Event) -> None:
        _Stream.waited += 1
        time.sleep(NAP)


def _stream_waits(monkeypatch: Any) -> dict[str, float]:
    meshes, watch = Meshes(Topology(dp_shard=2), "cpu"), Stopwatch(CPU)
    compute, side = _Stream(), _Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: compute)
    with ExposedCommunication(meshes.groups(), watch, _Stream):
        unrelated = compute.record_event()  # nothing was sent before it
        dist.all_reduce(torch.ones(1), group=meshes.group("dp_shard"))
        watch.take()
        sent = side.record_event()
        side.wait_event(sent)
        compute.wait_event(sent)
        compute.wait_event(unrelated)
    assert _Stream.waited == 3
    return watch.take()


def test_streams_wait_for_what_was_sent_into_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in run_ranks(_stream_waits, 2, monkeypatch):
        assert rank == pytest.approx({"exposed/dp_shard": NAP, "exposed/other": NAP}, rel=0.2)


LAYOUTS: dict[str, tuple[int, dict[str, Any], set[str]]] = {
    "one": (1, {}, set()),
    "pp2": (2, {"parallelism__pipeline_parallel_degree": 2}, {"time_messages", "time_exposed/pp"}),
    "dp2": (2, {}, {"time_exposed/dp_shard"}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_logs_its_phases(tmp_path: Path, name: str) -> None:
    ranks, flags, expected = LAYOUTS[name]
    write_rows(tmp_path / "rows.jsonl")
    statuses, points = run(tmp_path, name, ranks, **flags)
    assert statuses == [0] * ranks
    for point in points[1:]:
        phases = {f"time_{phase}" for phase in ("forward", "backward", "optimizer")}
        assert phases | expected <= point.keys()
        busy = sum(
            point.get(f"time_{phase}", 0.0) for phase in ("forward", "backward", "messages", "optimizer")
        )
        assert 0.1 * point["time_step"] < busy < 1.02 * point["time_step"]
    assert any(key.startswith("time_exposed/") for key in points[-1]) is (ranks > 1)
    scalars = tensorboard_scalars(points[-1], "SGD")
    assert "time_metrics/backward(s)" in scalars
    assert all(f"time_metrics/exposed_{axis}(s)" in scalars for axis in ("pp",) if name == "pp2")
