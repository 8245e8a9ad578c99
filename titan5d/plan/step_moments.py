"""The moments of a step at which a rank may be fullest, and what comes and goes at each of them, in bytes.

    head, forward     everything is kept; logits of a chunk, and the gradient of the head made from them
    head, backward    that gradient three times: as it was kept, scaled in fp32, and in the compute type again
    block, backward   one block's activations are there again, and their gradients; what came before it is reduced
    last reduction    nothing is kept any more; a unit's gradient is on its way
    update            gradients alone

What is reduced in each micro-batch (FSDP2) leaves the input of the last reduction, the first unit's, until the next one
starts; so from the second micro-batch on it is there in forward, too. What ranks sum whole (ZeRO 0 and 1 over several
micro-batches, pipelines) is reduced once, in the last micro-batch, when the others' activations are gone.
"""

from __future__ import annotations

from titan5d.plan.activations import backward_gradients, context_buffers, rope_tables, working_set
from titan5d.plan.case import Case
from titan5d.plan.memory import REDUCE_BYTES, StateBytes, head_activation_bytes
from titan5d.plan.parts import RankParts, block_elements

Lines = dict[str, float]


def step_moments(
    case: Case,
    layers: list[int],
    parts: RankParts,
    state: StateBytes,
    kept: float,
    head: bool,
    imbalance: float,
) -> dict[str, Lines]:
    """Lines of each moment, by its name. Those a moment does not name are 0.

    Args:
        layers: of this rank; parts, state: its parameters. kept: of all micro-batches in flight.
        head: whether the rank has the output matrix. imbalance: of the rows of experts.
    """
    gradients = state.gradients
    if case.offload and not case.whole_gradients:
        gradients = 0.0  # sharded ones live in the host's memory
    buffers = parts.units[0] * REDUCE_BYTES if _reduced_each_time(case, state) else 0.0
    moments: dict[str, Lines] = {}
    if head:
        moments |= _head(case, layers, parts, state, kept, gradients if _several(case) else 0.0, buffers)
    for done in sorted({0, 1, len(layers) - 2, len(layers) - 1} & set(range(len(layers)))):
        found = _block(case, layers, parts, state, kept, gradients, imbalance, done)
        name = f"backward of block {layers[-1 - done]}"
        moments[name if case.topology.pp == 1 else "backward"] = found
        if _several(case):
            break  # nothing grows from block to block: at the first one most is kept
    # whole gradients are in the reduce type already
    reduced = parts.largest * REDUCE_BYTES if case.whole_gradients else state.buffers
    moments["last reduction"] = {
        "gradients": gradients,
        "gather and reduce buffers": reduced if state.buffers else 0.0,
    }
    moments["update"] = {"gradients": gradients}
    return moments


def _several(case: Case) -> bool:
    return case.microbatches > 1 or case.topology.pp > 1


def _reduced_each_time(case: Case, state: StateBytes) -> bool:
    return bool(state.buffers) and case.microbatches > 1 and not case.whole_gradients


def _head(
    case: Case,
    layers: list[int],
    parts: RankParts,
    state: StateBytes,
    kept: float,
    gradients: float,
    buffers: float,
) -> dict[str, Lines]:
    """Forward and backward of the output matrix."""
    unit = parts.units[-1] * case.element if state.gathered else 0.0
    block = _whole_block(case, layers)
    in_forward = in_backward = state.gathered
    if case.zero_stage == 3 and state.gathered:
        # the unit and the buffer it arrived in; in backward the last block has been fetched already
        in_forward = unit if case.shards == 1 else 2 * unit
        in_backward = unit if case.shards == 1 else unit + block * case.element
    elif not _several(case):
        in_forward += unit
    # of the final norm the input, and in forward the output; in a pipeline these are the buffers of what is sent
    hidden = case.stream_tokens * case.args.dim * case.element if case.topology.pp == 1 else 0.0
    tables = rope_tables(case)
    sizes = case.args, int(case.tokens), case.element, case.loss_chunk, case.topology.tp
    return {
        "loss": {
            "gradients": gradients,
            "gather and reduce buffers": buffers,
            "gathered weights": in_forward,
            "activations": kept + 2 * hidden + tables,
            "logits and loss": head_activation_bytes(*sizes),
        },
        "backward of the loss": {
            "gradients": gradients,
            "gather and reduce buffers": buffers,
            "gathered weights": in_backward,
            "activations": kept + hidden + tables,
            "logits and loss": head_activation_bytes(*sizes, backward=True),
        },
    }


