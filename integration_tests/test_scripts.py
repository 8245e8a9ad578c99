"""run_train.sh and run_tests.sh in a copy of the repository, with a stand-in for Python that writes down its calls.

Nothing is installed: the stand-in plays `python -m venv` and `python -m pip`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHONS = ("python3", "python3.11", "python3.12", "python3.13")

# Behaves by what lies in $PLAY: files named too-old, no-ensurepip, pip-fails, slow-pip, pip-config, fails-<module>.
STAND_IN = """#!/usr/bin/env bash
printf '%s' "${0##*/}" >>"$PLAY/log"; printf ' [%s]' "$@" >>"$PLAY/log"; echo >>"$PLAY/log"
case "$*" in
    --version) echo "Python 3.12.1" ;;
    *version_info*) [[ ! -e $PLAY/too-old ]] ;;
    *ensurepip*) [[ ! -e $PLAY/no-ensurepip ]] ;;
    "-m venv --clear "*) rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; touch "$4/has-pip" ;;
    "-m pip --version") [[ -e ${0%/bin/python}/has-pip ]] ;;
    "-m pip config list") cat "$PLAY/pip-config" 2>/dev/null ;;
    "-m pip install "*)
        echo "collecting"
        if [[ -e $PLAY/slow-pip ]]; then exec sleep 30; fi
        sleep 0.2
        [[ ! -e $PLAY/pip-fails ]] ;;
    "-m titan5d"*) echo "ran in $PWD with PYTHONPATH=$PYTHONPATH" ;;
    *) [[ ! -e $PLAY/fails-$2 ]] ;;
