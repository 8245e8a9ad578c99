"""What the writers leave on disk, also after kill -9 and a restart, read back with the usual readers."""

import json
import math
import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from titan5d.metrics.writers import JsonlWriter, MetricsLogger, TensorBoardWriter, WandbWriter

METRICS = {
    "loss": 7.125,
    "max_loss": 8.5,
    "grad_norm": 1.25,
    "lr": 0.5,
    "tokens": 512,
    "n_tokens_seen": 5120,
    "tps": 2048.0,
    "tps_per_device": 1024.0,
    "tflops": 0.25,
    "mfu": 0.5,
    "hfu": 0.625,
    "time_step": 0.25,
    "time_data": 0.125,
    "time_data_percent": 50.0,
    "memory_peak_gib": 12.0,
    "memory_peak_percent": 15.0,
    "memory_active_gib": 10.0,
    "memory_active_percent": 12.5,
    "memory_alloc_retries": 2,
    "memory_ooms": 0,
    "moe/max_load": 1.5,
    "peak_source": "set by metrics.peak_flops",
}


def read_jsonl(path):
    def refuse(constant):
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def read_tensorboard(folder):
    """{name: {step: value}}; asserts that each step is there once."""
    events = EventAccumulator(str(folder))
    events.Reload()
    scalars = {}
    for name in events.Tags()["scalars"]:
        points = [(event.step, event.value) for event in events.Scalars(name)]
        assert len(dict(points)) == len(points), f"{name} has a step twice: {points}"
        scalars[name] = dict(points)
    return scalars


def log_steps(writer, steps, loss):
    for step in steps:
        writer.log(step, {"loss": loss})


