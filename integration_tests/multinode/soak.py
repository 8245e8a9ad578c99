"""Faults at random moments, over and over, in runs that must go on each time: a soak test, run by hand.

    python -m integration_tests.multinode.soak --fault kill --times 10 --seed 1 --seconds 500 --results soak.jsonl
    python -m integration_tests.multinode.soak --table --results soak.jsonl

One job of two nodes trains on and on; after each fault it must train again within --limit seconds. At the end it is
stopped by SIGTERM (exit status 3) and its whole loss curve is compared with that of a run never disturbed: two ranks,
bitwise; elastic runs, whose ranks change, within 1e-4.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from integration_tests.multinode.job import HANG, RAISE, Job, job
from integration_tests.multinode.network import network
from tests.checkpoint.runs import metrics, run, words

FAULTS = {
    "kill": "a rank is killed (kill -9)",
    "raise": "a rank raises",
    "hang": "a rank hangs in Python",
    "cut": "the cable is cut for 15 to 30 s",
    "node": "a node is killed, and started again 3 s later",
    "host": "node 0, which hosts the meeting, is killed, and started again 3 s later",
    "elastic": "a node is killed; the other goes on alone until it is back",
}
FLAGS: dict[str, Any] = {
    "training__steps": 100_000,
    "lr_scheduler__total_steps": 100_000,
    "optimizer__lr": 1e-4,
    "checkpoint__interval": 5,
    "model__n_layers": 2,
    "comm__init_timeout_seconds": 120,
    "comm__train_timeout_seconds": 8,
    "comm__files_timeout_seconds": 16,  # a hang may come while a rank saves
}


def soak(
    fault: str, times: int, dice: random.Random, budget: float, limit: float, folder: Path
) -> dict[str, Any]:
    """Up to `times` faults of one kind within `budget` seconds. Raises AssertionError when the run does not recover."""
    deadline = time.monotonic() + budget
    recoveries: list[float] = []
    nodes = "1:2" if fault == "elastic" else "2"
    argv = words(folder, "run", **FLAGS)
    with network(2) as net, job(net, folder, argv, folder / "run", nodes=nodes, restarts=1000) as running:
        running.wait_for_step(2, within=limit)
        while len(recoveries) < times and time.monotonic() < deadline:
            running.wait_for_step(running.last_step() + dice.randrange(1, 30), within=limit)
            time.sleep(dice.random())
            started = time.monotonic()
            inject(fault, running, dice, limit)
            # A step beyond all that had been logged: the run has restarted, caught up and gone on
            running.wait_for_step(running.last_step() + 10, within=limit)
            recoveries.append(round(time.monotonic() - started, 1))
            print(f"{fault} {len(recoveries)}: training again after {recoveries[-1]:g} s", flush=True)
        running.nodes[0].send_signal(signal.SIGTERM)
        statuses = running.statuses(within=limit)
        assert set(statuses.values()) == {3}, f"{statuses}\n{running.logs()}"
    last = max(metrics(folder, "run"))
    flags, ranks = {**FLAGS, "training__steps": last}, 1 if fault == "elastic" else 2
    assert run(folder, "undisturbed", ranks, limit=120 + 2.0 * last, **flags) == [0] * ranks
    one, two = (
        [line["loss"] for _, line in sorted(metrics(folder, n).items())] for n in ("undisturbed", "run")
    )
    worst = max(abs(a - b) / a for a, b in zip(one, two, strict=True))
    assert worst <= (1e-4 if fault == "elastic" else 0.0), f"losses differ by {worst}"
    return {"fault": fault, "recoveries": recoveries, "steps": last, "difference": worst}


def inject(fault: str, running: Job, dice: random.Random, limit: float) -> None:
    """One fault, on a random node unless it is a whole node that goes."""
    net, node = running.net, dice.randrange(2)
    if fault in ("kill", "raise", "hang"):
        number = {"kill": signal.SIGKILL, "raise": RAISE, "hang": HANG}[fault]
        rank = running.ranks(node)[0]
        os.kill(rank, number)
        if fault == "raise":
            see_it_raised(running, node, rank)
        wait_for_new_ranks(running, 0, limit)
    elif fault == "cut":
        net.link(node, "down")
        time.sleep(dice.uniform(15, 30))
        net.link(node, "up")
        wait_for_new_ranks(running, 0, limit)
    else:
        gone = 0 if fault == "host" else 1
        net.kill_node(gone)
        running.nodes.pop(gone).wait(timeout=10)
        if fault == "elastic":
            wait_for_new_ranks(running, 0, limit)
            running.wait_for_step(running.last_step() + dice.randrange(1, 30), within=limit)
        else:
            time.sleep(3)
        running.start(gone)
        wait_for_new_ranks(running, 1 - gone, limit)


def see_it_raised(running: Job, node: int, rank: int) -> None:
    """Until the rank has ended. Python drops what a signal raises while a weak reference calls back, and says so: then
    the error is raised once more."""
    while rank in running.ranks(node):
        step = running.last_step()
        while rank in running.ranks(node) and running.last_step() < step + 20:
            time.sleep(0.05)
        if rank in running.ranks(node):
            assert "Exception ignored in" in running.log(node), running.logs()
            os.kill(rank, RAISE)


def wait_for_new_ranks(running: Job, node: int, limit: float) -> None:
    """Until a node's ranks are others than now."""
    before, deadline = set(running.ranks(node)), time.monotonic() + limit
    while not (now := set(running.ranks(node))) or now & before:
        assert time.monotonic() < deadline, f"no new ranks in {limit:g} s\n{running.logs()}"
        time.sleep(0.1)


def table(results: list[dict[str, Any]]) -> str:
    """A Markdown table of all results, pieces of one fault together."""
    pieces = defaultdict(list)
    for result in results:
        pieces[result["fault"]].append(result)
    lines = [
        "| fault | times | recovered | seconds until it trains again: median, worst | steps | losses |",
        "|---|---|---|---|---|---|",
    ]
    for fault, name in FAULTS.items():
        if fault not in pieces:
            continue
        recoveries = [seconds for piece in pieces[fault] for seconds in piece["recoveries"]]
        failed = sum("error" in piece for piece in pieces[fault])
        worst = max(piece.get("difference", 0.0) for piece in pieces[fault])
        lines.append(
            f"| {name} | {len(recoveries) + failed} | {len(recoveries)} | {median(recoveries or [0]):.0f},"
            f" {max(recoveries, default=0):.0f} | {sum(piece.get('steps', 0) for piece in pieces[fault])} |"
            f" {'bitwise equal' if worst == 0 else f'within {worst:.0e}'} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fault", choices=FAULTS)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=500.0, help="no new fault after so many seconds")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each recovery")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--table", action="store_true", help="only print the table of the results so far")
    asked = parser.parse_args()
    if not asked.table:
        with tempfile.TemporaryDirectory(prefix="titan5d-soak-") as folder:
            dice = random.Random(asked.seed)
            try:
                result = soak(asked.fault, asked.times, dice, asked.seconds, asked.limit, Path(folder))
            except AssertionError as error:
                print(error)
                result = {"fault": asked.fault, "recoveries": [], "error": str(error)[:200]}
        with asked.results.open("a") as out:
            out.write(json.dumps(result) + "\n")
        return int("error" in result)
    print(table([json.loads(line) for line in asked.results.read_text().splitlines()]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
