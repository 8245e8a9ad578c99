"""The sizes of a decoder, their rules, and how many parameters they make. Pure Python: nothing is built."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from titan5d.models.rope_scaling import RopeScaling


@dataclass(frozen=True)
class ModelArgs:
    """What a decoder is made of.

    Attributes:
        dim: width of the residual stream (D).
        n_layers: number of blocks.
        n_heads: query heads (Hq).
        n_kv_heads: key/value heads (Hkv); each serves n_heads / n_kv_heads query heads.
        ffn_dim: hidden width of the feed-forward (F).
        vocab_size: rows of the embedding and of the head (V).
        head_dim: width of one head; 0 stands for dim / n_heads and is replaced by it.
        norm_eps: added to the mean square in RMSNorm.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how the frequencies are stretched to long contexts, if at all.
        tie_embeddings: embedding and head share one matrix.
        max_seq_len: longest context the model is made for, tokens; written into exported configs. No table has this
            length, so it bounds nothing.
        attention_bias: biases in the four projections of attention.
        qk_norm: RMSNorm over each query head and key head, before the rotation.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    head_dim: int = 0
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    max_seq_len: int = 2048
    attention_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.head_dim == 0 and self.n_heads > 0 and self.dim % self.n_heads == 0:
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)

    def with_overrides(self, **values: Any) -> ModelArgs:
        """A copy with the given fields; None keeps a field. head_dim follows dim and n_heads unless it is given.

        Raises TypeError for a name that is no field.
        """
        given = {name: value for name, value in values.items() if value is not None}
        if unknown := sorted(given.keys() - {field.name for field in fields(self)}):
            raise TypeError(f"ModelArgs has no field {', '.join(unknown)}")
        if ("dim" in given or "n_heads" in given) and "head_dim" not in given:
            given["head_dim"] = 0
        return replace(self, **given)

    def problems(self) -> list[str]:
        """Every reason why these sizes make no model, one sentence each; empty when they do."""
        sizes = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "max_seq_len")
        found = [
            f"model.{name} = {getattr(self, name)}, but it is a count, so 1 or more"
            for name in sizes
            if getattr(self, name) < 1
        ]
        if self.n_heads > 0 and self.n_kv_heads > 0 and self.n_heads % self.n_kv_heads:
            divisors = [str(n) for n in range(1, self.n_heads + 1) if self.n_heads % n == 0]
            found.append(
                f"model.n_kv_heads = {self.n_kv_heads} does not divide model.n_heads = {self.n_heads}: every key/value"
                f" head serves the same number of query heads; use one of {', '.join(divisors)}"
            )
        if self.head_dim == 0 and self.n_heads > 0:
            found.append(
                f"model.dim = {self.dim} is no multiple of model.n_heads = {self.n_heads}, so model.head_dim has no"
                " default; change one of them or set model.head_dim"
            )
        elif self.head_dim < 2 or self.head_dim % 2:
            found.append(
                f"model.head_dim = {self.head_dim}, but rotary embedding turns pairs of elements: use an even width,"
                " 2 or more (default: model.dim / model.n_heads)"
            )
        if self.norm_eps <= 0:
            found.append(f"model.norm_eps = {self.norm_eps}, but it keeps a division finite, so it is above 0 (1e-5)")
        if self.rope_theta <= 1:
            found.append(f"model.rope_theta = {self.rope_theta}, but it is the base of a power, so above 1 (10000)")
        if self.rope_scaling is not None:
            found += self.rope_scaling.problems()
        return found


@dataclass(frozen=True)
class ParameterCount:
    """Elements, not bytes.

    Attributes:
        total: all parameters; a tied matrix counts once.
        embedding: the input embedding (looked up, never multiplied).
        layer: one block.
        head: the final norm and the output matrix; of a tied model the norm alone.
        matmul: weights one token is multiplied with: all projections and the head (also when tied). Training costs
            6 FLOPs a token for each.
        active: parameters one token makes use of.
        largest_unit: the largest of embedding, block, and norm + head, which data parallelism gathers at once (tied:
            embedding, norm and head are one).
    """

    total: int
    embedding: int
    layer: int
    head: int
    matmul: int
    active: int
    largest_unit: int


def count_parameters(args: ModelArgs) -> ParameterCount:
    """Counts the parameters of `Decoder(args)` from the sizes alone."""
    q_dim, kv_dim = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    projections = args.dim * (q_dim + 2 * kv_dim) + q_dim * args.dim + 3 * args.dim * args.ffn_dim
    vectors = 2 * args.dim
    if args.attention_bias:
        vectors += q_dim + 2 * kv_dim + args.dim
    if args.qk_norm:
        vectors += 2 * args.head_dim
    layer = projections + vectors
    matrix = args.vocab_size * args.dim
    head = args.dim + (0 if args.tie_embeddings else matrix)
    total = matrix + args.n_layers * layer + head
    return ParameterCount(
        total=total,
        embedding=matrix,
        layer=layer,
        head=head,
        matmul=args.n_layers * projections + matrix,
        active=total,
        largest_unit=max(layer, matrix + head if args.tie_embeddings else head),
    )
