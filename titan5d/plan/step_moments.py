"""The moments of a step at which a rank may be fullest, and what comes and goes at each of them, in bytes.

    head, forward     everything is kept; logits of a chunk, and the gradient of the head made from them
    head, backward    that gradient three times: as it was kept, scaled in fp32, and in the compute type again
    forward           in a pipeline, where weight gradients may wait (table_moments.py)
    block, backward   one block's activations are there again, and their gradients; what came before it is reduced
    ... experts       or, before, its cut experts arrive and are copied to their places
    last reduction    nothing is kept any more; a unit's gradient is on its way
    update            gradients alone

What is reduced in each micro-batch (FSDP2) leaves the input of the last reduction, the first unit's, until the next one
starts; so from the second micro-batch on it is there in forward, too. What ranks sum whole (ZeRO 0 and 1 over several
micro-batches, pipelines) is reduced once, in the last micro-batch, when the others' activations are gone.
"""

from __future__ import annotations

from dataclasses import dataclass

from titan5d.plan.activations import (
    backward_gradients,
    context_buffers,
    made_by_experts,
    rope_tables,
    row_bytes,
    working_set,
)
from titan5d.plan.case import Case
from titan5d.plan.memory import REDUCE_BYTES, StateBytes, head_activation_bytes
from titan5d.plan.parts import RankParts, block_elements
from titan5d.plan.table_moments import FullestActions, Held

Lines = dict[str, float]


def step_moments(
    case: Case,
    layers: list[int],
    parts: RankParts,
    state: StateBytes,
    kept: FullestActions,
    imbalance: float,
) -> dict[str, Lines]:
    """Lines of each moment, by its name. Those a moment does not name are 0.

    Args:
        layers: of this rank; parts, state: its parameters. kept: of all micro-batches in flight.
        imbalance: of the rows of experts.
    """
    gradients = state.gradients
    if case.offload and not case.whole_gradients:
        gradients = 0.0  # sharded ones live in the host's memory
    buffers = parts.units[0] * REDUCE_BYTES if _reduced_each_time(case, state) else 0.0
    moments: dict[str, Lines] = {}
    several, splits = _several(case), kept.input is not None
    if kept.head is not None:
        so_far = kept.head.gradients if case.topology.pp > 1 else gradients if several else 0.0
        moments |= _head(case, layers, parts, state, kept.head.activations, so_far, buffers)
    if kept.forward is not None:
        moments["forward"] = {
            "gradients": kept.forward.gradients,
            "gathered weights": state.gathered if case.zero_stage < 3 else 0.0,
            "activations": kept.forward.activations + rope_tables(case),
        }
    for held, makes_weights in ((kept.whole, True), (kept.input, False)):
        if held is None:
            continue
        for done in sorted({0, 1, len(layers) - 2, len(layers) - 1} & set(range(len(layers)))):
            block = _Backward(
                case, layers, parts, state, held, gradients, imbalance, done, makes_weights, splits
            )
            name = f"backward of block {layers[-1 - done]}" if case.topology.pp == 1 else "backward"
            moments[name if makes_weights else "backward to the input"] = block.fullest()
            if block.experts_apart and case.zero_stage == 3:
                moments[f"{name}, its experts gathered"] = block.gathering_experts()
            if block.experts_apart and state.buffers and not case.whole_gradients:
                moments[f"{name}, its experts reduced"] = block.reducing_experts()
            if several:
                break  # nothing grows from block to block: at the first one most is kept
    if case.working_copy:
        reduced = _last_reduction(case, parts, state)
    else:
        reduced = _side_by_side(case, layers, parts)
    moments["last reduction"] = {
        "gradients": gradients,
        "gather and reduce buffers": reduced if state.buffers else 0.0,
    }
    moments["update"] = {"gradients": gradients}
    return moments


def _last_reduction(case: Case, parts: RankParts, state: StateBytes) -> float:
    """FSDP2's buffer for the last unit it reduces."""
    # whole gradients are in the reduce type already
    reduced = parts.largest * REDUCE_BYTES if case.whole_gradients else state.buffers
    if case.shards == 1 and not case.whole_gradients:  # a sum over one rank is as large as what goes in
        reduced += parts.largest * (REDUCE_BYTES - case.element)
    return reduced