def _block(
    case: Case,
    layers: list[int],
    parts: RankParts,
    state: StateBytes,
    kept: float,
    gradients: float,
    imbalance: float,
    done: int,
) -> Lines:
    """Backward of a block, when `done` others of this rank have been through it."""
    routed = case.args.has_experts(layers[-1 - done])
    n_layers, block = len(layers), _whole_block(case, layers)
    head = parts.units[-1] if len(parts.units) > n_layers else 0.0
    unit = block if done else head or block
    all_elements = parts.shared + sum(parts.experts)
    behind = (head + done * block) / all_elements  # share of the parameters whose gradients are made
    gathered, buffers, share = state.gathered, 0.0, 1.0
    if case.zero_stage == 3 and state.gathered:  # this block, and the next one, fetched ahead
        gathered = block * case.element * (1 if case.shards == 1 else min(2, n_layers - done))
    elif not _several(case):
        gathered *= 1 - min(1.0, behind)
    if state.buffers and not case.whole_gradients:
        # of the unit before, which is being reduced; experts that are cut come before their block's other weights
        buffers = (max(parts.units[-1 - done :]) if done and case.experts_apart else unit) * REDUCE_BYTES
        if _reduced_each_time(case, state):
            buffers = max(buffers, parts.units[0] * REDUCE_BYTES)
    if not _several(case):
        gradients = min(gradients, _gradients_behind(case, layers, head, done))
        share = (n_layers - done) / n_layers
    return {
        "gradients": gradients + _fresh_gradients(case, routed),
        "gather and reduce buffers": buffers,
        "gathered weights": gathered,
        "activations": kept * share + rope_tables(case),
        "recomputed block": working_set(case, routed, imbalance),
        # attention and feed-forward are not in backward at the same time
        "block gradients": max(backward_gradients(case, routed, imbalance) - context_buffers(case), 0.0),
        "expert buffers": _expert_buffers(case) if routed else 0.0,
        "context buffers": context_buffers(case),
    }


def _gradients_behind(case: Case, layers: list[int], head: float, done: int) -> float:
    """Reduced gradients of the head and the last `done` blocks, with one micro-batch."""
    shards, expert_shards = (1, 1) if case.zero_stage == 0 else (case.shards, case.topology.efsdp)
    total = head / shards
    for layer in layers[len(layers) - done :]:
        block, routed, _ = block_elements(case, case.args.has_experts(layer))
        total += block / shards + routed / (expert_shards if case.experts_apart else shards)
    return total * case.stored


def _fresh_gradients(case: Case, routed: bool) -> float:
    """Weight gradients in the compute type that are neither reduced nor added up yet.

    While gate's and up's gradients exist, that of the last product of the feed-forward is made: one matrix; of experts
    that is two of three, since gate's follows at once. Where experts are cut their weights are few, the rows many:
    there it is fullest when the rows' gradients have arrived, before any is made.
    """
    args, tp = case.args, case.topology.tp
    if not routed:
        return args.dim * args.ffn_dim / tp * case.element
    if case.experts_apart:
        return 0.0
    return 2 * args.n_experts * args.dim * args.moe_ffn_dim * case.element


def _whole_block(case: Case, layers: list[int]) -> float:
    """Elements of the largest block, with its experts."""
    kinds = {case.args.has_experts(layer) for layer in layers}
    return max((sum(block_elements(case, routed)[:2]) for routed in kinds), default=0.0)


def _expert_buffers(case: Case) -> float:
    """Rows' gradients on their way: of what the experts gave back, and of what they were given."""
    return 2 * case.args.top_k * case.tokens / case.topology.tp * case.args.dim * case.element


def pipeline_buffers(case: Case) -> float:
    """A hidden state and a gradient that are being sent or received."""
    return 2 * case.stream_tokens * case.args.dim * case.element if case.topology.pp > 1 else 0.0
