"""FSDP2 in the stages of a pipeline: when it frees, and that it reduces once a step.

A stage sees its micro-batches' forwards and backwards in turn. Its gradients stay whole on the rank until its last
backward of the step: one reduce-scatter per unit and step at every ZeRO stage, as in ZeRO-1. A reduce-scatter per
micro-batch (ZeRO-2) would move as many times more, to free gradients that are 1/p of the model already.

    zero_stage 0, 1, 2   parameters are gathered once a step and kept
    zero_stage 3         gathered for each forward and each backward of each micro-batch, and freed
"""

from __future__ import annotations

from typing import Any

from torch.distributed._composable.replicate_with_fsdp import ReplicateModule, replicate
from torch.distributed.fsdp import FSDPModule, fully_shard

from titan5d.models.decoder import Decoder


def before_backward(stage: Decoder, zero_stage: int, last: bool) -> None:
    """Says what the coming backward may free and must reduce. last: the stage's last of the step."""
    stage.gradient_sum.begin_backward(last)
    if not isinstance(stage, FSDPModule):
        return
    stage.set_is_last_backward(last)
    stage.set_reshard_after_backward(last or zero_stage == 3)
    stage.set_requires_gradient_sync(last)


def reduce_gradients(stage: Decoder) -> None:
    """What FSDP2 does in a last backward, when the last gradients were made outside of one (W). Copies of whole
    parameters are summed at the end of the pass.

    FSDP2 has no call for this; the steps are those its own backward hooks take.
    """
    if not isinstance(stage, FSDPModule):
        return
    before_backward(stage, zero_stage=0, last=True)
    wrapper: Any = replicate if isinstance(stage, ReplicateModule) else fully_shard
    root = wrapper.state(stage)
    for state in root._state_ctx.all_states:
        for group in _groups(state):
            group.post_backward()
    root._root_post_backward_final_callback()


def _groups(state: object) -> list[Any]:
    """The parameter groups of a wrapped module; before torch 2.12 there is at most one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    group = getattr(state, "_fsdp_param_group", None)
    return [] if group is None else [group]