def _side_by_side(case: Case, layers: list[int], parts: RankParts) -> float:
    """By how much gradients exceed their sum when a unit's are laid side by side, so that they are there twice
    (replicas.py). The embedding's alone need not be moved. In the only micro-batch of a step the gradients of the units
    before are not made yet."""
    alone = 0 in layers and not case.args.tie_embeddings
    moved = parts.units[alone:]
    if _several(case):
        return max((*moved, *parts.experts), default=0.0) * case.stored
    before, most = parts.units[0] if alone else 0.0, 0.0
    for unit in moved:
        most = max(most, unit - before)
        before += unit
    return most * case.stored


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
    block = sum(_gathered_units(case, layers))
    in_forward = in_backward = state.gathered
    if case.zero_stage == 3 and state.gathered:
        # the unit and the buffer it arrived in; in backward the last block has been fetched already
        in_forward = unit if case.shards == 1 else 2 * unit
        in_backward = unit if case.shards == 1 else unit + block * case.element
        if case.rounds_experts:
            kept_rounded = sum(parts.experts) if case.recompute.mode == "none" else 0.0
            in_forward += kept_rounded * case.element
            in_backward += (kept_rounded - max(parts.experts, default=0.0)) * case.element
    elif not _several(case):
        in_forward += unit
    # of the final norm the input, and in forward the output; in a pipeline these are the buffers of what is sent
    hidden = case.stream_tokens * case.args.dim * case.element if case.topology.pp == 1 else 0.0
    tables = rope_tables(case)
    rounded = parts.units[-1] * case.element if case.rounds_layers else 0.0
    sizes = case.args, int(case.tokens), case.element, case.loss_chunk, case.topology.tp
    return {
        "loss": {
            "gradients": gradients,
            "gather and reduce buffers": buffers,
            "gathered weights": in_forward,
            "activations": kept + 2 * hidden + tables,
            "logits and loss": head_activation_bytes(*sizes) + rounded,
        },
        "backward of the loss": {
            "gradients": gradients,
            "gather and reduce buffers": buffers,
            "gathered weights": in_backward,
            "activations": kept + hidden + tables,
            "logits and loss": head_activation_bytes(*sizes, backward=True),
        },
    }


