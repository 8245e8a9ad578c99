"""Signals and time limits around a launcher, with a stand-in for torchrun that starts small ranks without torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# The programs print with os.write: one line, one write, so that the lines of two ranks do not mix.
RANK = """
    import os, signal, sys, time
    from titan5d.launch import exit_status
    stopped = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: stopped.append(number))
    os.write(1, b"up\\n")
    ends = time.monotonic() + 30  # by itself, whatever happens to the test
    while not stopped and time.monotonic() < ends:
        time.sleep(0.02)
    os.write(1, b"saving %d\\n" % stopped[0])
    time.sleep(SAVING)
    sys.exit(exit_status.record(3))
"""
LAUNCHER = """
    import os, signal, subprocess, sys
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ranks = [
        subprocess.Popen([sys.executable, sys.argv[1]], env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    sys.exit(max(rank.wait() for rank in ranks))
"""
DEAF = """
    import os, signal, time
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.write(1, b"up\\n")
    time.sleep(30)
"""
SUPERVISOR = """
    import os, sys
    from titan5d.launch import supervise
    supervise.GRACE_WITHOUT_RANKS = 0.5
    supervise.FIRST_NOTE = 0.3
    waiting, limit = ((lambda: "node 0 waits"), 1.0) if "waiting" in sys.argv else (None, 60.0)
    command = [word for word in sys.argv[1:] if word != "waiting"]
    sys.exit(supervise.supervise(lambda _: [sys.executable, *command], os.environ, 2, waiting, limit))
"""


ONE_RANK_FAILS = """
    import os, subprocess, sys, time
    left = int(sys.argv[1])
    print("launched with %d left" % left, flush=True)
    rank = "import time; from titan5d.launch import exit_status, failure; failure.begin(); time.sleep(1)"
    if left == 2:  # the first launcher: its ranks end, and so does the meeting
        subprocess.run([sys.executable, "-c", rank], env={**os.environ, "LOCAL_RANK": "0"})
        sys.exit(1)
"""
NODE_JOINS = """
    import os, subprocess, sys
    left = int(sys.argv[1])
    print("launched with %d left" % left, flush=True)
    rank = "import time; from titan5d.launch import exit_status, failure; failure.begin(); time.sleep(1)"
    if left == 1:
        for end in ("; exit_status.record(3)", ""):  # makes room; dies
            subprocess.run([sys.executable, "-c", rank + end], env={**os.environ, "LOCAL_RANK": "0"})
        sys.exit(1)
"""
JOINS_AGAIN = """
    import os, sys
    from titan5d.launch import supervise
    supervise.BETWEEN_LAUNCHES = supervise.WITH_RANKS = 0.1
    supervise.FIRST_NOTE = 60.0
    answers, restarts, command = sys.argv[1] == "answers", int(sys.argv[2]), sys.argv[3]
    sys.exit(
        supervise.supervise(
            lambda left: [sys.executable, command, str(left)],
            os.environ, 1, lambda: "node 1 waits", 2.0, "node 1", restarts, lambda: answers,
        )
    )
"""


def script(folder: Path, name: str, text: str) -> str:
    file = folder / name
    file.write_text(textwrap.dedent(text))
    return str(file)


def start(folder: Path, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, script(folder, "supervisor.py", SUPERVISOR), *command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], words: int) -> None:
    """Until `words` lines "up" have been printed."""
    assert process.stdout is not None
    for _ in range(words):
        assert process.stdout.readline().strip() == "up"


def ends(process: subprocess.Popen[str], within: float = 20.0) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=within)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_reaches_every_rank_and_the_launcher_stays_until_they_have_saved(number: int, tmp_path: Path):
    rank = script(tmp_path, "rank.py", RANK.replace("SAVING", "0.3"))
    run = start(tmp_path, script(tmp_path, "launcher.py", LAUNCHER), rank)
    wait_for(run, 2)
    run.send_signal(number)
    code, out, _ = ends(run)
    assert code == 3
    assert out.split("\n").count(f"saving {int(number)}") == 2


def test_ctrl_c_again_goes_to_the_launcher(tmp_path: Path):
    rank = script(tmp_path, "rank.py", RANK.replace("SAVING", "2"))
    run = start(tmp_path, script(tmp_path, "launcher.py", LAUNCHER), rank)
    wait_for(run, 2)
    started = time.monotonic()
    run.send_signal(signal.SIGINT)
    time.sleep(0.3)
    run.send_signal(signal.SIGINT)
    assert run.wait(timeout=20) == 1  # this launcher does not clean up; nobody recorded a save
    assert time.monotonic() - started < 1.9
    run.communicate(timeout=20)  # the ranks hold the pipe until they have ended by themselves


def test_a_launcher_without_ranks_that_answers_no_signal_is_killed(tmp_path: Path):
    run = start(tmp_path, script(tmp_path, "deaf.py", DEAF))
    wait_for(run, 1)
    run.send_signal(signal.SIGTERM)
    code, _, _ = ends(run)
    assert code == 1


def test_the_wait_for_other_nodes_is_told_and_bounded(tmp_path: Path):
    run = start(tmp_path, "waiting", script(tmp_path, "deaf.py", DEAF))
    code, _, err = ends(run)
    assert code == 1
    assert err.splitlines() == ["titan5d: node 0 waits", "titan5d: node 0 waits: given up after 1 s"]


@pytest.mark.skipif(sys.platform != "linux", reason="the parent's death is told on Linux only")
def test_the_launcher_hears_of_the_death_of_its_supervisor(tmp_path: Path):
    text = DEAF.replace("signal.signal(number, signal.SIG_IGN)", "pass").replace('b"up\\n"', 'b"%d\\n" % os.getpid()')
    run = start(tmp_path, script(tmp_path, "launcher.py", text))
    assert run.stdout is not None
    launcher = int(run.stdout.readline())
    run.kill()
    run.communicate(timeout=20)  # ends when the launcher, too, has closed the pipe
    for _ in range(100):  # it is a zombie until init has reaped it
        if not Path(f"/proc/{launcher}").exists():
            return
        time.sleep(0.05)
    pytest.fail(f"process {launcher} is still there")


@pytest.mark.parametrize(("launcher_code", "expected"), [(0, 0), (1, 1)])
def test_the_status_of_a_launcher_whose_ranks_recorded_nothing(launcher_code: int, expected: int, tmp_path: Path):
    run = start(tmp_path, script(tmp_path, "launcher.py", f"raise SystemExit({launcher_code})"))
    assert ends(run)[0] == expected


def join_again(folder: Path, meeting: str, restarts: int, launcher: str) -> tuple[int, list[str], str]:
    """Status, lines of the launchers, and what the supervisor said."""
    command = [script(folder, "supervisor.py", JOINS_AGAIN), meeting, str(restarts), script(folder, "l.py", launcher)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, *command], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    return result.returncode, result.stdout.splitlines(), result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are seen in /proc")
@pytest.mark.parametrize("meeting", ["answers", "is gone"])  # node 0 may be back at once
def test_a_launcher_that_lost_the_meeting_is_started_again_with_the_restarts_that_are_left(
    meeting: str, tmp_path: Path
):
    code, launched, said = join_again(tmp_path, meeting, 2, ONE_RANK_FAILS)
    assert (code, launched) == (0, ["launched with 2 left", "launched with 1 left"])
    assert said.splitlines()[-1] == (
        "titan5d: node 1 has lost the meeting on node 0 and joins again; restarts left: 1"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are seen in /proc")
def test_a_launcher_that_has_used_its_restarts_is_not_started_again(tmp_path: Path):
    always = ONE_RANK_FAILS.replace("if left == 2", "for _ in range(left + 1)")
    always = always.replace("    sys.exit(1)", "sys.exit(1)")  # after all of its ranks
    code, launched, _ = join_again(tmp_path, "answers", 1, always)
    assert (code, launched) == (1, ["launched with 1 left"])


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are seen in /proc")
def test_a_start_that_made_room_for_a_node_takes_no_restart(tmp_path: Path):
    """Its ranks stop, having saved, and are started again with those of the new node."""
    code, launched, _ = join_again(tmp_path, "answers", 1, NODE_JOINS)
    assert (code, launched) == (0, ["launched with 1 left", "launched with 0 left"])


def test_a_node_whose_node_0_does_not_come_looks_for_it_until_the_time_is_up(tmp_path: Path):
    launcher = "import sys; print(sys.argv[1], flush=True); sys.exit(1)"
    code, launched, said = join_again(tmp_path, "is gone", 1, launcher)
    assert code == 1
    assert len(launched) > 2 and set(launched) == {"1"}, "no restart is used up"
    assert said == "titan5d: node 1 waits: given up after 2 s\n"


def test_a_launcher_that_fails_while_node_0_answers_is_not_started_again(tmp_path: Path):
    code, launched, _ = join_again(tmp_path, "answers", 1, "print('once'); raise SystemExit(1)")
    assert (code, launched) == (1, ["once"])


@pytest.mark.skipif(sys.platform != "linux", reason="the parent's death is told on Linux only")
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path):
    rank = """
        import os, time
        from titan5d.launch.parent_death import end_with_launcher
        end_with_launcher({"TORCHELASTIC_RUN_ID": "1"})
        os.write(1, b"up\\n")
        time.sleep(30)
    """
    noted = f"open({str(tmp_path / 'launcher')!r}, 'w').write(str(os.getpid()))"
    launcher = LAUNCHER.replace("ranks = [", f"{noted}\n    ranks = [")
    run = start(tmp_path, script(tmp_path, "launcher.py", launcher), script(tmp_path, "rank.py", rank))
    wait_for(run, 2)
    time.sleep(0.5)  # the ranks are known by now
    os.kill(int((tmp_path / "launcher").read_text()), signal.SIGKILL)
    started = time.monotonic()
    code, _, _ = ends(run)  # the pipe closes when the ranks, too, have gone
    assert code == 1 and time.monotonic() - started < 10


@pytest.mark.parametrize(("local_rank", "told"), [("0", True), ("1", False)])
def test_a_refusal_is_told_once_on_each_node(local_rank: str, told: bool, tmp_path: Path):
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "titan5d", "train", "--training.seq_len", "-1"]
    result = subprocess.run(
        command,
        env={**environ, "LOCAL_RANK": local_rank},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert ("training.seq_len = -1" in result.stderr) == told
