"""Searches all layouts for the fastest that fits.

    degrees -> schedule, rows of a micro-batch -> recompute, ZeRO stage -> memory -> a floor of the step time
                                                                               -> the table played, best floors first

The floor is the step with the least bubble that any table could have. A layout whose floor is above what `top` others
were predicted to take cannot be among them, so its table need not be played: the ranking is that of playing all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf

from titan5d.config.check import Layout
from titan5d.config.load import ConfigError
from titan5d.config.schema import Config
from titan5d.models.args import ModelArgs
from titan5d.models.families import model_args
from titan5d.plan.case import Case, Recompute, case_of
from titan5d.plan.layouts import MODES, ROWS, SCHEDULES, Candidate5, Priors, config_of, degrees
from titan5d.plan.parts import RankParts, rank_parts
from titan5d.plan.plan_run import type_problems
from titan5d.plan.predict import Machine, Prediction, predict
from titan5d.plan.rank_memory import most_memory
from titan5d.plan.step_time import step_time
from titan5d.plan.table_moments import FullestActions, RankStates, StageBytes, fullest_of, table_states
from titan5d.schedules import catalog
from titan5d.schedules import stages as cutting
from titan5d.schedules.memory import peak_microbatches
from titan5d.schedules.stages import Stages
from titan5d.schedules.table import Schedule
from titan5d.topology import Topology


@dataclass(frozen=True)
class Fitting:
    """A layout that fits.

    Attributes:
        case: as planned; its table may be shorter than the run's.
        memory: bytes of its fullest rank. floor: seconds a step with the least bubble.
    """

    layout: Candidate5
    case: Case
    memory: float
    floor: float


@dataclass
class SearchResult:
    """What was found.

    Attributes:
        best: the fastest, with their predictions.
        fitting: everything that fits, by floor.
        rejected: how many were not kept, by reason. tried: how many were planned.
        nearest: of those that do not fit, the one that needs least, and its bytes.
    """

    best: list[tuple[Candidate5, Prediction]] = field(default_factory=list)
    fitting: list[Fitting] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)
    nearest: tuple[Candidate5, float] | None = None
    tried: int = 0


def search(base: Config, machine: Machine, priors: Priors, top: int = 10) -> SearchResult:
    """The `top` fastest layouts of the base's model and batch. Raises ConfigError when the base itself cannot work."""
    args = model_args(base.model, base.moe, base.debug.moe_force_load_balance)
    problems = args.problems() + type_problems(base, machine)
    if base.training.global_batch_size < 1:
        problems.append(
            "training.global_batch_size must be set (--global-batch): a search keeps what is learned"
        )
    if problems:
        raise ConfigError(problems)
    result = SearchResult()
    one_rank = case_of(base, args, Layout(Topology(), 0, base.training.global_batch_size, 1, 0))
    work = _Search(one_rank, base.training.global_batch_size, machine, priors, result)
    for topology in degrees(base, args, machine.gpus, machine.network.per_node, priors, result.rejected):
        work.try_degrees(topology)
    result.fitting.sort(key=lambda one: one.floor)
    result.best = work.ranked(top)
    return result


