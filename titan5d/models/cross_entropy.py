"""Output matrix and cross-entropy in one, without ever holding all logits.

The logits (tokens, vocab) are the largest tensor of a language model. Here they exist one chunk of tokens at a time:

    tokens  [ chunk 0 | chunk 1 | ... ]   for each chunk:  logits = hidden @ weight^T           (chunk, V)
                                                           loss  += logsumexp - logit of label
                                                           d_logits = softmax - one_hot, in place
                                                           d_hidden = d_logits @ weight
                                                           d_weight += d_logits^T @ hidden      in fp32

The gradient of a *sum* of token losses needs nothing from backward but one factor, so it is computed at once, in the
forward pass, while the chunk's logits are there. How many chunks there are changes memory, never the value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100
"""Label of a position that has no target."""

TokenLosses = Callable[[Tensor, Tensor, bool], Tensor]
"""What `token_losses` does: (logits, labels, with_grad) -> losses."""


@dataclass
class ChunkedCrossEntropy:
    """`(hidden, weight, labels) -> (loss_sum, row_sums)`.

    Attributes:
        chunk_bytes: largest piece of the fp32 logits held at once, bytes; 0 = all at once.
        losses_of: what happens to a chunk's logits; None = `token_losses`. May be replaced by a compiled form.
    """

    chunk_bytes: int = 64 * 2**20
    losses_of: TokenLosses | None = None

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """
        Args:
            hidden: (B, S, D), any float type.
            weight: (V, D), the type of hidden.
            labels: (B, S) int64 in 0..V-1, or -100 where there is no target.

        Returns:
            Sum of the token losses, fp32 scalar, differentiable once; and its parts by row, fp32 (B,), not
            differentiable. Without any target both are exactly 0, and so are the gradients.
        """
        chunks = self.chunks(labels.numel(), weight.shape[0])
        return linear_cross_entropy(hidden, weight, labels, chunks, self.losses_of or token_losses)

    def chunks(self, tokens: int, vocab_size: int) -> int:
        """Into how many pieces of nearly equal size the logits of so many tokens are cut."""
        if self.chunk_bytes <= 0:
            return 1
        rows = max(1, self.chunk_bytes // (4 * vocab_size))
        return max(1, -(-tokens // rows))


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, chunks: int, losses_of: TokenLosses
) -> tuple[Tensor, Tensor]:
    """What `ChunkedCrossEntropy` computes, in so many chunks, `losses_of` being what happens to a chunk's logits.

    A device that holds a slice of the vocabulary passes that slice of `weight` and a `losses_of` that completes the
    softmax with its peers; the gradient of `hidden` is then this slice's summand.
    """
    return _LinearCrossEntropy.apply(hidden, weight, labels, chunks, losses_of, torch.is_grad_enabled())


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunks: int,
        losses_of: TokenLosses,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        flat_hidden = hidden.reshape(-1, hidden.shape[-1])  # (B, S, D) -> (T, D)
        flat_labels = labels.reshape(-1)  # (B, S) -> (T,)
        needs_hidden, needs_weight = (need and with_grad for need in ctx.needs_input_grad[:2])
        losses = torch.empty(flat_labels.shape, dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(flat_hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight and chunks > 1 else None

        pieces = [tensor.tensor_split(chunks) for tensor in (flat_hidden, flat_labels, losses)]
        grad_pieces = grad_hidden.tensor_split(chunks) if grad_hidden is not None else [None] * chunks
        for hidden_piece, label_piece, loss_piece, grad_piece in zip(*pieces, grad_pieces, strict=True):
            logits = (hidden_piece @ weight.t()).float()  # (rows, V)
            loss_piece.copy_(losses_of(logits, label_piece, needs_hidden or needs_weight))
            d_logits = logits.to(weight.dtype)
            if grad_piece is not None:
                torch.mm(d_logits, weight, out=grad_piece)
            if grad_weight is not None:
                _add_product(grad_weight, logits, d_logits, hidden_piece)
            elif needs_weight:
                grad_weight = d_logits.t() @ hidden_piece

        if needs_hidden or needs_weight:
            ctx.save_for_backward(
                grad_hidden.view(hidden.shape) if grad_hidden is not None else None,
                grad_weight.to(weight.dtype) if grad_weight is not None else None,
            )
        row_sums = losses.view(labels.shape).sum(-1)  # (B,)
        ctx.mark_non_differentiable(row_sums)
        return row_sums.sum(), row_sums

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, factor: Tensor, _: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        # Not in place: schedules that split backward run this once for the input and once for the weight.
        grad_hidden, grad_weight = (_scaled(grad, factor) for grad in ctx.saved_tensors)
        return grad_hidden, grad_weight, None, None, None, None


def token_losses(logits: Tensor, labels: Tensor, with_grad: bool) -> Tensor:
    """Token losses (rows,) of fp32 logits (rows, V), which are overwritten, `with_grad` by d loss / d logits."""
    valid = (labels != IGNORE).unsqueeze(-1)  # (rows, 1)
    target = torch.where(valid, labels.unsqueeze(-1), 0)  # (rows, 1)
    top = logits.amax(-1, keepdim=True)
    at_target = logits.gather(-1, target)
    total = logits.sub_(top).exp_().sum(-1, keepdim=True)
    if with_grad:  # softmax - one_hot, and zeros in rows without a target
        logits.mul_(valid / total).scatter_add_(-1, target, -valid.to(logits.dtype))
    return torch.where(valid, total.log() + (top - at_target), 0.0).squeeze(-1)


def _add_product(total: Tensor, wide: Tensor, narrow: Tensor, hidden: Tensor) -> None:
    """Adds d_logits^T @ hidden to `total` (V, D) fp32, d_logits (rows, V) being given in fp32 and in hidden's type.

    The product is never rounded to bf16: that would make the result depend on the number of chunks.
    """
    if hidden.device.type == "cuda" and hidden.dtype != torch.float32:
        total.add_(torch.mm(narrow.t(), hidden, out_dtype=torch.float32))
    else:
        total.addmm_(wide.t(), hidden.float())


def _scaled(grad: Tensor | None, factor: Tensor) -> Tensor | None:
    """grad * factor in fp32: a factor like 1 / tokens, rounded to bf16, would scale the whole gradient wrongly."""
    if grad is None or grad.dtype == torch.float32:
        return None if grad is None else grad * factor
    return grad.float().mul_(factor).to(grad.dtype)  # in place in the wide copy: no second one
