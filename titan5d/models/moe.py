"""Mixture of experts: a feed-forward of which each token uses a part.

    x (B, S, D)
    |-> router ----> experts (T, k), weights (T, k)           which experts, how much of each
    |-> permute ---> rows (T k, D), sorted by expert          a copy of the token for each choice
    |      send, arrive                                       to where the experts live: here
    |   experts ---> rows (T k, D)                            each expert on its own rows
    |      give back
    |   combine ---> (T, D)                                   weighted sum of a token's rows
    |-> shared experts ---> (T, D)                            every token; computed while rows are under way
    +-> sum

The number of rows is always T k: choices that go nowhere (padding, over capacity) stand last, belong to no expert and
come back as zeros. So no shape depends on how tokens are routed.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from titan5d.models.args import ModelArgs
from titan5d.models.experts import Experts
from titan5d.models.feed_forward import FeedForward
from titan5d.models.permute import combine, permute, sort_by_expert
from titan5d.models.router import Router


class Rows(NamedTuple):
    """Rows for the experts of this device, sorted by expert."""

    rows: Tensor
    """(N, D)."""
    ends: Tensor
    """(experts on this device,) int32: where the rows of each end."""
    has_tail: bool
    """Whether rows may follow that belong to no expert."""
    weights: Tensor | None
    """(N,) fp32 to weigh the experts' hidden vectors by, or None: outputs are weighed when they are combined."""


class Exchange(Protocol):
    """Brings rows to the devices of their experts and back."""

    def send(self, rows: Rows) -> Any:
        """Sends rows of this device's tokens, sorted by expert (all there are), on a trip."""
        ...

    def arrive(self, trip: Any) -> Rows:
        """The rows for this device's experts."""
        ...

    def give_back(self, out: Tensor, trip: Any) -> Tensor:
        """What the experts made of the rows, (N here, D) -> in the order in which they were sent, (T k, D)."""
        ...


class NoExchange:
    """All experts are here."""

    def send(self, rows: Rows) -> Rows:
        return rows

    def arrive(self, trip: Rows) -> Rows:
        return trip

    def give_back(self, out: Tensor, trip: Rows) -> Tensor:
        return out


class MoE(nn.Module):
    """(B, S, D) -> (B, S, D).

    Attributes:
        exchange: how rows travel; expert parallelism puts its own in place.
    """

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.router = Router(args)
        self.experts = Experts(args.n_experts, args.dim, args.moe_ffn_dim)
        self.shared_experts = None
        if args.n_shared_experts:
            self.shared_experts = FeedForward(args.dim, args.n_shared_experts * args.moe_ffn_dim)
        self.score_before_w2 = args.balance.score_before_w2
        self.capacity_factor = args.balance.capacity_factor
        self.exchange: Exchange = NoExchange()

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """
        Args:
            x: (B, S, D).
            padding: (B, S) bool, True where there is no token: sent to no routed expert, counted nowhere.
        """
        experts, weights = self.router(x, padding)  # (B, S, k)
        order = sort_by_expert(experts.flatten(0, 1), self.router.n_experts)
        rows = permute(x.flatten(0, 1), order)  # (T k, D)
        weights = weights.flatten(0, 1)  # (T, k)
        weights_of_rows = (
            weights.flatten().index_select(0, order.choice) if self.score_before_w2 else None
        )  # (T k,)
        has_tail = padding is not None or self.capacity_factor > 0

        trip = self.exchange.send(Rows(rows, order.ends, has_tail, weights_of_rows))
        shared = None if self.shared_experts is None else self.shared_experts(x)
        out = self.exchange.give_back(self.experts(*self.exchange.arrive(trip)), trip)
        out = combine(out, order, None if self.score_before_w2 else weights).view_as(x)
        return out if shared is None else out + shared
