"""Even load of the experts: two losses whose gradients enter on the way, and a bias without gradient.

Notation: one optimizer step has T tokens (padding left out) in G rows, which ranks and accumulation cut into M
micro-batches. Of E experts a token t chooses k; x_ti are its logits, s_ti its scores made to sum to 1 over the experts.

**Load-balancing loss** of a set A of tokens (Switch Transformer, arXiv:2101.03961, eq. 4-6; DeepSeek-V3,
arXiv:2412.19437, eq. 17-20):

    f_i = E / (k |A|) * (choices of expert i in A)       no gradient; 1 = its even share
    P_i = 1 / |A| * sum over t in A of s_ti
    L(A) = alpha * sum over i of f_i P_i                 alpha when the load is even

    kind           A                    loss of the step                    factor here
    sequence       each row             mean of L over the G rows           alpha / G
    micro_batch    each micro-batch     mean of L over the M micro-batches  alpha / M
    global_batch   the whole step       alpha * sum over i of f_i P_i       alpha / T

Each is a sum over parts times a factor that is known before the step begins, so that gradients of micro-batches and
ranks have only to be added, as those of the token losses. `micro_batch` makes the size of a micro-batch part of what is
learned; the others do not depend on any cut. The f of the whole step is known only after its last forward, so
`global_batch` takes that of the step before (the delay that the selection bias has, too); P is the current one. In the
first step f = 1.

**z-loss** (ST-MoE, arXiv:2202.08906, eq. 5): beta / T * sum over t of (log sum over i of exp x_ti)^2.

A loss is not added to the one that is returned: `with_loss` gives it a gradient of 1 wherever the router's weights get
theirs. So it needs no way through later layers or pipeline stages, and no scale but its own.

**Selection bias** (Wang et al. 2024, arXiv:2408.15664): after each step b_i += rate * sign(mean load - load_i).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor


def count_choices(experts: Tensor, n_experts: int) -> Tensor:
    """How often each row chose each expert: (B, S, k) -> (B, n_experts) int64. n_experts stands for nowhere."""
    rows = experts.shape[0]
    first = torch.arange(rows, device=experts.device)[:, None] * (n_experts + 1)
    key = (experts.flatten(1) + first).flatten()  # (B * S * k,)
    counts = torch.zeros(rows * (n_experts + 1), dtype=torch.int64, device=experts.device)
    counts.scatter_add_(0, key, torch.ones_like(key))
    return counts.view(rows, n_experts + 1)[:, :n_experts]


def load_balancing_loss(
    shares: Tensor,
    counts: Tensor,
    top_k: int,
    kind: Literal["sequence", "micro_batch", "global_batch"],
    last_load: Tensor,
) -> Tensor:
    """The loss of these rows before its factor: the sum of L / alpha over the sets A, of `global_batch` times T.

    Args:
        shares: (B, E) fp32: sum of s_ti over the row's tokens on this device.
        counts: (B, E) int64: choices by row, on all devices that hold parts of these rows.
        last_load: (E,) int64: choices of the whole step before.
    """
    n_experts = counts.shape[1]
    if kind == "global_batch":
        total = last_load.sum()
        even = torch.ones_like(last_load, dtype=torch.float32)
        f = torch.where(total > 0, n_experts * last_load / total.clamp(min=1), even)  # (E,)
        return (f * shares.sum(0)).sum()
    if kind == "micro_batch":
        shares, counts = shares.sum(0, keepdim=True), counts.sum(0, keepdim=True)  # (1, E)
    total = counts.sum(1, keepdim=True).clamp(min=1)  # k |A|
    f = n_experts * counts / total
    return (f * shares * (top_k / total)).sum()


def z_loss(logits: Tensor, padding: Tensor | None) -> Tensor:
    """Sum over tokens of the squared log-sum-exp: logits (B, S, E), padding (B, S) bool or None -> scalar."""
    squares = torch.logsumexp(logits, dim=-1).square()
    return (squares if padding is None else squares.masked_fill(padding, 0)).sum()


def with_loss(x: Tensor, loss: Tensor) -> Tensor:
    """x itself; whenever x receives a gradient, the scalar `loss` receives 1."""
    return _WithLoss.apply(x, loss)


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones(())


def updated_bias(bias: Tensor, load: Tensor, rate: float) -> Tensor:
    """The selection bias (E,) after a step in which the experts had this load (E,) int64; whole numbers decide."""
    direction = torch.sign(load.sum() - load.numel() * load)
    return bias + rate * direction
