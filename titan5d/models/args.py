"""The sizes of a decoder and their rules. Pure Python: nothing is built. What they add up to: parameter_count.py."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from titan5d.models.parameter_count import ParameterCount, count_parameters
from titan5d.models.rope_scaling import RopeScaling

__all__ = ["Balance", "ModelArgs", "ParameterCount", "count_parameters"]


@dataclass(frozen=True)
class Balance:
    """How the load of the experts is kept even. The formulas are in balance.py and capacity.py.

    Attributes:
        aux_loss_coefficient: weight of the load-balancing loss; 0 = none.
        aux_loss_kind: over which tokens an expert's load is counted: one `sequence`, one `micro_batch`, or the
            `global_batch` (of the optimizer step before).
        z_loss_coefficient: weight of the mean squared log-sum-exp of the router's logits; 0 = none.
        bias_update_rate: step of the selection bias, once per optimizer step; 0 = the bias stays as it is.
        capacity_factor: an expert takes at most this multiple of its even share of each row; 0 = all it is sent.
        force_load_balance: choose experts in turn along each row instead of by score, for benchmarks.
        score_before_w2: weigh an expert's hidden vector instead of its output: the same value, and other activations
            are kept for backward (see experts.py).
    """

    aux_loss_coefficient: float = 0.0
    aux_loss_kind: Literal["sequence", "micro_batch", "global_batch"] = "sequence"
    z_loss_coefficient: float = 0.0
    bias_update_rate: float = 0.0
    capacity_factor: float = 0.0
    force_load_balance: bool = False
    score_before_w2: bool = False

    def problems(self) -> list[str]:
        """Why these values cannot work, one sentence each."""
        names = ("aux_loss_coefficient", "z_loss_coefficient", "bias_update_rate", "capacity_factor")
        return [
            f"moe.{name} = {getattr(self, name)}, but it is 0 (off) or above"
            for name in names
            if not getattr(self, name) >= 0
        ]


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
        head_dim: width of one head; 0 stands for dim / n_heads (of latent attention: both parts of a query head
            together) and is replaced by it.
        norm_eps: added to the mean square in RMSNorm.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how the frequencies are stretched to long contexts, if at all.
        tie_embeddings: embedding and head share one matrix.
        max_seq_len: longest context the model is made for, tokens; written into exported configs. No table has this
            length, so it bounds nothing.
        attention_bias: biases in the four projections of attention.
        qk_norm: RMSNorm over each query head and key head, before the rotation.

    Experts (models/moe.py), when n_experts is not 0:
        n_experts: routed experts of a layer (E).
        top_k: experts each token is sent to.
        moe_ffn_dim: hidden width of one expert.
        n_shared_experts: experts that every token meets besides, computed as one feed-forward of their joint width.
        n_dense_layers: leading layers that keep a feed-forward of width ffn_dim.
        router_score: logits become scores by a `softmax` over the experts or by a `sigmoid` each.
        router_normalize: the top_k scores of a token are divided by their sum.
        router_scale: and multiplied by this.
        n_expert_groups, n_limited_groups: experts lie in so many groups (nodes), of which a token uses at most so many.
        balance: how their load is kept even.

    Latent attention (models/mla.py), when kv_lora_rank is not 0:
        kv_lora_rank: width of the vector from which all heads' keys and values are made.
        q_lora_rank: the same for the queries; 0 = straight from the residual stream.
        qk_nope_head_dim, qk_rope_head_dim: elements of a query head that are not rotated, that are.
        v_head_dim: width of a value head.
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
    n_experts: int = 0
    top_k: int = 0
    moe_ffn_dim: int = 0
    n_shared_experts: int = 0
    n_dense_layers: int = 0
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    router_normalize: bool = True
    router_scale: float = 1.0
    n_expert_groups: int = 1
    n_limited_groups: int = 1
    balance: Balance = field(default_factory=Balance)
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    def __post_init__(self) -> None:
        if self.head_dim == 0 and self.kv_lora_rank:
            object.__setattr__(self, "head_dim", self.qk_nope_head_dim + self.qk_rope_head_dim)
        elif self.head_dim == 0 and self.n_heads > 0 and self.dim % self.n_heads == 0:
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)

    @property
    def rope_dim(self) -> int:
        """Elements of a head that are rotated."""
        return self.qk_rope_head_dim if self.kv_lora_rank else self.head_dim

    def has_experts(self, layer: int) -> bool:
        """Whether this layer's feed-forward is made of experts."""
        return self.n_experts > 0 and layer >= self.n_dense_layers

    def with_overrides(self, **values: Any) -> ModelArgs:
        """A copy with the given fields; None keeps a field. head_dim follows the sizes it is made of unless it is
        given, and so does n_kv_heads of latent attention.

        Raises TypeError for a name that is no field.
        """
        given = {name: value for name, value in values.items() if value is not None}
        if unknown := sorted(given.keys() - {field.name for field in fields(self)}):
            raise TypeError(f"ModelArgs has no field {', '.join(unknown)}")
        latent = given.get("kv_lora_rank", self.kv_lora_rank) > 0
        made_of = {"qk_nope_head_dim", "qk_rope_head_dim"} if latent else {"dim", "n_heads"}
        if (made_of | {"kv_lora_rank"}) & given.keys() and "head_dim" not in given:
            given["head_dim"] = 0
        if latent and "n_heads" in given and "n_kv_heads" not in given:
            given["n_kv_heads"] = given["n_heads"]
        return replace(self, **given)

    def problems(self) -> list[str]:
        """Every reason why these sizes make no model, one sentence each; empty when they do."""
        sizes = ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size", "max_seq_len")
        found = [
            f"model.{name} = {getattr(self, name)}, but it is a count, so 1 or more"
            for name in sizes
            if getattr(self, name) < 1
        ]
        if self.norm_eps <= 0:
            found.append(
                f"model.norm_eps = {self.norm_eps}, but it keeps a division finite, so it is above 0 (1e-5)"
            )
        if self.rope_theta <= 1:
            found.append(
                f"model.rope_theta = {self.rope_theta}, but it is the base of a power, so above 1 (10000)"
            )
        if self.rope_scaling is not None:
            found += self.rope_scaling.problems()
        found += _latent_problems(self) if self.kv_lora_rank else _head_problems(self)
        return found + (_expert_problems(self) if self.n_experts else _no_expert_problems(self))


