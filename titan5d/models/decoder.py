"""The decoder: embedding, blocks, norm, head. It knows nothing of devices other than its own.

    tokens (B, S) -> tok_embeddings -> layers 0..n-1 -> norm -> output -> logits (B, S, V), or the loss

Each block adds two corrections to the residual stream (pre-norm):

    h = x + attention(attention_norm(x))
    y = h + feed_forward(ffn_norm(h))

where attention is that of attention.py or mla.py, and feed_forward one network (feed_forward.py) or many (moe.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from titan5d.models.args import ModelArgs
from titan5d.models.attention import Attention, document_causal_mask
from titan5d.models.feed_forward import FeedForward
from titan5d.models.mla import LatentAttention
from titan5d.models.moe import MoE
from titan5d.models.norm import RMSNorm
from titan5d.models.output import OutputHead
from titan5d.models.rope import RotaryEmbedding
from titan5d.models.rope_scaling import RopeScaling, YarnScaling
from titan5d.models.router import Router

__all__ = ["Block", "Decoder", "ModelArgs"]


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and around a residual: (B, S, D) -> (B, S, D).

    Args:
        layer: its global number.
    """

    def __init__(self, args: ModelArgs, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.attention = LatentAttention(args) if args.kv_lora_rank else _attention(args)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)
        self.feed_forward = MoE(args) if args.has_experts(layer) else FeedForward(args.dim, args.ffn_dim)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, padding: Tensor | None = None
    ) -> Tensor:
        h = x + self.attention(self.attention_norm(x), cos, sin, mask)
        if isinstance(self.feed_forward, MoE):
            return h + self.feed_forward(self.ffn_norm(h), padding)
        return h + self.feed_forward(self.ffn_norm(h))


def _attention(args: ModelArgs) -> Attention:
    return Attention(
        args.dim,
        args.n_heads,
        args.n_kv_heads,
        args.head_dim,
        bias=args.attention_bias,
        qk_norm_eps=args.norm_eps if args.qk_norm else None,
    )


def padding_of(document_ids: Tensor | None) -> Tensor | None:
    """(B, S) integers -> (B, S) bool, True in document -1: places without a token, filled up to a row's length."""
    return None if document_ids is None else document_ids < 0


class GradientSum(Protocol):
    """Sums the gradients of a step over devices that hold copies of a parameter."""

    def begin_backward(self, last: bool) -> None:
        """To be called before each backward. last: of the step."""
        ...

    def finish(self) -> None:
        """After the last backward of a step: returns when all gradients are summed."""
        ...


class NoCopies:
    """The device holds the only copy, or something else sums."""

    def begin_backward(self, last: bool) -> None:
        """Nothing is to be summed."""

    def finish(self) -> None:
        """Nothing is under way."""


class Decoder(nn.Module):
    """A decoder-only transformer. Built with torch's default weights; `models.init` gives it its own.

    A pipeline stage is the same class with some of `tok_embeddings`, `norm`, `output` set to None and some of `layers`
    deleted; names never change.

    Attributes:
        args: the sizes.
        layers: blocks by their global number, "0", "1", ...
        prepare_mask: document ids -> what every `attention.core` gets as its mask; called once per forward.
        compute_dtype: type of the hidden states, in which everything but routers, norms' sums and the loss computes;
            None = the type of the weights.
        prepare_padding: document ids -> (B, S) bool for the tokens on this device, or None; what experts leave out.
        gradient_sum: how copies of parameters get one gradient; data parallelism puts its own in place.

    Raises ValueError listing every problem of `args`.
    """

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        if problems := args.problems():
            raise ValueError("\n".join(problems))
        self.args = args
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict({str(n): Block(args, n) for n in range(args.n_layers)})
        self.norm: RMSNorm | None = RMSNorm(args.dim, args.norm_eps)
        self.output: OutputHead | None = OutputHead(args.dim, args.vocab_size)
        self.rope = RotaryEmbedding(args.rope_dim, args.rope_theta, _rotary_scaling(args))
        self.prepare_mask: Callable[[Tensor | None], Tensor | None] = document_causal_mask
        self.compute_dtype: torch.dtype | None = None
        self.prepare_padding: Callable[[Tensor | None], Tensor | None] = padding_of
        self.gradient_sum: GradientSum = NoCopies()
        self._tie()

    def _tie(self) -> None:
        if self.args.tie_embeddings and self.tok_embeddings is not None and self.output is not None:
            self.output.weight = self.tok_embeddings.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        super()._apply(fn, recurse)
        self._tie()  # moving off the meta device makes new parameters, one for each name
        return self

    def init_buffers(self, device: torch.device | str) -> None:
        """Computes everything that is no parameter anew on `device`: the rotary frequencies, fp32, and the state of a
        router before any training. What a checkpoint holds is loaded after it."""
        self.rope.init_buffers(device)
        for router in self.routers().values():
            router.init_buffers(device)

    def routers(self) -> dict[str, Router]:
        """The routers of the layers here that have experts, by the global number of their layer."""
        feed_forwards = {name: block.feed_forward for name, block in self.layers.items()}
        return {name: moe.router for name, moe in feed_forwards.items() if isinstance(moe, MoE)}

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """
        Args:
            tokens: (B, S) int64; on a model without embedding the hidden states (B, S, D) of the stage before.
            positions: (B, S) int64 of each token in its document; None = 0..S-1 in every row. Needed when this device
                holds a part of each row.
            document_ids: (B, S) integers, equal within a document, -1 where a row is filled up; None = each row is one
                document.
            labels: (B, S) int64, the target of each token, -100 where there is none.

        Returns:
            With labels: (sum of token losses, fp32 scalar; its parts by row, fp32 (B,), not differentiable).
            Without: logits (B, S, V). On a model without head: the hidden states (B, S, D).
        """
        cos, sin = self.rope(positions, tokens.shape[1])
        mask = self.prepare_mask(document_ids)
        routers = self.routers()
        padding = self.prepare_padding(document_ids) if routers else None
        counting = self.training and torch.is_grad_enabled()
        h = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)  # (B, S, D)
        if self.compute_dtype is not None:
            h = h.to(self.compute_dtype)
        for name, block in self.layers.items():
            h = block(h, cos, sin, mask, padding)
            if counting and name in routers:
                routers[name].add_micro_batch()  # here, since a block may be run again in backward
        if self.norm is not None:
            h = self.norm(h)
        return h if self.output is None else self.output(h, labels)


def _rotary_scaling(args: ModelArgs) -> RopeScaling | None:
    """Latent attention rotates a part of each head, so YaRN's factor is not for the rotation but for the scores."""
    if args.kv_lora_rank and isinstance(args.rope_scaling, YarnScaling):
        return replace(args.rope_scaling, attention_factor=1.0)
    return args.rope_scaling
