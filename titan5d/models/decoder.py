"""The decoder: embedding, blocks, norm, head. It knows nothing of devices other than its own.

    tokens (B, S) -> tok_embeddings -> layers 0..n-1 -> norm -> output -> logits (B, S, V), or the loss

Each block adds two corrections to the residual stream (pre-norm):

    h = x + attention(attention_norm(x))
    y = h + feed_forward(ffn_norm(h))
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from titan5d.models.args import ModelArgs
from titan5d.models.attention import Attention, document_causal_mask
from titan5d.models.feed_forward import FeedForward
from titan5d.models.norm import RMSNorm
from titan5d.models.output import OutputHead
from titan5d.models.rope import RotaryEmbedding

__all__ = ["Block", "Decoder", "ModelArgs"]


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and around a residual: (B, S, D) -> (B, S, D)."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.attention = Attention(
            args.dim,
            args.n_heads,
            args.n_kv_heads,
            args.head_dim,
            bias=args.attention_bias,
            qk_norm_eps=args.norm_eps if args.qk_norm else None,
        )
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)
        self.feed_forward = FeedForward(args.dim, args.ffn_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        h = x + self.attention(self.attention_norm(x), cos, sin, mask)
        return h + self.feed_forward(self.ffn_norm(h))


class Decoder(nn.Module):
    """A decoder-only transformer. Built with torch's default weights; `models.init` gives it its own.

    A pipeline stage is the same class with some of `tok_embeddings`, `norm`, `output` set to None and some of `layers`
    deleted; names never change.

    Attributes:
        args: the sizes.
        layers: blocks by their global number, "0", "1", ...
        prepare_mask: document ids -> what every `attention.core` gets as its mask; called once per forward.

    Raises ValueError listing every problem of `args`.
    """

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        if problems := args.problems():
            raise ValueError("\n".join(problems))
        self.args = args
        self.tok_embeddings: nn.Embedding | None = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict({str(n): Block(args) for n in range(args.n_layers)})
        self.norm: RMSNorm | None = RMSNorm(args.dim, args.norm_eps)
        self.output: OutputHead | None = OutputHead(args.dim, args.vocab_size)
        self.rope = RotaryEmbedding(args.head_dim, args.rope_theta, args.rope_scaling)
        self.prepare_mask: Callable[[Tensor | None], Tensor | None] = document_causal_mask
        self._tie()

    def _tie(self) -> None:
        if self.args.tie_embeddings and self.tok_embeddings is not None and self.output is not None:
            self.output.weight = self.tok_embeddings.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        super()._apply(fn, recurse)
        self._tie()  # moving off the meta device makes new parameters, one for each name
        return self

    def init_buffers(self, device: torch.device | str) -> None:
        """Computes everything that is not saved anew on `device`: the rotary frequencies, fp32."""
        self.rope.init_buffers(device)

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
            document_ids: (B, S) integers, equal within a document; None = each row is one document.
            labels: (B, S) int64, the target of each token, -100 where there is none.

        Returns:
            With labels: (sum of token losses, fp32 scalar; its parts by row, fp32 (B,), not differentiable).
            Without: logits (B, S, V). On a model without head: the hidden states (B, S, D).
        """
        cos, sin = self.rope(positions, tokens.shape[1])
        mask = self.prepare_mask(document_ids)
        h = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)  # (B, S, D)
        for block in self.layers.values():
            h = block(h, cos, sin, mask)
        if self.norm is not None:
            h = self.norm(h)
        return h if self.output is None else self.output(h, labels)
