"""Rows to the ranks of their experts and back: four all-to-alls a layer, two forward and two backward.

    e = 2 ranks, 4 experts: rank 0 has experts 0 1, rank 1 has 2 3. Numbers are the experts that rows ask for.

                send (all-to-all)           arrive (sort)      experts    give back (sort, all-to-all)
    rank 0   0 0 1 | 2 3 3   ->   0 0 1 , 0 1      ->   0 0 0 1 1   ->   0 0 1 | 2 3 3    where they stood
    rank 1   0 1   | 2 3     ->   2 3 3 , 2 3      ->   2 2 3 3 3   ->   0 1   | 2 3
                                  of rank 0, of 1

How many rows go where is told first, in one all-to-all of E whole numbers, and read by the host, which has to know how
much memory arrives. A rank may get no row at all, or those of all ranks: then it computes on none or on all, in the
same order of collectives as every other rank.

Where an expert is cut in t slices (expert.py), each with a rank of its own, its rows go to all of them. The ranks are
numbered slice by slice, so the rows that leave are those of one slice, t times over; and what the slices give back are
t summands of all rows, added up in fp32:

    e = 2, t = 2    0 0 1 | 2 3 3 || 0 0 1 | 2 3 3   ->   slice 0 of 0 1 | slice 0 of 2 3 || slice 1 of 0 1 | of 2 3
                    y y y | y y y  + y y y | y y y   <-

What travels on the way there does so while other work is done, in both directions: forward between `send` and
`arrive`, backward from the gradient of `arrive` to that of `send`, between which autograd computes the gradients of
whatever ran there. Besides, each of the four has a pause between its start and its wait, in which another micro-batch
may compute (turns.py). Rows that go nowhere (padding, over capacity) are not sent and come back as zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan5d.models.moe import Rows
from titan5d.parallel.turns import no_pause

ReadCounts = Callable[[Tensor, int], list[list[int]]]


@dataclass(frozen=True)
class Route:
    """Where the rows of one layer and micro-batch go; the same for everything that belongs to a row.

    Attributes:
        group: the ranks that share the experts, those of slice 0 first.
        slices: ranks that share one expert.
        n_rows: rows of this rank, with those that go nowhere.
        leaving, arriving: rows to and from each rank; a row leaves once for each slice.
        sort: (rows here,) for each place in the order of experts, which arriving row stands there; None = they arrive
            in that order.
        unsort: the inverse.
        ends: (experts here,) int32: where the rows of each end, sorted.
    """

    group: dist.ProcessGroup
    slices: int
    n_rows: int
    leaving: list[int]
    arriving: list[int]
    sort: Tensor | None
    unsort: Tensor | None
    ends: Tensor

    def start(self, rows: Tensor, there: bool) -> Flight:
        """Starts an all-to-all: rows of this rank, sorted by expert, to where they go, or back from there."""
        to, back = (self.leaving, self.arriving) if there else (self.arriving, self.leaving)
        sent = sum(self.leaving) // self.slices  # rows of this rank that go somewhere
        summands = None
        if there:
            rows = rows[:sent]
            if self.slices > 1:
                rows = rows.repeat(self.slices, *[1] * (rows.dim() - 1))  # (slices * sent, ...)
            result = landing = rows.new_empty(sum(back), *rows.shape[1:])
        else:
            result = rows.new_empty(self.n_rows, *rows.shape[1:])
            landing = result[:sent]
            result[sent:].zero_()  # rows that went nowhere
            if self.slices > 1:
                summands = rows.new_empty(self.slices, sent, *rows.shape[1:])
                landing = summands.flatten(0, 1)  # (slices * sent, ...)
        rows = rows.contiguous()
        work = dist.all_to_all_single(landing, rows, back, to, group=self.group, async_op=True)
        return Flight(result, rows, work, summands)


@dataclass
class Flight:
    """An all-to-all under way. `land` waits for it; until then its input must live.

    Attributes:
        summands: (slices, rows, ...) what arrives, where it is yet to be summed into the first rows of `result`.
    """

    result: Tensor
    source: Tensor | None
    work: Any
    summands: Tensor | None = None

    def land(self) -> Tensor:
        self.work.wait()
        self.source = None
        if self.summands is not None:
            # adds in fp32, whatever the type, and rounds once
            torch.sum(self.summands, 0, out=self.result[: self.summands.shape[1]])
            self.summands = None
        return self.result


@dataclass
class Trip:
    """One tensor that belongs to rows, on its way to the experts; and later its gradient, on its way back.

    Attributes:
        pause: called while either is under way; of trips that go together only one has a pause.
    """

    route: Route
    pause: Callable[[], None] = no_pause
    flight: Flight | None = None
    promise: Tensor = field(init=False)
    """Stands for the rows in autograd; holds nothing to read until they have arrived."""

    def take_promise(self) -> Tensor:
        """The promise, which the trip then lets go of: its graph holds the trip, and in a circle memory would wait for
        the garbage collector."""
        promise = self.promise
        del self.promise
        return promise

    def land(self) -> Tensor:
        assert self.flight is not None
        flight, self.flight = self.flight, None
        return flight.land()


def read_counts(counts: Tensor, n_rows: int) -> list[list[int]]:
    """Brings counts (2, ranks) to the host: rows to and rows from each rank. n_rows: rows of this rank."""
    return counts.tolist()  # waits for the device


class AllToAll:
    """The exchange (models/moe.py) of ranks that share the experts: rank r of e holds experts r E/e to (r + 1) E/e.

    Attributes:
        slices: ranks that share one expert; of e x slices ranks, rank s e + r holds slice s of those experts.
        read_counts: how the host learns how many rows go where.
        pause: called between the start of an all-to-all of rows and the wait for it. On every rank equally often,
            whatever is there already: so others may start collectives in it. Not while counts travel: the host has to
            wait for them, on CUDA together with all that is computed in a pause.
    """

    def __init__(self, group: dist.ProcessGroup, slices: int = 1) -> None:
        self.group = group
        self.slices = slices
        self.read_counts: ReadCounts = read_counts
        self.pause: Callable[[], None] = no_pause

    def send(self, rows: Rows) -> list[Trip]:
        """Trips of the rows and, if they travel with them, of their weights."""
        route = plan_route(rows.ends, rows.rows.shape[0], self.group, self.slices, self.read_counts)
        trips: list[Trip] = []
        for tensor in (rows.rows, rows.weights):
            if tensor is not None:
                trip = Trip(route, no_pause if trips else self.pause)
                trip.promise = _Send.apply(tensor, trip)
                trips.append(trip)
        return trips

    def arrive(self, trips: list[Trip]) -> Rows:
        rows, *weights = [_Arrive.apply(trip.take_promise(), trip) for trip in trips]
        return Rows(rows, trips[0].route.ends, False, weights[0] if weights else None)

    def give_back(self, out: Tensor, trips: list[Trip]) -> Tensor:
        return _GiveBack.apply(out, trips[0].route, self.pause)


@torch.no_grad()
def plan_route(
    ends: Tensor,
    n_rows: int,
    group: dist.ProcessGroup,
    slices: int = 1,
    read_counts: ReadCounts = read_counts,
) -> Route:
    """The route of rows sorted by expert, ends (E,) int32. Collective: the ranks tell each other their counts."""
    ranks = group.size()
    zero = ends.new_zeros(1)
    counts = torch.diff(ends, prepend=zero).long().repeat(slices)  # (slices * E,)
    arriving = torch.empty_like(counts)  # of each rank the counts of the experts here
    dist.all_to_all_single(arriving, counts, group=group)
    arriving = arriving.view(ranks, -1)  # (ranks, experts here)
    by_rank = read_counts(torch.stack((counts.view(ranks, -1).sum(1), arriving.sum(1))), n_rows)
    sort = unsort = None
    if arriving.shape[1] > 1:
        numbers = torch.arange(arriving.shape[1], device=ends.device).repeat(ranks)
        expert = numbers.repeat_interleave(arriving.flatten(), output_size=sum(by_rank[1]))  # (rows here,)
        sort = torch.sort(expert, stable=True).indices
        unsort = torch.empty_like(sort)
        unsort[sort] = torch.arange(sort.numel(), device=sort.device)
    here = arriving.sum(0).cumsum(0).int()
    return Route(group, slices, n_rows, by_rank[0], by_rank[1], sort, unsort, here)


def _reorder(rows: Tensor, order: Tensor | None) -> Tensor:
    return rows if order is None else rows.index_select(0, order)


class _Send(torch.autograd.Function):
    """Starts the way there. Backward waits for the gradients that `_Arrive` sent."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        trip.flight = trip.route.start(rows, there=True)
        return trip.flight.result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, promise: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.land(), None


class _Arrive(torch.autograd.Function):
    """Waits for the rows and sorts them. Backward starts the way back of their gradients."""

    @staticmethod
    def forward(ctx: Any, promise: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        trip.pause()
        return _reorder(trip.land(), trip.route.sort).view_as(promise)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        trip: Trip = ctx.trip
        trip.flight = trip.route.start(_reorder(grad, trip.route.unsort), there=False)
        trip.pause()
        return grad.new_zeros(()).expand(grad.shape), None  # the gradient itself goes by way of the trip


class _GiveBack(torch.autograd.Function):
    """The way back, and of the gradients there again."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, route: Route, pause: Callable[[], None]) -> Tensor:
        ctx.route, ctx.pause = route, pause
        flight = route.start(_reorder(out, route.unsort), there=False)
        pause()
        return flight.land()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        route: Route = ctx.route
        flight = route.start(grad, there=True)
        ctx.pause()
        return _reorder(flight.land(), route.sort), None, None