esac
"""


class Clone:
    """A copy of the scripts, and what the stand-in for Python was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "a clone"  # a path with a space
        self.play = folder / "play"
        self.bin = folder / "bin"
        for made in (self.folder, self.play, self.bin):
            made.mkdir()
        for name in ("run_train.sh", "run_tests.sh", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.folder)
        shutil.copytree(ROOT / "scripts", self.folder / "scripts")
        shutil.copytree(ROOT / ".ci", self.folder / ".ci")
        for name in PYTHONS:
            self.program(name, STAND_IN)

    def program(self, name: str, text: str) -> Path:
        file = self.bin / name
        file.write_text(text)
        file.chmod(0o755)
        return file

    def start(self, *words: str, cwd: Path | None = None, **environ: str) -> subprocess.Popen[str]:
        kept = {name: value for name, value in os.environ.items() if name not in ("TITAN5D_PYTHON", "PYTHONPATH")}
        return subprocess.Popen(
            [str(self.folder / words[0]), *words[1:]],
            cwd=cwd or self.folder,
            env={**kept, "PATH": f"{self.bin}:/usr/bin:/bin", "PLAY": str(self.play), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def call(self, *words: str, cwd: Path | None = None, **environ: str) -> tuple[int, str, str]:
        """(exit status, stdout, stderr)"""
        process = self.start(*words, cwd=cwd, **environ)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def log(self) -> list[str]:
        """What the stand-in was asked since the last time."""
        file = self.play / "log"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return lines

    def installs(self) -> list[str]:
        return [line for line in self.log() if "[pip] [install]" in line]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_a_fresh_clone_makes_its_environment_and_then_trains(clone: Clone, tmp_path: Path):
    code, out, err = clone.call("run_train.sh", "--config", "my run.toml", cwd=tmp_path)
    assert code == 0, err
    log = clone.log()
    assert f"python3 [-m] [venv] [--clear] [{clone.folder}/.venv]" in log
    (install,) = [line for line in log if "[install]" in line]
    assert f"[-c] [{clone.folder}/constraints.txt] [-e] [{clone.folder}]" in install
    assert log[-1] == "python [-m] [titan5d.launch.torchrun_ranks] [--config] [my run.toml]"
    assert out == f"ran in {tmp_path} with PYTHONPATH={clone.folder}\n", "paths on the command line are the caller's"
    assert "making" in err
    assert "collecting" in err, "pip's progress is shown"


def test_later_calls_start_at_once(clone: Clone):
    assert clone.call("run_train.sh")[0] == 0
    clone.log()
    times = []
    for _ in range(3):
        started = time.monotonic()
        code, _, err = clone.call("run_train.sh")
        times.append(time.monotonic() - started)
        assert (code, err) == (0, "")
        assert clone.log() == ["python [-m] [titan5d.launch.torchrun_ranks]"]
    assert min(times) < 1.0


def test_an_interrupted_install_goes_on_with_the_next_call(clone: Clone):
    (clone.play / "slow-pip").touch()
    process = clone.start("run_train.sh")
    assert process.stderr is not None
    while "collecting" not in process.stderr.readline():
        pass
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)  # the pipe closes only when pip, too, has ended
    assert process.returncode == 1
    assert "interrupted; the next call goes on from here" in err
    assert time.monotonic() - started < 10
    clone.log()

    (clone.play / "slow-pip").unlink()
    assert clone.call("run_train.sh")[0] == 0
    log = clone.log()
    assert not any("[venv]" in line for line in log), "what was made is kept"
    assert sum("[install]" in line for line in log) == 1


def test_a_half_made_environment_is_made_again(clone: Clone):
    assert clone.call("run_train.sh")[0] == 0
    (clone.folder / ".venv" / "has-pip").unlink()
    (clone.folder / ".venv" / "titan5d-core.ok").unlink()
    clone.log()
    assert clone.call("run_train.sh")[0] == 0
    assert any("[venv] [--clear]" in line for line in clone.log())


def test_an_environment_whose_python_is_gone_is_made_again(clone: Clone):
    assert clone.call("run_train.sh")[0] == 0
    (clone.folder / ".venv" / "bin" / "python").unlink()
    (clone.folder / ".venv" / "bin" / "python").symlink_to("/no/such/python")
    clone.log()
    assert clone.call("run_train.sh")[0] == 0
    assert any("[venv] [--clear]" in line for line in clone.log())


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_new_pins_are_installed(clone: Clone, name: str):
    assert clone.call("run_train.sh")[0] == 0
    clone.log()
    with (clone.folder / name).open("a") as file:
        file.write("\n# changed\n")
    assert clone.call("run_train.sh")[0] == 0
    assert len(clone.installs()) == 1


def test_a_moved_clone_is_installed_again(clone: Clone):
    assert clone.call("run_train.sh")[0] == 0
    clone.log()
    clone.folder = clone.folder.rename(clone.folder.with_name("moved"))
    assert clone.call("run_train.sh")[0] == 0
    assert len(clone.installs()) == 1


def test_nothing_is_started_when_the_install_fails(clone: Clone):
    (clone.play / "pip-fails").touch()
    code, out, err = clone.call("run_train.sh")
    assert (code, out) == (1, "")
    assert "could not be installed" in err
    assert "TITAN5D_PYTHON" in err
    assert not list((clone.folder / ".venv").glob("*.ok*"))
    (clone.play / "pip-fails").unlink()
    assert clone.call("run_train.sh")[0] == 0


@pytest.mark.parametrize(
    ("play", "words"), [("too-old", "no Python 3.11 or newer was found"), ("no-ensurepip", "apt install python3-venv")]
)
def test_without_a_suitable_python_the_message_says_what_to_do(clone: Clone, play: str, words: str):
    (clone.play / play).touch()
    code, _, err = clone.call("run_train.sh")
    assert code == 1
    assert words in err
    assert clone.installs() == []


@pytest.mark.skipif(shutil.which("flock") is None, reason="first calls are put in line by flock")
def test_two_first_calls_install_once(clone: Clone):
    both = [clone.start("run_train.sh") for _ in range(2)]
    for process in both:
        process.communicate(timeout=60)
    assert [process.returncode for process in both] == [0, 0]
    assert len(clone.installs()) == 1


def test_without_gpu_the_cpu_build_of_torch_is_taken_unless_pip_is_told_where_to_look(clone: Clone):
    if shutil.which("nvidia-smi", path="/usr/bin:/bin") or Path("/dev/kfd").exists() or os.uname().sysname != "Linux":
        pytest.skip("this machine takes pip's default build")
    assert clone.call("run_train.sh")[0] == 0
    (install,) = clone.installs()
    assert "[--extra-index-url=https://download.pytorch.org/whl/cpu]" in install

    (clone.folder / ".venv" / "titan5d-core.ok").unlink()
    (clone.play / "pip-config").write_text("global.find-links='/some/wheels'\n")
    assert clone.call("run_train.sh")[0] == 0
    (install,) = clone.installs()
    assert "index-url" not in install

    (clone.folder / ".venv" / "titan5d-core.ok").unlink()
    (clone.play / "pip-config").unlink()
    clone.program("nvidia-smi", "#!/bin/sh\n")
    assert clone.call("run_train.sh")[0] == 0
    (install,) = clone.installs()
    assert "index-url" not in install


@pytest.mark.parametrize("script", ["run_train.sh", "run_tests.sh"])
def test_a_python_of_ones_own_needs_no_environment(clone: Clone, script: str):
    code, _, _ = clone.call(script, "--flag", TITAN5D_PYTHON=str(clone.bin / "python3.12"))
    assert code == 0
    assert not (clone.folder / ".venv").exists()
    (line,) = clone.log()
    assert line.startswith("python3.12 [-m]")
    assert line.endswith("[--flag]")


@pytest.mark.parametrize("script", ["run_train.sh", "run_tests.sh"])
def test_a_python_that_is_none_is_refused(clone: Clone, script: str):
    code, out, err = clone.call(script, TITAN5D_PYTHON="/no/such/python")
    assert (code, out) == (2, "")
    assert err == "refused: TITAN5D_PYTHON=/no/such/python is no program; give the path of a Python, or unset it\n"


@pytest.mark.parametrize("script", ["run_tests.sh", ".ci/run"])
def test_all_checks_run_with_the_dev_packages(clone: Clone, script: str):
    code, out, _ = clone.call(script)
    assert code == 0
    log = clone.log()
    assert any(line.endswith(f"[-e] [{clone.folder}[dev]]") for line in log if "[install]" in line)
    assert [line.split()[2] for line in log[-3:]] == ["[ruff]", "[mypy]", "[pytest]"]
    assert "[-m] [not slow]" in log[-1]
    for module in ("ruff", "mypy", "pytest"):
        assert f"== {module}: " in out


@pytest.mark.parametrize("module", ["ruff", "mypy", "pytest"])
@pytest.mark.parametrize("script", ["run_tests.sh", ".ci/run"])
def test_one_failing_check_fails_the_whole_and_hides_none_of_the_others(clone: Clone, script: str, module: str):
    (clone.play / f"fails-{module}").touch()
    assert clone.call(script)[0] == 1
    assert [line.split()[2] for line in clone.log()[-3:]] == ["[ruff]", "[mypy]", "[pytest]"]


def test_arguments_go_to_pytest(clone: Clone):
    assert clone.call("run_tests.sh", "tests/models", "-k", "rope and not yarn")[0] == 0
    assert clone.log()[-1] == "python [-m] [pytest] [tests/models] [-k] [rope and not yarn]"
    (clone.play / "fails-pytest").touch()
    assert clone.call("run_tests.sh", "tests/models")[0] == 1


def test_the_dev_packages_serve_training_too(clone: Clone):
    assert clone.call("run_tests.sh")[0] == 0
    clone.log()
    assert clone.call("run_train.sh")[0] == 0
    assert clone.installs() == []


def test_training_packages_do_not_serve_the_tests(clone: Clone):
    assert clone.call("run_train.sh")[0] == 0
    clone.log()
    assert clone.call("run_tests.sh")[0] == 0
    assert len(clone.installs()) == 1
