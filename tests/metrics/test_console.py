"""The console line, to the letter."""

import io
import re

import pytest

from titan5d.metrics.console import ConsoleWriter, format_duration, three_digits

METRICS = {
    "loss": 7.12344,
    "grad_norm": 1.23449,
    "memory_peak_gib": 12.341,
    "memory_peak_percent": 15.46,
    "tps": 1234.4,
    "tps_per_device": 1234.4,
    "tflops": 12.34,
    "mfu": 0.04512,
    "time_step": 0.5,
    "lr": 1e-3,
    "peak_source": "table: h200, bfloat16",
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def lines(stream):
    return stream.getvalue().splitlines()


def test_the_line():
    stream = io.StringIO()
    ConsoleWriter(total_steps=300, stream=stream).log(10, METRICS)
    (line,) = lines(stream)
    assert line == (
        "step: 10  loss: 7.1234  grad_norm: 1.2345  memory: 12.34GiB(15.5%)"
        "  tps: 1,234  tflops: 12.3  mfu: 4.51%  10/300 eta 2m25s"
    )


def test_several_devices_and_a_measured_peak_are_marked():
    stream = io.StringIO()
    metrics = METRICS | {
        "tps": 4937.6,
        "peak_source": "measured on this device (float32 matmul, 1 CPU thread)",
    }
    ConsoleWriter(total_steps=10, stream=stream).log(10, metrics)
    assert lines(stream)[0].endswith(
        "tps: 4,938 (1,234/device)  tflops: 12.3  mfu: 4.51% of measured peak  10/10"
    )


def test_unknown_values_are_left_out():
    stream = io.StringIO()
    console = ConsoleWriter(total_steps=10, stream=stream)
    console.log(1, {"loss": float("nan"), "grad_norm": float("inf"), "tps": 5.0, "mfu": None})
    console.log(5, {"validation_loss": 6.5})
    assert lines(stream)[0] == "step:  1  loss: nan  grad_norm: inf  tps: 5  1/10"
    assert re.fullmatch(r"step:  5  validation_loss: 6.5000  5/10 eta 0s", lines(stream)[1])


def test_time_left_counts_everything_between_the_lines():
    """0.5 s a step says the first line; with saves in between it was 2 s, and more saves will come."""
    stream, clock = io.StringIO(), Clock()
    console = ConsoleWriter(total_steps=110, stream=stream, clock=clock)
    for step in (10, 20, 110):
        console.log(step, METRICS)
        clock.now += 20
    assert [line.split("  ")[-1] for line in lines(stream)] == [
        "10/110 eta 50s",
        "20/110 eta 3m00s",
        "110/110",
    ]


@pytest.mark.parametrize(
    ("stream", "color", "colored"),
    [(Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False)],
    ids=["terminal", "disabled", "file"],
)
def test_colors_only_on_a_terminal_that_may(stream, color, colored):
    ConsoleWriter(total_steps=300, color=color, stream=stream).log(10, METRICS)
    (line,) = lines(stream)
    assert ("\033[" in line) == colored
    plain = re.sub(r"\033\[\d+m", "", line)
    assert plain.startswith("step: 10  loss: 7.1234  grad_norm: 1.2345  memory:")
    # each color is taken back before the next value
    assert len(re.findall(r"\033\[3[1-6]m", line)) == line.count("\033[39m") == (7 if colored else 0)


def test_durations_and_digits():
    durations = {0: "0s", 59.4: "59s", 59.6: "1m00s", 192: "3m12s", 7500: "2h05m", 273_600: "3d04h"}
    assert {seconds: format_duration(seconds) for seconds in durations} == durations
    digits = {
        0.0: "0",
        0.01234: "0.0123",
        0.5: "0.500",
        4.512: "4.51",
        12.34: "12.3",
        989.4: "989",
        1234.5: "1,234",
    }
    assert {value: three_digits(value) for value in digits} == digits