def _head_problems(args: ModelArgs) -> list[str]:
    found = []
    if args.n_heads > 0 and args.n_kv_heads > 0 and args.n_heads % args.n_kv_heads:
        found.append(
            f"model.n_kv_heads = {args.n_kv_heads} does not divide model.n_heads = {args.n_heads}: every key/value"
            f" head serves the same number of query heads; use one of {_divisors(args.n_heads)}"
        )
    if args.head_dim == 0 and args.n_heads > 0:
        found.append(
            f"model.dim = {args.dim} is no multiple of model.n_heads = {args.n_heads}, so model.head_dim has no"
            " default; change one of them or set model.head_dim"
        )
    elif args.head_dim < 2 or args.head_dim % 2:
        found.append(
            f"model.head_dim = {args.head_dim}, but rotary embedding turns pairs of elements: use an even width,"
            " 2 or more (default: model.dim / model.n_heads)"
        )
    return found


def _latent_problems(args: ModelArgs) -> list[str]:
    rank, nope, rope, value = args.kv_lora_rank, args.qk_nope_head_dim, args.qk_rope_head_dim, args.v_head_dim
    found = []
    if rank < 0 or args.q_lora_rank < 0 or nope < 1 or value < 1:
        found.append(
            f"model.kv_lora_rank = {rank}, q_lora_rank = {args.q_lora_rank}, qk_nope_head_dim = {nope}, v_head_dim ="
            f" {value}: widths of latent attention are 1 or more (q_lora_rank = 0: queries without a rank)"
        )
    if rope < 2 or rope % 2:
        found.append(
            f"model.qk_rope_head_dim = {rope}, but rotary embedding turns pairs of elements: use an even width, 2 or"
            " more"
        )
    if args.head_dim != nope + rope:
        found.append(
            f"model.head_dim = {args.head_dim}, but a query head of latent attention has qk_nope_head_dim +"
            f" qk_rope_head_dim = {nope} + {rope} = {nope + rope} elements; leave model.head_dim out"
        )
    if value > nope + rope:
        found.append(
            f"model.v_head_dim = {value} is wider than a query head ({nope} + {rope} = {nope + rope}); no attention"
            " kernel takes values wider than keys"
        )
    if args.n_kv_heads != args.n_heads:
        found.append(
            f"model.n_kv_heads = {args.n_kv_heads}, but latent attention makes a key and a value for each of the"
            f" {args.n_heads} query heads; leave model.n_kv_heads out"
        )
    if args.qk_norm:
        found.append(
            "model.qk_norm = true, but latent attention normalises its latent vectors instead; leave it out"
        )
    return found


def _expert_problems(args: ModelArgs) -> list[str]:
    experts, groups, limit = args.n_experts, args.n_expert_groups, args.n_limited_groups
    found = args.balance.problems()
    if experts < 1 or args.moe_ffn_dim < 1 or args.n_shared_experts < 0 or args.n_dense_layers < 0:
        found.append(
            f"model.n_experts = {experts}, moe_ffn_dim = {args.moe_ffn_dim}, n_shared_experts ="
            f" {args.n_shared_experts}, n_dense_layers = {args.n_dense_layers}: a model with experts needs n_experts"
            " and moe_ffn_dim of 1 or more, the others 0 or more"
        )
    if args.n_dense_layers >= args.n_layers:
        found.append(
            f"model.n_dense_layers = {args.n_dense_layers} leaves none of the model.n_layers = {args.n_layers} layers"
            " for experts; use fewer, or model.n_experts = 0"
        )
    if groups < 1 or experts % groups or not 1 <= limit <= groups:
        found.append(
            f"model.n_expert_groups = {groups} and n_limited_groups = {limit}: the groups are of equal size and a token"
            f" uses 1 to all of them; n_expert_groups is one of {_divisors(experts)} for {experts} experts"
        )
    elif not 1 <= args.top_k <= experts // groups * limit:
        reach = experts // groups * limit
        found.append(
            f"model.top_k = {args.top_k}, but a token can reach {reach} experts ({limit} of {groups} groups of"
            f" {experts // groups}); use 1 to {reach}"
        )
    if args.router_scale <= 0:
        found.append(f"model.router_scale = {args.router_scale}, but it is a factor above 0 (1.0 = none)")
    return found


def _no_expert_problems(args: ModelArgs) -> list[str]:
    found = [
        f"model.{name} = {getattr(args, name)} belongs to a model with experts, but model.n_experts = 0"
        for name in ("top_k", "moe_ffn_dim", "n_shared_experts", "n_dense_layers")
        if getattr(args, name)
    ]
    if args.balance != Balance():
        key = next(one.name for one in fields(Balance) if getattr(args.balance, one.name) != one.default)
        section = "debug.moe_" if key == "force_load_balance" else "moe."
        found.append(
            f"{section}{key} = {getattr(args.balance, key)} acts on experts, but this model has none (model.n_experts"
            " = 0)"
        )
    return found


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