@dataclass(frozen=True)
class _Backward:
    """Backward of a block, when `done` others of this rank have been through it.

    Attributes:
        held: by this rank at that time. gradients: that are kept.
        makes_weights: whether it makes weight gradients, or leaves them to W. splits: whether some backwards do.
    """

    case: Case
    layers: list[int]
    parts: RankParts
    state: StateBytes
    held: Held
    gradients: float
    imbalance: float
    done: int
    makes_weights: bool
    splits: bool

    @property
    def routed(self) -> bool:
        return self.case.args.has_experts(self.layers[-1 - self.done])

    @property
    def experts_apart(self) -> bool:
        return self.routed and self.case.experts_apart

    def fullest(self) -> Lines:
        """When most gradients of what the block made are there."""
        case, routed = self.case, self.routed
        if routed:
            fresh, inside, buffers = _experts_backward(case, self.imbalance)
        else:
            fresh = _fresh_gradient(case) if self.makes_weights else 0.0
            inside, buffers = backward_gradients(case), 0.0
            if _several(case) and not case.working_copy:
                fresh = 0.0  # added to what is there at once
            if self.splits:  # the store adds it up itself; to autograd it is no gradient
                fresh, inside = 0.0, inside + fresh
        return {
            "gradients": self._gradients() + fresh,
            "gather and reduce buffers": self._reduced(),
            "gathered weights": self._gathered(),
            "activations": self._kept(),
            "recomputed block": working_set(case, routed, self.imbalance) + self._rounded_again(),
            # attention and feed-forward are not in backward at the same time
            "block gradients": max(inside - context_buffers(case), 0.0),
            "expert buffers": buffers,
            "context buffers": context_buffers(case),
        }

    def gathering_experts(self) -> Lines:
        """ZeRO-3, when the block's cut experts have arrived and are copied to their places: what arrived, the places,
        the next block's, which arrive already, and if they are sliced inside of each expert a copy between."""
        case = self.case
        experts = self._experts * case.element if case.topology.efsdp > 1 else 0.0
        again = working_set(case, True, self.imbalance) - made_by_experts(case, self.imbalance)
        return {
            "gradients": self._gradients(),
            "gather and reduce buffers": self._reduced(),
            "gathered weights": self._gathered() + experts * (2 if _experts_sliced_inside(case) else 1),
            "activations": self._kept(),
            "recomputed block": max(again, 0.0),
            "expert buffers": _expert_buffers(case)
            / 2,  # rows arrived, and the copy that was sent is still there
        }

    def reducing_experts(self) -> Lines:
        """When the gradients of the block's cut experts are copied to where they are reduced. Of the rows nothing is
        left but a gradient on its way."""
        case = self.case
        makes = self._experts * case.element
        rows = _expert_buffers(case) / 2
        used = (
            case.tokens
            / case.topology.tp
            * self.imbalance
            * row_bytes(case.expert_args, case.element, "none")
        )
        freed = makes if case.zero_stage == 3 else 0.0
        return {
            "gradients": self._gradients() + makes,
            "gather and reduce buffers": self._experts * REDUCE_BYTES,
            "gathered weights": max(self._gathered() - freed, 0.0),
            "activations": self._kept() + min(0.0, working_set(case, True, self.imbalance) - used),
            "recomputed block": max(working_set(case, True, self.imbalance) - used, 0.0),
            "expert buffers": rows,
        }

    def _rounded_again(self) -> float:
        """Weights of the block in the compute type, where each layer rounds its own and is recomputed."""
        case = self.case
        if not case.rounds_layers or case.recompute.mode == "none" or not case.recompute.share:
            return 0.0
        return sum(block_elements(case, self.routed)[:2]) * case.element

    @property
    def _experts(self) -> float:
        """Elements of a block's unit of experts."""
        return max(self.parts.experts)

    def _gradients(self) -> float:
        if self.case.topology.pp > 1:
            return self.held.gradients
        if _several(self.case):
            return self.gradients
        return min(self.gradients, _gradients_behind(self.case, self.layers, self._head, self.done))

    def _kept(self) -> float:
        share = 1.0 if _several(self.case) else 1 - self.done / len(self.layers)
        return self.held.activations * share + rope_tables(self.case)

    @property
    def _head(self) -> float:
        """Elements of the output matrix, if it is here."""
        return self.parts.units[-1] if len(self.parts.units) > len(self.layers) else 0.0

    def _gathered(self) -> float:
        case, n_layers = self.case, len(self.layers)
        if case.zero_stage == 3 and self.state.gathered:  # this block, and the next one, fetched ahead
            ahead = min(2, n_layers - self.done)
            units = _gathered_units(case, self.layers)
            shards = case.shards, case.topology.efsdp if case.experts_apart else case.shards
            elements = sum(
                unit * (ahead if ranks > 1 else 1) for unit, ranks in zip(units, shards, strict=True)
            )
            if ahead == 1 and 0 in self.layers and case.shards > 1:
                elements += self.parts.units[0]  # the embedding's
            if case.rounds_experts and case.recompute.mode == "none":  # kept from forward on
                elements += units[1] * (n_layers - self.done - 1)
            return elements * case.element
        if _several(case):
            return self.state.gathered
        all_elements = self.parts.shared + sum(self.parts.experts)
        behind = self._head + self.done * sum(_block_units(case, self.layers))  # their gradients are made
        return self.state.gathered * (1 - min(1.0, behind / all_elements))

    def _reduced(self) -> float:
        """Of the unit before; experts that are cut come before their block's other weights."""
        case, units = self.case, self.parts.units
        if not self.state.buffers or case.whole_gradients or not case.working_copy:
            return 0.0
        unit = sum(_block_units(case, self.layers)) if self.done else self._head
        if self.done and case.experts_apart:
            rounded_once = case.stored != case.element and not case.rounds_experts
            apart = case.topology.efsdp > 1 or rounded_once  # else FSDP2 has no part in the experts
            unit = max(units[-1 - self.done :]) if apart else _block_units(case, self.layers)[0]
        buffers = (unit or sum(_block_units(case, self.layers))) * REDUCE_BYTES
        return max(buffers, units[0] * REDUCE_BYTES) if _reduced_each_time(case, self.state) else buffers