def test_jsonl_is_one_object_a_step(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.log(1, METRICS)
    assert read_jsonl(path) == [{"step": 1} | METRICS]  # there before close
    writer.log(10, METRICS | {"mfu": None})
    writer.close()
    assert read_jsonl(path)[1] == {"step": 10} | METRICS | {"mfu": None}


def test_jsonl_values_that_json_lacks(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.log(1, {"loss": math.nan, "grad_norm": math.inf, "x": -math.inf})
    (line,) = read_jsonl(path)
    assert line == {"step": 1, "loss": "NaN", "grad_norm": "Infinity", "x": "-Infinity"}
    assert math.isnan(float(line["loss"]))
    assert float(line["grad_norm"]) == math.inf
    with pytest.raises(TypeError, match="metric 'loss' is a list; give a Python number"):
        writer.log(2, {"loss": [1.0]})
    writer.close()
    assert len(read_jsonl(path)) == 1  # the refused point left no half line


def test_jsonl_restart_replaces_the_steps_it_does_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = JsonlWriter(path)
    log_steps(first, range(1, 9), loss=1.0)
    first.close()
    second = JsonlWriter(path, first_step=5)  # step 4 was loaded
    log_steps(second, range(5, 11), loss=2.0)
    second.close()
    lines = read_jsonl(path)
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert [line["loss"] for line in lines] == [1.0] * 4 + [2.0] * 6
    # what was taken out is kept aside
    replaced = read_jsonl(tmp_path / "metrics.jsonl.replaced")
    assert [(line["step"], line["loss"]) for line in replaced] == [(step, 1.0) for step in range(5, 9)]
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "metrics.jsonl.replaced"]


def test_jsonl_fresh_start_in_a_used_folder(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log_steps(JsonlWriter(path), range(1, 4), loss=1.0)
    log_steps(JsonlWriter(path), range(1, 3), loss=2.0)
    assert [(line["step"], line["loss"]) for line in read_jsonl(path)] == [(1, 2.0), (2, 2.0)]
    assert len(read_jsonl(tmp_path / "metrics.jsonl.replaced")) == 3


@pytest.mark.parametrize(
    "tail", ['{"step": 3, "lo', '{"step": 3, "loss": 1.0}', "\x00\x00", "[3]", '{"loss": 1.0}']
)
def test_jsonl_last_line_cut_short(tmp_path, tail):
    """A machine that lost power: the cut line goes, a whole one only misses its line end."""
    path = tmp_path / "metrics.jsonl"
    log_steps(JsonlWriter(path), [1, 2], loss=1.0)
    with path.open("a") as file:
        file.write(tail)
    whole = [1, 2, 3] if tail.endswith("1.0}") and "step" in tail else [1, 2]
    log_steps(JsonlWriter(path, first_step=4), [4], loss=2.0)
    assert [line["step"] for line in read_jsonl(path)] == [*whole, 4]


def test_tensorboard_has_the_names_people_know(tmp_path):
    writer = TensorBoardWriter(tmp_path, "AdamW")
    writer.log(10, METRICS | {"hfu": None})
    scalars = read_tensorboard(tmp_path)  # flushed: there before close
    writer.close()
    assert scalars == {
        "loss_metrics/global_avg_loss": {10: 7.125},
        "loss_metrics/global_max_loss": {10: 8.5},
        "grad_norm": {10: 1.25},
        "lr/AdamW": {10: 0.5},
        "tokens": {10: 512},
        "n_tokens_seen": {10: 5120},
        "throughput(tps)": {10: 2048},
        "throughput_per_device(tps)": {10: 1024},
        "tflops": {10: 0.25},
        "mfu(%)": {10: 50},
        "time_metrics/end_to_end(s)": {10: 0.25},
        "time_metrics/data_loading(s)": {10: 0.125},
        "time_metrics/data_loading(%)": {10: 50},
        "memory/max_reserved(GiB)": {10: 12},
        "memory/max_reserved(%)": {10: 15},
        "memory/max_active(GiB)": {10: 10},
        "memory/max_active(%)": {10: 12.5},
        "memory/num_alloc_retries": {10: 2},
        "memory/num_ooms": {10: 0},
        "moe/max_load": {10: 1.5},
    }


def test_tensorboard_restart_replaces_the_steps_it_does_again(tmp_path):
    first = TensorBoardWriter(tmp_path, "SGD")
    log_steps(first, range(1, 9), loss=1.0)
    first.close()
    second = TensorBoardWriter(tmp_path, "SGD", first_step=5)
    log_steps(second, range(5, 7), loss=2.0)
    second.close()
    expected = {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 2.0, 6: 2.0}  # 7 and 8 of the first run are gone too
    assert read_tensorboard(tmp_path) == {"loss_metrics/global_avg_loss": expected}


def test_tensorboard_fresh_start_in_a_used_folder(tmp_path):
    for loss, steps in ((1.0, 3), (2.0, 2)):
        writer = TensorBoardWriter(tmp_path, "SGD")
        log_steps(writer, range(1, steps + 1), loss)
        writer.close()
    assert read_tensorboard(tmp_path) == {"loss_metrics/global_avg_loss": {1: 2.0, 2: 2.0}}


def in_a_process_killed_with_9(body):
    """Forks, runs `body`, and kills the child with SIGKILL when `body` returns: no exit handler runs."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)  # only reached when body raised
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    pytest.fail("the child did not end in 20 s")


def test_points_survive_kill_9_and_the_restart_goes_on(tmp_path):
    def logger(first_step):
        return MetricsLogger(
            [
                JsonlWriter(tmp_path / "metrics.jsonl", first_step),
                TensorBoardWriter(tmp_path / "tb", "AdamW", first_step),
            ]
        )

    def killed_run():
        log = logger(first_step=1)
        for step in range(1, 8):
            log.log(step, {"loss": 1.0})

    in_a_process_killed_with_9(killed_run)
    assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == list(range(1, 8))
    assert set(read_tensorboard(tmp_path / "tb")["loss_metrics/global_avg_loss"]) == set(range(1, 8))

    time.sleep(1.1)  # TensorBoard sorts event files by the second they began in; no real restart is faster
    again = logger(first_step=5)  # the last checkpoint was of step 4
    for step in range(5, 10):
        again.log(step, {"loss": 2.0})
    again.close()
    expected = dict.fromkeys(range(1, 5), 1.0) | dict.fromkeys(range(5, 10), 2.0)
    assert {line["step"]: line["loss"] for line in read_jsonl(tmp_path / "metrics.jsonl")} == expected
    assert read_tensorboard(tmp_path / "tb")["loss_metrics/global_avg_loss"] == expected


class FullDisk:
    def log(self, step, metrics):
        raise OSError(28, "No space left on device")

    def close(self):
        raise OSError(28, "No space left on device")


def test_one_failing_writer_stops_neither_the_run_nor_the_others(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLogger([FullDisk(), JsonlWriter(path)])
    for step in (1, 2):
        log.log(step, {"loss": 1.0})
    log.close()
    assert [line["step"] for line in read_jsonl(path)] == [1, 2]
    said = [record.getMessage() for record in caplog.records]
    assert said[1] == "metrics of step 2 not written by FullDisk: [Errno 28] No space left on device"
    assert len(said) == 3


def test_a_step_is_logged_once(tmp_path):
    log = MetricsLogger([JsonlWriter(tmp_path / "metrics.jsonl")])
    log.log(5, {"loss": 1.0})
    for step in (5, 4):
        with pytest.raises(
            ValueError, match=f"step {step} was logged after step 5; log all values of a step in one"
        ):
            log.log(step, {"validation_loss": 1.0})
    log.close()
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 1


def test_logger_without_writers_takes_everything():
    """What the ranks have that do not write."""
    log = MetricsLogger([])
    log.log(1, METRICS)
    log.close()


def test_wandb_missing_is_said_plainly(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # import fails, installed or not
    with pytest.raises(
        ModuleNotFoundError, match=r"enable_wandb = true needs the wandb package.*titan5d\[wandb\]"
    ):
        WandbWriter(tmp_path, "AdamW", {})


def test_wandb_gets_the_tensorboard_names(tmp_path, monkeypatch):
    calls = []
    run = SimpleNamespace(
        log=lambda scalars, step: calls.append((step, scalars)), finish=lambda: calls.append("finish")
    )
    module = SimpleNamespace(init=lambda **options: calls.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", module)
    writer = WandbWriter(tmp_path / "wandb", "Muon", {"training": {"steps": 5}})
    writer.log(3, {"loss": 1.0, "lr": 0.1, "mfu": 0.25, "peak_source": "table"})
    writer.close()
    assert calls == [
        {"dir": str(tmp_path / "wandb"), "config": {"training": {"steps": 5}}},
        (3, {"loss_metrics/global_avg_loss": 1.0, "lr/Muon": 0.1, "mfu(%)": 25.0}),
        "finish",
    ]
