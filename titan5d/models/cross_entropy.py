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

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100
"""Label of a position that has no target."""


@dataclass
class ChunkedCrossEntropy:
    """`(hidden, weight, labels) -> (loss_sum, row_sums)`.

    Attributes:
        chunk_bytes: largest piece of the fp32 logits held at once, bytes; 0 = all at once.
    """

    chunk_bytes: int = 64 * 2**20

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
        loss_sum, row_sums = _LinearCrossEntropy.apply(hidden, weight, labels, chunks, torch.is_grad_enabled())
        return loss_sum, row_sums

    def chunks(self, tokens: int, vocab_size: int) -> int:
        """Into how many pieces of nearly equal size the logits of so many tokens are cut."""
        if self.chunk_bytes <= 0:
            return 1
        rows = max(1, self.chunk_bytes // (4 * vocab_size))
        return max(1, -(-tokens // rows))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunks: int, with_grad: bool
    ) -> tuple[Tensor, Tensor]:
        flat_hidden = hidden.reshape(-1, hidden.shape[-1])  # (B, S, D) -> (T, D)
        flat_labels = labels.reshape(-1)  # (B, S) -> (T,)
        needs_hidden, needs_weight = (need and with_grad for need in ctx.needs_input_grad[:2])
        losses = torch.empty(flat_labels.shape, dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(flat_hidden) if needs_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs_weight else None

        pieces = [tensor.tensor_split(chunks) for tensor in (flat_hidden, flat_labels, losses)]
        grad_pieces = grad_hidden.tensor_split(chunks) if grad_hidden is not None else [None] * chunks
        for hidden_piece, label_piece, loss_piece, grad_piece in zip(*pieces, grad_pieces, strict=True):
            logits = hidden_piece @ weight.t()  # (rows, V)
            d_logits = _loss_and_d_logits(logits, label_piece, loss_piece, needs_hidden or needs_weight)
            if grad_piece is not None:
                torch.mm(d_logits, weight, out=grad_piece)
            if grad_weight is not None:
                # fp32 operands, so that a sum over chunks is not rounded to bf16 once a chunk
                grad_weight.addmm_(d_logits.float().t(), hidden_piece.float())

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
    def backward(ctx: Any, factor: Tensor, _row_sums: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        # Not in place: schedules that split backward run this once for the input and once for the weight.
        grad_hidden, grad_weight = (_scaled(grad, factor) for grad in ctx.saved_tensors)
        return grad_hidden, grad_weight, None, None, None


def _loss_and_d_logits(logits: Tensor, labels: Tensor, losses: Tensor, with_grad: bool) -> Tensor:
    """Writes the token losses (rows,) into `losses` and d loss / d logits over `logits` (rows, V); returns the latter."""
    valid = (labels != IGNORE).unsqueeze(-1)  # (rows, 1)
    target = torch.where(valid, labels.unsqueeze(-1), 0)  # (rows, 1)
    wide = logits.float()
    top = wide.amax(-1, keepdim=True)
    at_target = wide.gather(-1, target)
    total = wide.sub_(top).exp_().sum(-1, keepdim=True)
    losses.copy_(torch.where(valid, total.log() + (top - at_target), 0.0).squeeze(-1))
    if not with_grad:
        return logits
    # rows without a target become zeros, the others softmax - one_hot
    wide.mul_(valid / total).scatter_add_(-1, target, -valid.to(wide.dtype))
    return wide if wide is logits else logits.copy_(wide)


def _scaled(grad: Tensor | None, factor: Tensor) -> Tensor | None:
    """grad * factor in fp32: a factor like 1 / tokens, rounded to bf16, would scale the whole gradient wrongly."""
    return None if grad is None else (grad.float() * factor).to(grad.dtype)
