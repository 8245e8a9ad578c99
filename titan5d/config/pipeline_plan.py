"""What the pipeline keys of a run come to: the table that is executed and the parts of the model in each stage."""

from __future__ import annotations

from dataclasses import dataclass

from titan5d.config.schema import Config
from titan5d.schedules import catalog, csv, stages
from titan5d.schedules.simulate import StageTimes, simulate
from titan5d.schedules.stages import Stages
from titan5d.schedules.table import Overlap, Schedule, ScheduleError


@dataclass(frozen=True)
class PipelinePlan:
    """How the stack of layers is cut and in which order its stages work.

    Attributes:
        schedule: the table of one optimizer step.
        stages: names of the modules of each stage, in the order of the model.
        microbatch_size: rows of a pipeline micro-batch.
        overlaps_experts: whether the all-to-all of one micro-batch of an Overlap flies while the other computes.
    """

    schedule: Schedule
    stages: Stages
    microbatch_size: int
    overlaps_experts: bool = False

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are put off (W actions)."""
        ranks = range(self.schedule.n_ranks)
        return any(action.kind == "W" for rank in ranks for action in self.schedule.actions(rank))

    @property
    def has_overlaps(self) -> bool:
        """Whether any slot holds a forward and a backward."""
        return any(isinstance(slot, Overlap) for row in self.schedule.rows for slot in row)

    def __str__(self) -> str:
        even = StageTimes.even(self.schedule, f=1.0, b=1.0, w=1.0)
        bubble = simulate(self.schedule, even).bubble_fraction
        return (
            f"pipeline {self.schedule.name}: {self.schedule.microbatches} micro-batches of {self.microbatch_size} rows"
            f" a step, stages {stages.format_layout(self.stages)} on ranks"
            f" {' '.join(map(str, self.schedule.rank_of_stage))}; bubble {bubble:.1%} if all stages cost the same"
        )


def pipeline_plan(config: Config, n_layers: int, ranks: int, rows: int) -> PipelinePlan:
    """The plan of `ranks` pipeline ranks, on each of which an optimizer step has `rows` rows.

    Raises ScheduleError with everything that does not fit.
    """
    par = config.parallelism
    found: list[str] = []
    size, local = par.pipeline_parallel_microbatch_size, config.training.local_batch_size
    if size < 1 or local % size:
        divisors = ", ".join(str(n) for n in range(1, local + 1) if local % n == 0)
        raise ScheduleError(
            [
                f"parallelism.pipeline_parallel_microbatch_size = {size} does not divide training.local_batch_size ="
                f" {local}; use one of {divisors}"
            ]
        )
    microbatches = rows // size
    table: Schedule | None = None
    if par.pipeline_parallel_schedule_csv:
        table = _read_table(config, ranks, microbatches, found)
    elif par.pipeline_parallel_schedule not in catalog.NAMES:
        name = par.pipeline_parallel_schedule
        found.append(
            f"parallelism.pipeline_parallel_schedule = {name!r} is not known; there are {', '.join(catalog.NAMES)}"
        )
    if found:
        raise ScheduleError(found)
    cut = _stages(config, n_layers, ranks, table, found)
    if found:
        raise ScheduleError(found)
    if table is None:
        name, chunks = par.pipeline_parallel_schedule, len(cut) // ranks
        try:
            table = catalog.build(name, ranks, chunks, microbatches)
        except ScheduleError as error:
            where = f"parallelism.pipeline_parallel_schedule with {len(cut)} stages on {ranks} ranks"
            raise ScheduleError([f"{where}: {problem}" for problem in error.problems]) from None
    return PipelinePlan(table, cut, size, par.pipeline_parallel_expert_parallel_overlap)


def _read_table(config: Config, ranks: int, microbatches: int, found: list[str]) -> Schedule | None:
    """The table of the CSV file; adds to `found` why there is none."""
    key, path = "parallelism.pipeline_parallel_schedule_csv", config.parallelism.pipeline_parallel_schedule_csv
    try:
        table = csv.read_csv(path or "")
    except OSError as error:
        found.append(f"{key} = {path!r} cannot be read: {error.strerror}")
        return None
    except ScheduleError as error:
        found += [f"{key}: {problem}" for problem in error.problems]
        return None
    if table.n_ranks != ranks:
        found.append(
            f"{key} = {path!r} is a table for {table.n_ranks} ranks, but pipeline_parallel_degree = {ranks}; use"
            f" degree {table.n_ranks} or a table with {ranks} lines"
        )
    if table.microbatches != microbatches:
        size = config.parallelism.pipeline_parallel_microbatch_size
        found.append(
            f"{key} = {path!r} is a table for {table.microbatches} micro-batches, but a step of this run has"
            f" {microbatches} on each pipeline ({microbatches * size} rows / pipeline_parallel_microbatch_size"
            f" {size}); a global batch of {table.microbatches * size} rows for each data-parallel rank would fit"
        )
    return table


def _stages(config: Config, n_layers: int, ranks: int, table: Schedule | None, found: list[str]) -> Stages:
    """The cut that the keys ask for; adds to `found` what is wrong with it."""
    par = config.parallelism
    key = "parallelism.pipeline_parallel_layout"
    name = par.pipeline_parallel_schedule
    if par.pipeline_parallel_layout and par.module_fqns_per_model_part:
        found.append(f"{key} and module_fqns_per_model_part both say what the stages hold; keep one of them")
        return ()
    first, last = (
        par.pipeline_parallel_first_stage_less_layers,
        par.pipeline_parallel_last_stage_less_layers,
    )
    if min(first, last) < 0:
        found.append(
            f"parallelism.pipeline_parallel_first_stage_less_layers = {first} and"
            f" pipeline_parallel_last_stage_less_layers = {last} are weights in layers, so 0 or more"
        )
        return ()
    if par.pipeline_parallel_layout:
        try:
            cut = stages.parse_layout(par.pipeline_parallel_layout)
        except ValueError as error:
            found.append(f"{key} = {par.pipeline_parallel_layout!r}: {error}")
            return ()
    elif par.module_fqns_per_model_part:
        key = "parallelism.module_fqns_per_model_part"
        cut = stages.from_names(par.module_fqns_per_model_part, n_layers)
    else:
        key = "parallelism.pipeline_parallel_degree"
        size = par.pipeline_parallel_layers_per_stage
        if size is not None:
            key = f"parallelism.pipeline_parallel_layers_per_stage = {size}"
            if size < 1:
                found.append(f"{key} is a count, so 1 or more")
                return ()
            n_stages = stages.stages_of_size(n_layers, size, first, last)
        elif table is not None:
            n_stages = table.n_stages
        else:
            n_stages = ranks * catalog.default_chunks(name)
        cut = stages.split_by_weight(n_layers, n_stages, first, last)
    wrong = stages.problems(cut, n_layers)
    if wrong and not (par.pipeline_parallel_layout or par.module_fqns_per_model_part):
        least = ranks * catalog.default_chunks(name) if table is None else table.n_stages
        wrong = [
            f"model.n_layers = {n_layers} is too few for {len(cut)} stages on pipeline_parallel_degree = {ranks} ranks"
            f" ({name}; the embedding counts as {first} layers, the head as {last}): {'; '.join(wrong)}. Use at least"
            f" {max(1, least - 2)} layers, fewer ranks, or smaller weights"
        ]
    found += [f"{key}: {problem}" for problem in wrong]
    wanted = table.n_stages if table is not None else None
    if wanted is not None and len(cut) != wanted:
        found.append(f"{key}: makes {len(cut)} stages, but the table has {wanted}")
    elif len(cut) % ranks:
        found.append(
            f"{key}: makes {len(cut)} stages, which do not divide over pipeline_parallel_degree = {ranks} ranks; use"
            f" {ranks * max(1, len(cut) // ranks)} or {ranks * (len(cut) // ranks + 1)} stages"
        )
    return cut
