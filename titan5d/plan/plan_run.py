"""A config on a machine -> a prediction, or all reasons why the run would be refused."""

from __future__ import annotations

from dataclasses import replace

from titan5d.config.check import (
    Layout,
    check,
    device_problems,
    leaves_zero_stage_open,
    pipeline_notes,
)
from titan5d.config.check_placement import layout_notes
from titan5d.config.load import ConfigError
from titan5d.config.schema import Config
from titan5d.models.args import ModelArgs
from titan5d.models.families import model_args
from titan5d.plan.case import case_of
from titan5d.plan.predict import SAFE, Machine, Prediction, predict
from titan5d.plan.rank_memory import fullest, pipeline_memory


def plan_run(config: Config, machine: Machine) -> tuple[Prediction, list[str]]:
    """(prediction, notes as a run would log them). Raises ConfigError with what training would refuse."""
    args = model_args(config.model, config.moe, config.debug.moe_force_load_balance)
    layout = check(config, args, machine.gpus)
    per_node = machine.network.per_node
    problems = device_problems(config, layout.topology, "cuda", per_node) + type_problems(config, machine)
    if problems:
        raise ConfigError(problems)
    layout, notes = settle_zero_stage(config, args, layout, machine)
    notes += layout_notes(layout.topology, per_node) + pipeline_notes(layout)
    return predict(case_of(config, args, layout), machine), notes


def type_problems(config: Config, machine: Machine) -> list[str]:
    """The compute type must be one that the device has units for."""
    device = machine.device
    if config.training.mixed_precision_param == "bfloat16" and device.bf16_flops is None:
        return [
            f"training.mixed_precision_param = 'bfloat16', but {device.name} has no units for bfloat16; use 'float32',"
            " or another GPU"
        ]
    return []


def settle_zero_stage(
    config: Config, args: ModelArgs, layout: Layout, machine: Machine
) -> tuple[Layout, list[str]]:
    """The layout with the ZeRO stage that a run would choose where the config leaves it open, and a line on it."""
    if not leaves_zero_stage_open(config, layout.topology):
        return layout, []
    limit = SAFE * machine.device.memory
    for stage in (1, 2, 3):
        chosen = replace(layout, zero_stage=stage)
        ranks = pipeline_memory(case_of(config, args, chosen), machine.assumptions)
        if stage == 3 or fullest(ranks).total <= limit:
            break
    return chosen, [
        f"parallelism.zero_stage is left open: planned with {stage}, the least of 1, 2, 3 that fits in {SAFE:.0%} of a"
        " GPU, or the most; a run decides anew by the memory it finds"
    ]