def _gradients_behind(case: Case, layers: list[int], head: float, done: int) -> float:
    """Reduced gradients of the head and the last `done` blocks, with one micro-batch."""
    shards, expert_shards = (1, 1) if case.zero_stage == 0 else (case.shards, case.topology.efsdp)
    total = head / shards
    for layer in layers[len(layers) - done :]:
        block, routed, _ = block_elements(case, case.args.has_experts(layer))
        total += block / shards + routed / (expert_shards if case.experts_apart else shards)
    return total * case.stored


def _fresh_gradient(case: Case) -> float:
    """Weight gradient in the compute type that is neither reduced nor added up yet: of the last product of the
    feed-forward, made while gate's and up's gradients exist."""
    return case.args.dim * case.args.ffn_dim / case.topology.tp * case.element


def _experts_backward(case: Case, imbalance: float) -> tuple[float, float, float]:
    """(weight gradients, gradients inside the experts, rows on their way) on top of what is kept, at the fullest of

    arrival    the rows' gradients as they came, and sorted
    middle     gate's and up's gradients, when the product's is no longer needed, and w2's weight gradient
    return     before all these, recomputed: of sliced experts the rows given back, unsorted, and as summands arrived
    end        all weight gradients; of the rows gate's gradient, and two of their inputs'

    What the experts gave back is gone by then; at the end gate, up and their product are, too.
    """
    args = case.args
    wide = imbalance * args.top_k * case.tokens / case.topology.tp * args.moe_ffn_dim * case.element
    rows = imbalance * _expert_buffers(case) / 2
    gone = 0.0 if args.balance.score_before_w2 else rows / case.topology.etp  # slices came back as one sum
    matrices = block_elements(case, True)[1] * case.element  # w1, w2 and w3
    arrival = (0.0, 0.0, rows * (2 if case.topology.expert_ranks > 1 else 1) - gone)
    middle = (0.0, 2 * wide + matrices / 3 - gone, 0.0)
    end = (2 / 3 * matrices, matrices / 3 + 2 * rows - 2 * wide - gone, 0.0)
    returning = (0.0, 0.0, 0.0)
    if case.topology.etp > 1 and case.recompute.mode != "none":
        returning = (0.0, 0.0, rows * (3 if args.n_experts > case.topology.ep else 2))
    return max(arrival, returning, middle, end, key=sum)


def _block_units(case: Case, layers: list[int]) -> tuple[float, float]:
    """Elements of the largest block: (without, in its experts)."""
    kinds = {case.args.has_experts(layer) for layer in layers}
    return max((block_elements(case, routed)[:2] for routed in kinds), key=sum, default=(0.0, 0.0))


def _gathered_units(case: Case, layers: list[int]) -> tuple[float, float]:
    """Of `_block_units` what is computed with in a copy: experts that are whole on a rank, and in the type computed
    with, are none."""
    block, experts = _block_units(case, layers)
    whole = case.experts_apart and case.topology.efsdp == 1 and case.stored == case.element
    return block, 0.0 if whole and not case.offload else experts


def _experts_sliced_inside(case: Case) -> bool:
    """Whether the experts of a rank do not divide over its shards, so that each is sliced (parallel/data.py)."""
    topology = case.topology
    return topology.efsdp > 1 and case.args.n_experts // topology.ep % topology.efsdp > 0


def _expert_buffers(case: Case) -> float:
    """Rows' gradients on their way: of what the experts gave back, and of what they were given."""
    rows = case.topology.etp * case.args.top_k * case.tokens / case.topology.tp
    return 2 * rows * case.args.dim * case.element


def pipeline_buffers(case: Case) -> float:
    """A hidden state and a gradient that are being sent or received."""
    return 2 * case.stream_tokens * case.args.dim * case.element if case.topology.pp > 1 else 0.0
