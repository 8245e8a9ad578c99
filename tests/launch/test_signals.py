"""Stop signals: one sets a flag, one more ends the process, also while it hangs in C++."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import ctypes, sys, time
from titan5d.launch.signals import SAME, StopSignals
with StopSignals() as signals:
    print("ready", flush=True)
    while not signals.asked:
        time.sleep(0.02)
    print("asked", signals.asked, flush=True)
    if sys.argv[1] == "hang":
        mutex = ctypes.create_string_buffer(128)
        for _ in range(2):  # the second time waits in C for ever; no Python code runs on the main thread
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
    time.sleep(SAME + 0.5)
print("left", flush=True)
"""


def start(mode: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, mode], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_one_signal_is_a_flag(number: signal.Signals) -> None:
    process = start("ends")
    process.send_signal(number)
    process.send_signal(number)  # a launcher passes on what the rank has had already
    out, _ = process.communicate(timeout=60)
    assert out == f"asked {int(number)}\nleft\n" and process.returncode == 0


def test_sigterm_does_not_cut_off_an_error_that_is_on_its_way_out() -> None:
    program = """
import os, signal
from titan5d.launch.signals import StopSignals
try:
    with StopSignals():
        raise ValueError
except ValueError:
    os.kill(os.getpid(), signal.SIGTERM)
    print("noted", flush=True)
os.kill(os.getpid(), signal.SIGINT)
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.stdout == "noted\n" and "KeyboardInterrupt" in result.stderr, "Ctrl-C works again"


def test_a_second_signal_ends_at_once() -> None:
    process = start("hang")
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None and process.stdout.readline() == f"asked {int(signal.SIGTERM)}\n"
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=20) == 128 + signal.SIGINT
    process.stdout.close()