@dataclass
class _Search:
    """What all layouts have in common, and what was computed already.

    Attributes:
        shape: the base on one rank.
        played: what ranks may hold, and micro-batches in flight, by table.
        held: what they hold at most, by table and bytes of its stages.
    """

    shape: Case
    batch: int
    machine: Machine
    priors: Priors
    result: SearchResult
    played: dict[tuple[object, ...], tuple[tuple[RankStates, ...], tuple[float, ...]]] = field(
        default_factory=dict
    )
    held: dict[tuple[object, ...], tuple[FullestActions, ...]] = field(default_factory=dict)

    def try_degrees(self, topology: Topology) -> None:
        """All schedules and rows. More rows need more memory, so none is tried after one that is too many."""
        each = self.batch // topology.dp
        sizes = [rows for rows in ROWS if each % rows == 0]
        for name, chunks in SCHEDULES if topology.pp > 1 else (("", 1),):
            cut: Stages | None = self.shape.stages
            if name:
                cut = _cut(self.shape.args.n_layers, topology.pp, chunks)
            if cut is None:
                self.result.rejected["too few layers for the stages of a schedule"] += 1
                continue
            parts: list[RankParts] = []
            for rows in sizes:
                m = each // rows
                # A full pipe repeats itself, so a table of a few rounds tells all (step_time)
                table = _table(name, topology.pp, chunks, min(m, 3 * topology.pp)) if name else None
                case = replace(
                    self.shape, topology=topology, rows=rows, microbatches=m, stages=cut, schedule=table
                )
                parts = parts or [rank_parts(case, rank) for rank in range(case.n_ranks)]
                layout = Candidate5(topology, 0, rows, m, "none", name, chunks)
                if not self.keep_fitting(layout, case, parts):
                    self.result.rejected["does not fit"] += len(sizes) - sizes.index(rows) - 1
                    break

    def keep_fitting(self, layout: Candidate5, case: Case, parts: Sequence[RankParts]) -> bool:
        """Keeps, of each recompute mode, the least ZeRO stage that fits (or every one); False when nothing does.

        More recompute can only be faster with a lower stage, so the lowest stage that fits ends it.
        """
        options = (0,) if case.shards == 1 else (1, 3) if case.topology.pp > 1 else (1, 2, 3)
        if case.microbatches == 1 and options == (1, 2, 3):
            options = (2, 3)  # with one micro-batch stage 1 is stage 2
        machine, result, some = self.machine, self.result, False
        limit = self.priors.fill * machine.device.memory
        for mode in MODES:
            for stage in options:
                result.tried += 1
                recompute = Recompute(mode, 0.0 if mode == "none" else 1.0)
                found = replace(case, zero_stage=stage, recompute=recompute, regather_input=mode != "full")
                here = replace(layout, zero_stage=stage, recompute=mode)
                # what needs more than the nearest neither fits nor is nearest, whatever it needs
                too_much = max(limit, result.nearest[1]) if result.nearest else inf
                memory = most_memory(found, machine.assumptions, parts, self.play, too_much)
                if memory > limit:
                    result.rejected["does not fit"] += 1
                    if result.nearest is None or memory < result.nearest[1]:
                        result.nearest = (here, memory)
                    continue
                some = True
                floor = step_time(found, machine.computer, machine.network, play=False).total
                result.fitting.append(Fitting(here, found, memory, floor))
                if stage == options[0]:
                    return True
                if self.priors.least_zero:
                    break
        return some

    def play(
        self, table: Schedule, stages: Sequence[StageBytes]
    ) -> tuple[tuple[FullestActions, ...], tuple[float, ...]]:
        """`rank_memory.play` of a table of the catalog, each of which is played once for all sizes."""
        waits = tuple(stage.waiting > 0 for stage in stages)
        key = (table.name, table.n_ranks, table.most_chunks, table.microbatches, waits)
        if key not in self.played:
            self.played[key] = table_states(table, waits), peak_microbatches(table)
        states, in_flight = self.played[key]
        here = (*key, *stages)
        if here not in self.held:
            self.held[here] = fullest_of(states, stages)
        return self.held[here], in_flight

    def ranked(self, top: int) -> list[tuple[Candidate5, Prediction]]:
        """Plays tables until no floor can be among the best."""
        best: list[tuple[Candidate5, Prediction]] = []
        for candidate in self.result.fitting:
            if len(best) >= top and candidate.floor > best[-1][1].time.total:
                break
            best.append((candidate.layout, predict(candidate.case, self.machine, self.play)))
            best = sorted(best, key=lambda one: one[1].time.total)[:top]
        return best


def final_config(base: Config, layout: Candidate5, args: ModelArgs) -> Config:
    """The config of a layout that was found, with its number of stages said."""
    config = config_of(base, layout)
    if layout.schedule and layout.chunks != catalog.default_chunks(layout.schedule):
        config.parallelism.pipeline_parallel_layers_per_stage = _stage_size(
            args.n_layers, layout.topology.pp * layout.chunks
        )
    return config


def _stage_size(n_layers: int, n_stages: int) -> int:
    """Layers a stage at most, embedding and head counted as one each."""
    return -(-(n_layers + 2) // n_stages)


@lru_cache(maxsize=256)
def _cut(n_layers: int, ranks: int, chunks: int) -> Stages | None:
    """The stages as the runtime cuts them by default; None where it would refuse."""
    n_stages = ranks * chunks
    if cutting.stages_of_size(n_layers, _stage_size(n_layers, n_stages), 1, 1) != n_stages:
        return None
    cut = cutting.split_by_weight(n_layers, n_stages, 1, 1)
    return None if cutting.problems(cut, n_layers) else cut


@lru_cache(maxsize=256)
def _table(name: str, ranks: int, chunks: int, microbatches: int) -> Schedule:
    return catalog.build(name, ranks, chunks, microbatches)
