"""torchrun itself, with ranks that import no torch: exit statuses and signals survive it, and nodes find each other."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]

RANK = """
    import os, signal, sys, time
    from titan5d.launch import exit_status
    status = int(sys.argv[1])
    stopped = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    os.write(1, b"rank %s of %s\\n" % (os.environb[b"RANK"], os.environb[b"WORLD_SIZE"]))
    if status == 3:
        ends = time.monotonic() + 60
        while not stopped and time.monotonic() < ends:
            time.sleep(0.05)
    sys.exit(exit_status.record(status))
"""
NODE = """
    import os, sys
    from titan5d.launch.supervise import supervise
    from titan5d.launch.nodes import read_nodes, torchrun
    nodes, (program, status, ranks) = read_nodes(os.environ), sys.argv[1:]
    waiting = nodes.waiting if nodes.count > 1 else None
    sys.exit(supervise(lambda _: [*torchrun(nodes, int(ranks)), program, status], os.environ, int(ranks), waiting, 60))
"""


def start(folder: Path, status: int, ranks: int, **environ: str) -> subprocess.Popen[str]:
    """One node whose ranks leave with `status`; 3 = after a signal."""
    for name, text in (("rank.py", RANK), ("node.py", NODE)):
        (folder / name).write_text(textwrap.dedent(text))
    return subprocess.Popen(
        [sys.executable, str(folder / "node.py"), str(folder / "rank.py"), str(status), str(ranks)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ends(process: subprocess.Popen[str]) -> tuple[int, str]:
    """(exit status, stderr)"""
    try:
        _, err = process.communicate(timeout=90)
    finally:
        process.kill()
    return process.returncode, err


def test_two_runs_side_by_side_one_refused_one_done(tmp_path: Path):
    """Each finds a free port; a refusal is 2 and is not buried under torchrun's report of a crash."""
    folders = [tmp_path / "refused", tmp_path / "done"]
    for folder in folders:
        folder.mkdir()
    refused, done = start(folders[0], 2, ranks=2), start(folders[1], 0, ranks=1)
    code, err = ends(refused)
    assert code == 2
    assert "Traceback" not in err
    assert ends(done)[0] == 0


def test_two_nodes_meet_and_stop_after_saving(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    nodes = [start(tmp_path, 3, ranks=1, NODE_RANK=str(rank), **common) for rank in range(2)]
    for rank, node in enumerate(nodes):
        assert node.stdout is not None
        assert node.stdout.readline().strip() == f"rank {rank} of 2"
    for node in nodes:
        node.send_signal(signal.SIGTERM)
    assert [ends(node)[0] for node in nodes] == [3, 3]
