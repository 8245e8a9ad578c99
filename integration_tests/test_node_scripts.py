"""scripts/ssh_launch.sh and scripts/slurm.sbatch with stand-ins for ssh, srun, scontrol and run_train.sh."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A node: writes down what it got, waits for a signal when asked to, and leaves with the status of its rank
NODE = """#!/usr/bin/env bash
trap 'echo "got USR1"; exit 3' USR1
trap 'echo "got TERM"; exit 3' TERM
echo "NNODES=$NNODES NODE_RANK=$NODE_RANK MASTER_ADDR=$MASTER_ADDR MASTER_PORT=${MASTER_PORT:-} NGPU=${NGPU:-} args:$*"
touch "$PLAY/up-$NODE_RANK"
if [[ -e $PLAY/waits ]]; then for _ in {1..300}; do sleep 0.1; done; fi
exit "$(cat "$PLAY/status-$NODE_RANK" 2>/dev/null || echo 0)"
"""
SSH = """#!/usr/bin/env bash
while [[ $1 == -o ]]; do shift 2; done
echo "$1" >>"$PLAY/hosts"; shift
exec env -u NGPU -u NNODES bash -c "$*"
"""
SRUN = """#!/usr/bin/env bash
echo "$@" >>"$PLAY/srun"
while [[ $1 == --* ]]; do shift; done
pids=()
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do SLURM_NODEID=$node "$@" & pids+=($!); done
trap 'kill -USR1 "${pids[@]}"' USR1
status=0
for pid in "${pids[@]}"; do
    while kill -0 "$pid" 2>/dev/null; do wait "$pid"; code=$?; done
    ((code > status)) && status=$code
done
exit $status
"""
SCONTROL = """#!/usr/bin/env bash
case $1 in
    show) printf 'node-a\\nnode-b\\n' ;;
    requeue) echo "$2" >>"$PLAY/requeued" ;;
esac
"""


class Site:
    def __init__(self, folder: Path) -> None:
        self.repo, self.play, self.bin = folder / "a repo", folder / "play", folder / "bin"
        for made in (self.repo, self.play, self.bin):
            made.mkdir()
        shutil.copytree(ROOT / "scripts", self.repo / "scripts")
        programs = {"ssh": SSH, "srun": SRUN, "scontrol": SCONTROL}
        for path, text in (
            {self.bin / n: t for n, t in programs.items()} | {self.repo / "run_train.sh": NODE}
        ).items():
            self.program(path, text)

    def program(self, path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def start(self, *words: str, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.repo / words[0]), *words[1:]],
            cwd=self.repo,
            env={"PATH": f"{self.bin}:/usr/bin:/bin", "PLAY": str(self.play), **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait_for_nodes(self, count: int) -> None:
        deadline = time.monotonic() + 20
        while len(list(self.play.glob("up-*"))) < count:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.2)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def ended(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    try:
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    return process.returncode, sorted(out.splitlines())


SLURM = {
    "SLURM_JOB_ID": "12345",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "node-[a-b]",
    "TITAN5D_PYTHON": "/bin/true",
}


def test_ssh_starts_every_node_with_its_rank(site: Site) -> None:
    run = site.start("scripts/ssh_launch.sh", "me@node-a,node-b", "--config", "my run", NGPU="4", SECRET="x")
    code, lines = ended(run)
    assert code == 0
    same = "NNODES=2 NODE_RANK={} MASTER_ADDR=node-a MASTER_PORT= NGPU=4 args:--config my run"
    assert lines == [f"me@node-a: {same.format(0)}", f"node-b: {same.format(1)}"]
    assert sorted((site.play / "hosts").read_text().split()) == ["me@node-a", "node-b"]


@pytest.mark.parametrize(("statuses", "expected"), [((0, 2), 2), ((3, 3), 3), ((3, 1), 1), ((2, 255), 1)])
def test_ssh_leaves_with_the_worst_status(site: Site, statuses: tuple[int, int], expected: int) -> None:
    for rank, status in enumerate(statuses):
        (site.play / f"status-{rank}").write_text(str(status))
    assert ended(site.start("scripts/ssh_launch.sh", "a,b"))[0] == expected


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_ssh_passes_signals_on(site: Site, number: signal.Signals) -> None:
    (site.play / "waits").touch()
    run = site.start("scripts/ssh_launch.sh", "a,b")
    site.wait_for_nodes(2)
    run.send_signal(number)
    code, lines = ended(run)
    assert code == 3
    assert [line for line in lines if "got" in line] == [f"{h}: got {number.name[3:]}" for h in "ab"]


def test_nodes_end_when_the_launching_side_is_gone(site: Site) -> None:
    (site.play / "waits").touch()
    run = site.start("scripts/ssh_launch.sh", "a,b")
    site.wait_for_nodes(2)
    run.kill()
    _, lines = ended(run)  # the output is closed when all have ended
    assert [line for line in lines if "got" in line] == ["a: got TERM", "b: got TERM"]


def test_ssh_without_hosts_is_refused(site: Site) -> None:
    code, lines = ended(site.start("scripts/ssh_launch.sh", "--config", "x"))
    assert code == 2 and any("the first argument must be the hosts" in line for line in lines)


@pytest.mark.parametrize("nodes", [1, 2])
def test_slurm_starts_one_launcher_a_node(site: Site, nodes: int) -> None:
    run = site.start(
        "scripts/slurm.sbatch", "--config", "my run", **{**SLURM, "SLURM_JOB_NUM_NODES": str(nodes)}
    )
    code, lines = ended(run)
    assert code == 0
    same = f"NNODES={nodes} NODE_RANK={{}} MASTER_ADDR=node-a MASTER_PORT=32345 NGPU= args:--config my run"
    assert lines == [same.format(rank) for rank in range(nodes)]
    assert f"--ntasks={nodes} --ntasks-per-node=1" in (site.play / "srun").read_text()


@pytest.mark.parametrize("requeue", ["1", "0"])
def test_before_the_time_limit_slurm_saves_and_requeues(site: Site, requeue: str) -> None:
    (site.play / "waits").touch()
    run = site.start("scripts/slurm.sbatch", REQUEUE=requeue, **SLURM)
    site.wait_for_nodes(2)
    os.kill(run.pid, signal.SIGUSR1)
    code, lines = ended(run)
    assert code == 3 and lines.count("got USR1") == 2
    assert (site.play / "requeued").exists() == (requeue == "1")


def test_slurm_from_elsewhere_is_refused(site: Site, tmp_path: Path) -> None:
    code, lines = ended(site.start("scripts/slurm.sbatch", **SLURM, SLURM_SUBMIT_DIR=str(tmp_path)))
    assert code == 2 and "submit the job from the repository" in lines[0]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
@pytest.mark.parametrize("name", ["slurm.sbatch", "ssh_launch.sh", "ssh_node.sh"])
def test_shellcheck(name: str) -> None:
    checked = subprocess.run(
        ["shellcheck", "-x", str(ROOT / "scripts" / name)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout
