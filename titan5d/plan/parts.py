"""How many parameters of each part of the model one rank's group shares: after the tensor, pipeline and expert cuts,
before data parallelism shards them.

    embedding, head   V/t rows           norms, latent attention's down-projections   whole on every tensor rank
    blocks            columns or rows/t  key/value heads fewer than t                 whole on every tensor rank
    experts           E/ep of each layer, 1/etp of each     router                    whole on every rank, unsharded
"""

from __future__ import annotations

from dataclasses import dataclass

from titan5d.plan.case import Case


@dataclass(frozen=True)
class RankParts:
    """Elements on one pipeline rank, shared by the ranks of its data-parallel group.

    Attributes:
        units: of each unit that data parallelism gathers, in the order of the model, experts that are cut left out.
        experts: of each block's unit of experts that are cut.
        routers: whole on every rank.
        layers: how many blocks there are.
    """

    units: tuple[float, ...]
    experts: tuple[float, ...]
    routers: float
    layers: int

    @property
    def shared(self) -> float:
        return sum(self.units)

    @property
    def largest(self) -> float:
        return max(self.units, default=0.0)


def rank_parts(case: Case, rank: int) -> RankParts:
    """The parts of pipeline rank `rank`."""
    units: list[float] = []
    experts: list[float] = []
    routers, layers = 0.0, 0
    args = case.args
    matrix = -(-args.vocab_size // case.topology.tp) * args.dim
    for stage in case.stages_of_rank(rank):
        names = case.stages[stage]
        tied = args.tie_embeddings and "tok_embeddings" in names and "output" in names
        if "tok_embeddings" in names:
            units.append(matrix + (args.dim if tied else 0))
        for layer in case.layers_of_stage[stage]:
            block, routed, router = block_elements(case, args.has_experts(layer))
            units.append(block + (0 if case.experts_apart else routed))
            if case.experts_apart and routed:
                experts.append(routed)
            routers += router
            layers += 1
        if "output" in names and not tied:
            units.append(matrix + args.dim)
    return RankParts(tuple(units), tuple(experts), routers, layers)


def block_elements(case: Case, with_experts: bool) -> tuple[float, float, float]:
    """(what data parallelism shards with the block, routed experts, router) of one block on one tensor rank."""
    args, tp = case.args, case.topology.tp
    block = attention_elements(case) + 2 * args.dim
    if not with_experts:
        return block + 3 * args.dim * args.ffn_dim / tp, 0.0, 0.0
    expert = 3 * args.dim * args.moe_ffn_dim
    routed = args.n_experts / case.topology.expert_ranks * expert
    return block + args.n_shared_experts * expert / tp, routed, float(args.dim * args.n_experts)


def end_elements(case: Case, stage: int) -> float:
    """Embedding, output matrix and last norm, as far as the stage has them."""
    names, args = case.stages[stage], case.args
    matrix = -(-args.vocab_size // case.topology.tp) * args.dim
    matrices = ("tok_embeddings" in names) + ("output" in names)
    if args.tie_embeddings and matrices == 2:
        matrices = 1
    return matrix * matrices + (args.dim if "output" in names else 0)


def all_elements(case: Case, with_experts: bool) -> float:
    """Of one block, with its experts and router."""
    return sum(block_elements(case, with_experts))


def put_off_elements(case: Case, with_experts: bool) -> float:
    """Weights of one block whose gradients W makes: of linear layers, not of norms, routers and experts."""
    return block_elements(case, with_experts)[0] - 2 * case.args.dim


def attention_elements(case: Case) -> float:
    """Projections and norms of one block's attention on one tensor rank."""
    args, tp = case.args, case.topology.tp
    q_dim = args.n_heads * args.head_dim
    if args.kv_lora_rank:
        rank = args.kv_lora_rank
        down = args.dim * (rank + args.qk_rope_head_dim) + args.q_lora_rank * args.dim
        queries = (args.q_lora_rank or args.dim) * q_dim
        up = rank * args.n_heads * (args.qk_nope_head_dim + args.v_head_dim)
        out = args.n_heads * args.v_head_dim * args.dim
        return down + rank + args.q_lora_rank + (queries + up + out) / tp
    kv_dim = args.n_kv_heads * args.head_dim
    kv_cut = tp if args.n_kv_heads >= tp else 1
    weights = 2 * args.dim * q_dim / tp + 2 * args.dim * kv_dim / kv_cut
    vectors = (q_dim / tp + 2 * kv_dim / kv_cut + args.dim) if args.attention_bias else 0
    return weights + vectors + (2 * args.head_dim if args.qk_norm else 0)
