r"""Schedules whose stages lie in a V: ZBVZeroBubble and DualPipeV.

    rank 0     stage 0        stage 2p-1  (loss)
    rank 1       stage 1    stage 2p-2
    ...             \          /
    rank p-1      stage p-1, stage p

Each rank holds a stage of the way down and one of the way up, so the rank that a micro-batch enters first
sees its loss first too, and the first backward waits for no other rank.

p = ranks, m = micro-batches. F, I, W are times of one micro-batch in one stage, B = I + W. It takes 2p - 1
(ZBV) or 2p (DualPipeV) micro-batches to fill the V. The phases that fill and drain it are written for that
many; with fewer, the micro-batches that do not exist are left out, which keeps every order right.
"""

from __future__ import annotations

from collections import Counter, deque

from titan5d.schedules.table import Action, Kind, Overlap, Schedule, Slot, parts, v_placement


def zbv_zero_bubble(p: int, m: int) -> Schedule:
    """ZB-V (Qi et al. 2023, arXiv 2401.10241, section 6, made for F = I = W).

    Idle time with F = I = W: (p - 1) F per rank, the fill alone. The paper's zero counts consecutive steps
    that overlap; a step that ends with a gradient norm over all ranks keeps its fill. Every rank holds at
    most 2p chunks.
    """
    rows = []
    for rank in range(p):
        row = _RowWriter(down=rank, up=2 * p - 1 - rank)
        n = max(m, 2 * p - 1)  # the pattern of a full V; `only_existing` leaves out what there is not
        # 1. Fill the V: forwards of the way down until the first micro-batch has come back up to this rank.
        for _ in range(2 * (p - rank) - 1):
            row.forward(row.down)
        # 2. Up and down in turn: the ranks near the turn meet the first micro-batch again before rank 0 does.
        for _ in range(rank):
            row.forward(row.up)
            row.forward(row.down)
        # 3. The way up goes backward as soon as it has gone forward; W fills the time till the next arrives.
        for _ in range(p - rank):
            row.forward(row.up)
            row.input_grad(row.up)
            row.weight_grad(row.up)
        # 4. Steady: forward, I and W of the way down, then of the way up.
        while row.count[row.up, "F"] < n:
            if row.count[row.down, "F"] < n:
                row.forward(row.down)
            row.input_grad(row.down)
            row.weight_grad(row.down)
            row.forward(row.up)
            row.input_grad(row.up)
            row.weight_grad(row.up)
        # 5. Drain: nothing comes in any more, so input gradients go first and their W are kept for later ...
        for _ in range(rank):
            row.input_grad(row.down)
            row.input_grad(row.up)
        # 6. ... to be done while the last input gradients of the way down travel from rank to rank ...
        for _ in range(p - rank):
            row.input_grad(row.down)
            row.weight_grad(row.down)
        # 7. ... and after them.
        while row.count[row.up, "W"] < n:
            row.weight_grad(row.up)
        while row.count[row.down, "W"] < n:
            row.weight_grad(row.down)
        rows.append(row.only_existing(m))
    return Schedule("ZBVZeroBubble", m, v_placement(p), tuple(rows))


def dualpipe_v(p: int, m: int) -> Schedule:
    """DualPipeV (DeepSeek-AI 2024, arXiv 2412.19437, in its V-shaped form).

    In the steady part a forward of one micro-batch and a backward of another share a slot, so the all-to-all
    of one hides behind the compute of the other. The original DualPipe keeps two copies of the model instead
    of the V.

    Idle time with F = I = W: (p - 1)(F&B + B - 3W) on the last rank, F&B = the length of an overlapped slot;
    less on ranks with fewer of them. Every rank holds at most 2p + 1 chunks.
    """
    rows = []
    for rank in range(p):
        row = _RowWriter(down=rank, up=2 * p - 1 - rank)
        after = p - 1 - rank  # ranks between this one and the turn of the V
        # 1. Fill: forwards of the way down, two for each rank a micro-batch has to pass and come back by.
        for _ in range(2 * after):
            row.forward(row.down)
        # 2. Micro-batches come back up: forwards of both directions.
        for _ in range(rank + 1):
            row.forward(row.down)
            row.forward(row.up)
        # 3. The way up goes backward; W runs while the next forward is on its way here.
        for _ in range(after):
            row.input_grad(row.up)
            row.oldest_weight_grad()
            row.forward(row.up)
        # 4. Steady: forward down with backward up, then forward up with backward down.
        for step in range(m - 2 * p + rank + 1):
            if step == 0 and after == 0:
                # At the turn the first backward is what all other ranks wait for: it goes alone, sooner.
                row.forward(row.down)
                row.backward(row.up)
            else:
                row.overlap(row.down, row.up)
            row.overlap(row.up, row.down)
        # 5. No forward of the way down is left: backward up alone, forward up with backward down.
        for _ in range(after):
            row.backward(row.up)
            row.overlap(row.up, row.down)
        # 6. Backwards only. The second half of them is split, which sends the input gradients on sooner and
        #    keeps weight gradients for the end.
        for step in range(2 * (rank + 1)):
            stage = row.up if step % 2 == 0 else row.down
            if step > rank:
                row.input_grad(stage)
            else:
                row.backward(stage)
        # 7. A kept W fills each wait for the next input gradient of the way down.
        for _ in range(after):
            row.oldest_weight_grad()
            row.input_grad(row.down)
        # 8. The W that are left.
        while row.kept:
            row.oldest_weight_grad()
        rows.append(row.only_existing(m))
    return Schedule("DualPipeV", m, v_placement(p), tuple(rows))


class _RowWriter:
    """Writes one rank's row. A stage takes its micro-batches in turn, so an action needs only its stage."""

    def __init__(self, down: int, up: int) -> None:
        self.down = down
        self.up = up
        self.count: Counter[tuple[int, Kind]] = Counter()  # how many I count as done for a whole backward too
        self.kept: deque[Action] = deque()  # weight gradients whose input gradient is written
        self._row: list[Slot] = []

    def forward(self, stage: int) -> None:
        self._row.append(self._next(stage, "F"))

    def backward(self, stage: int) -> None:
        self._row.append(self._next_backward(stage))

    def input_grad(self, stage: int) -> None:
        action = self._next(stage, "I")
        self._row.append(action)
        self.kept.append(Action(stage, "W", action.microbatch))

    def weight_grad(self, stage: int) -> None:
        """The oldest kept weight gradient of `stage`."""
        action = self._next(stage, "W")
        self.kept.remove(action)
        self._row.append(action)

    def oldest_weight_grad(self) -> None:
        """The oldest kept weight gradient of either stage."""
        action = self.kept.popleft()
        self.count[action.stage, "W"] += 1
        self._row.append(action)

    def overlap(self, forward_stage: int, backward_stage: int) -> None:
        self._row.append(Overlap(self._next(forward_stage, "F"), self._next_backward(backward_stage)))

    def only_existing(self, m: int) -> tuple[Slot, ...]:
        """The row without micro-batches from m on. Half of an Overlap may remain."""
        row: list[Slot] = []
        for slot in self._row:
            here = [action for action in parts(slot) if action.microbatch < m]
            row += here if len(here) < len(parts(slot)) else [slot]
        return tuple(row)

    def _next_backward(self, stage: int) -> Action:
        self.count[stage, "W"] += 1
        return Action(stage, "B", self._next(stage, "I").microbatch)

    def _next(self, stage: int, kind: Kind) -> Action:
        microbatch = self.count[stage, kind]
        self.count[stage, kind] += 1
        return Action(stage, kind, microbatch)
