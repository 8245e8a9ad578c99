"""What travels between pipeline ranks: hidden states down the stages, their gradients back up.

    rank 0  F0 F1 F2 .  B0 ...        for each pair of ranks and direction one line, first in first out, in the order
             \\  \\  \\    /           in which the sender's row makes the messages. The table is the same on both
    rank 1     F0 F1 B0 ...           sides, so the receiver knows that order and needs no headers.

Sending never makes a rank wait. A receive is posted at the latest when its message is needed, together with all
messages before it on that line, and one slot ahead, so that it travels while the slot before computes. Hence every
message that a table's order allows to be made also arrives: a table that `schedules.check` finds playable cannot
deadlock here. Two process groups, one for each direction between two ranks, keep NCCL's streams apart: there an
operation waits for those issued before it on the same pair of ranks and group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from titan5d.schedules.simulate import Output, inputs, outputs
from titan5d.schedules.table import Schedule, Slot, parts

Shape = Callable[[int], tuple[int, ...]]
"""Micro-batch -> shape of the hidden states between two stages."""


def receiver(output: Output, schedule: Schedule) -> int | None:
    """The rank that waits for what an action makes; None when nobody does, or the maker itself."""
    kind, stage, _ = output
    consumer = stage + 1 if kind == "F" else stage - 1
    if not 0 <= consumer < schedule.n_stages:
        return None
    rank = schedule.rank_of_stage[consumer]
    return None if rank == schedule.rank_of_stage[stage] else rank


def message_lines(schedule: Schedule) -> dict[tuple[int, int], list[Output]]:
    """(sender, receiver) -> the messages of one pass, in the order in which they are made."""
    lines: dict[tuple[int, int], list[Output]] = {}
    for rank in range(schedule.n_ranks):
        for action in schedule.actions(rank):
            for made in outputs(action):
                to = receiver(made, schedule)
                if to is not None:
                    lines.setdefault((rank, to), []).append(made)
    return lines


def needed_messages(slot: Slot, rank: int, schedule: Schedule) -> list[Output]:
    """What must have arrived from other ranks before `slot` can run on `rank`."""
    needed = [each for action in parts(slot) for each in inputs(action, schedule.n_stages)]
    return [each for each in needed if schedule.rank_of_stage[each[1]] != rank]


@dataclass(frozen=True)
class PipelineGroups:
    """The ranks of one pipeline, joined twice: messages to a higher rank take `down`, to a lower one `up`."""

    down: dist.ProcessGroup
    up: dist.ProcessGroup

    def between(self, sender: int, to: int) -> dist.ProcessGroup:
        return self.down if sender < to else self.up

    @property
    def rank(self) -> int:
        return self.down.rank()


class Messages:
    """The messages of one pass on one rank.

    Args:
        shape: of the hidden states of each micro-batch; gradients have the same.
        dtype: of both.
    """

    def __init__(
        self,
        schedule: Schedule,
        groups: PipelineGroups,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.schedule, self.groups, self.rank = schedule, groups, groups.rank
        self.shape, self.dtype, self.device = shape, dtype, device
        self.lines = message_lines(schedule)
        self.place = {
            message: index for line in self.lines.values() for index, message in enumerate(line)
        }  # a message is on one line
        self.posted = {sender: 0 for sender, to in self.lines if to == self.rank}
        self.arriving: dict[Output, tuple[dist.Work, Tensor]] = {}
        self.sent: list[tuple[dist.Work, Tensor]] = []

    def expect(self, messages: Iterable[Output]) -> None:
        """Posts the receives of `messages` and of all before them on their lines, if that is not done yet."""
        for message in messages:
            sender = self.schedule.rank_of_stage[message[1]]
            group = self.groups.between(sender, self.rank)
            line = self.lines[sender, self.rank]
            for index in range(self.posted[sender], self.place[message] + 1):
                buffer = torch.empty(self.shape(line[index][2]), dtype=self.dtype, device=self.device)
                work = dist.irecv(buffer, group=group, group_src=sender, tag=index)
                assert work is not None
                self.arriving[line[index]] = (work, buffer)
                self.posted[sender] = index + 1

    def receive(self, message: Output) -> Tensor:
        """Waits for a message that is expected."""
        work, buffer = self.arriving.pop(message)
        work.wait()
        return buffer

    def send(self, message: Output, tensor: Tensor) -> None:
        """Starts to send. The tensor must not be changed until the pass has ended."""
        to = receiver(message, self.schedule)
        assert to is not None
        group = self.groups.between(self.rank, to)
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=group, group_dst=to, tag=self.place[message])
        assert work is not None
        self.sent = [(one, kept) for one, kept in self.sent if not one.is_completed()]
        self.sent.append((work, tensor))

    def finish(self) -> None:
        """Waits until everything sent has gone."""
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()


def connect(groups: PipelineGroups, schedule: Schedule, device: torch.device) -> None:
    """Sends one element along every line, in one order on all ranks.

    NCCL makes the connection of two ranks at their first message and waits for both of them there; in the middle of a
    schedule that could be a wait in a circle.
    """
    for sender, to in sorted(message_lines(schedule)):
        group = groups.between(sender, to)
        element = torch.zeros(1, device=device)
        if groups.rank == sender:
            dist.send(element, group=group, group_dst=to)
        elif groups.rank == to:
            dist.recv(element, group=group, group_src=sender)
