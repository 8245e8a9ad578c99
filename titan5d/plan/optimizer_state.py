"""Bytes of optimizer state where they differ from tensor to tensor: moments of 8 or 4 bits, and Muon.

    int8, float8    a value, and a scale in fp32 for each 256 of them; int8 has a table of 256 numbers a moment as well
    int4            half a byte, a scale for each 128, a table of 16
                    only of tensors of 4,096 values and more on a rank that blocks divide (train/narrow_state.py)
    Muon            one moment, of matrices in the blocks; both of Adam's of embedding, head and vectors

The sizes are those of a pipeline's rank after the tensor and expert cuts, each tensor sharded by its rows; of rows that
do not divide, those of the first ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from titan5d.models.args import ModelArgs
from titan5d.plan.case import NARROW, Case

LEAST_NARROW = 4096
"""Values of the smallest tensor that torchao narrows."""


class _Tensor(NamedTuple):
    """One parameter on a tensor and expert rank: rows that data parallelism cuts, values of each, and over how many
    ranks. hidden: whether Muon orthogonalizes it."""

    rows: int
    columns: int
    shards: int
    hidden: bool = True


def optimizer_state_bytes(case: Case, rank: int) -> float:
    """Of pipeline rank `rank`, for the kinds whose bytes differ from tensor to tensor."""
    return sum(_bytes(case, tensor) for tensor in _tensors(case, rank))


def _bytes(case: Case, tensor: _Tensor) -> float:
    values = -(-tensor.rows // tensor.shards) * tensor.columns
    if case.moment_kind == "muon":
        return values * case.stored * (1 if tensor.hidden else 2)
    narrow = NARROW[case.moment_kind]
    if values < LEAST_NARROW or values % narrow.block:
        return 2 * values * case.stored
    return 2 * (values * narrow.value + values // narrow.block * 4 + narrow.table * 4)


def _tensors(case: Case, rank: int) -> Iterator[_Tensor]:
    args = case.args
    shards = 1 if case.zero_stage == 0 else case.shards
    matrix = _Tensor(-(-args.vocab_size // case.topology.tp), args.dim, shards, hidden=False)
    for stage in case.stages_of_rank(rank):
        names = case.stages[stage]
        ends = [name for name in ("tok_embeddings", "output") if name in names]
        yield from [matrix] * (1 if args.tie_embeddings else len(ends))
        if "output" in names:
            yield _Tensor(args.dim, 1, shards, hidden=False)
        for layer in case.layers_of_stage[stage]:
            yield from _block(case, shards, args.has_experts(layer))


def _block(case: Case, shards: int, routed: bool) -> Iterator[_Tensor]:
    args, topology = case.args, case.topology
    vectors = [args.dim, args.dim, *_vectors(args, topology.tp)]
    yield from (_Tensor(size, 1, shards, hidden=False) for size in vectors)
    matrices = list(
        _latent_matrices(args, topology.tp) if args.kv_lora_rank else _matrices(args, topology.tp)
    )
    wide = args.n_shared_experts * args.moe_ffn_dim if routed else args.ffn_dim
    if wide:
        wide //= topology.tp
        matrices += [(wide, args.dim), (args.dim, wide), (wide, args.dim)]
    yield from (_Tensor(rows, columns, shards) for rows, columns in matrices)
    if routed:
        yield _Tensor(args.n_experts, args.dim, 1)
        ranks = topology.efsdp if case.experts_apart else case.shards
        values = args.n_experts // topology.ep * args.dim * (args.moe_ffn_dim // topology.etp)
        yield from [_Tensor(values, 1, 1 if case.zero_stage == 0 else ranks)] * 3


def _matrices(args: ModelArgs, tp: int) -> Iterator[tuple[int, int]]:
    """(rows, columns) of q, k, v and out on one tensor rank."""
    heads = args.n_heads * args.head_dim // tp
    kv = args.n_kv_heads * args.head_dim // (tp if args.n_kv_heads >= tp else 1)
    yield from ((heads, args.dim), (kv, args.dim), (kv, args.dim), (args.dim, heads))


def _latent_matrices(args: ModelArgs, tp: int) -> Iterator[tuple[int, int]]:
    heads = args.n_heads * args.head_dim // tp
    if args.q_lora_rank:
        yield args.q_lora_rank, args.dim
    yield heads, args.q_lora_rank or args.dim
    yield args.kv_lora_rank + args.qk_rope_head_dim, args.dim
    yield args.n_heads * (args.qk_nope_head_dim + args.v_head_dim) // tp, args.kv_lora_rank
    yield args.dim, args.n_heads * args.v_head_dim // tp


def _vectors(args: ModelArgs, tp: int) -> list[int]:
    """Norms inside of attention, and biases."""
    sizes = [args.kv_lora_rank] if args.kv_lora_rank else []
    sizes += [args.q_lora_rank] if args.q_lora_rank else []
    sizes += [args.head_dim] * 2 if args.qk_norm and not args.kv_lora_rank else []
    if args.attention_bias and args.kv_lora_rank:
        sizes += [args.kv_lora_rank + args.qk_rope_head_dim, args.dim]
        sizes += [args.q_lora_rank] if args.q_lora_rank else []
    elif args.attention_bias:
        sizes += [rows for rows, _ in _matrices(args, tp)]
    return sizes
