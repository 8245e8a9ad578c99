"""How many micro-batches' activations each rank holds at once, read off the order of its row.

One (stage, micro-batch) holds memory from its forward on. A whole backward frees all of it. A split backward
frees it in two steps: after I only what the weight gradients need is left (each linear layer's input and
output gradient), after W nothing. A whole backward or I still holds everything while it runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from titan5d.schedules.table import Schedule


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Per rank: the most (stage, micro-batch) pairs at once between their forward and the end of their last
    backward action (B, or W)."""
    ones = (1,) * schedule.n_stages
    return tuple(int(peak) for peak in peak_memory(schedule, activation=ones, kept_for_weights=ones))


def peak_microbatches(schedule: Schedule) -> tuple[float, ...]:
    """`peak_activations` in micro-batches through all of a rank's stages: a pair held in one of its v stages
    counts 1/v. This is what compares between schedules with different numbers of chunks (if stages cost the
    same)."""
    return tuple(
        peak / max(1, len(schedule.stages_of_rank(rank)))
        for rank, peak in enumerate(peak_activations(schedule))
    )


def peak_before_input_grad(schedule: Schedule) -> tuple[int, ...]:
    """Per rank: the most pairs at once between their forward and the end of their B or I."""
    ones, zeros = (1,) * schedule.n_stages, (0,) * schedule.n_stages
    return tuple(int(peak) for peak in peak_memory(schedule, activation=ones, kept_for_weights=zeros))


def peak_kept_weight_grads(schedule: Schedule) -> tuple[int, ...]:
    """Per rank: the most weight gradients W that are put off at once."""
    peaks = []
    for rank in range(schedule.n_ranks):
        kept = peak = 0
        for action in schedule.actions(rank):
            kept += {"I": 1, "W": -1}.get(action.kind, 0)
            peak = max(peak, kept)
        peaks.append(peak)
    return tuple(peaks)


def peak_memory(
    schedule: Schedule, activation: Sequence[float], kept_for_weights: Sequence[float]
) -> tuple[float, ...]:
    """The peak per rank, in the unit of the arguments (bytes, say).

    activation[s]: what one micro-batch holds in stage s from its forward to the end of B or I.
    kept_for_weights[s]: what is left of it between I and the end of W.
    """
    for name, sizes in (("activation", activation), ("kept_for_weights", kept_for_weights)):
        if len(sizes) != schedule.n_stages:
            raise ValueError(
                f"{name} has {len(sizes)} sizes, but the schedule has {schedule.n_stages} stages"
            )
    if schedule.forward_only:
        return (0.0,) * schedule.n_ranks  # nothing is kept for a backward that never comes
    peaks = []
    for rank in range(schedule.n_ranks):
        held = peak = 0.0
        for stage, kind, _ in schedule.actions(rank):
            if kind == "F":
                held += activation[stage]
            elif kind == "B":
                held -= activation[stage]
            elif kind == "I":
                held += kept_for_weights[stage] - activation[stage]
            else:
                held -= kept_for_weights[stage]
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)
