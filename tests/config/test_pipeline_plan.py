"""What the pipeline keys come to, and every misfit refused with the keys and the numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from titan5d.config.check import Layout, check, pipeline_notes
from titan5d.config.load import ConfigError
from titan5d.config.schema import Config
from titan5d.models.args import ModelArgs
from titan5d.schedules import catalog
from titan5d.schedules.csv import write_csv
from titan5d.schedules.stages import format_layout, layer_counts

ARGS = ModelArgs(
    dim=64, n_layers=7, n_heads=8, n_kv_heads=4, head_dim=8, ffn_dim=128, vocab_size=256, max_seq_len=64
)


def layout(world: int = 4, n_layers: int = 7, dp: int = 1, **keys: object) -> Layout:
    config = Config()
    config.parallelism.pipeline_parallel_degree = world // dp
    config.training.local_batch_size, config.training.seq_len = 4, 32
    for key, value in keys.items():
        section, name = key.split("__")
        assert hasattr(getattr(config, section), name)
        setattr(getattr(config, section), name, value)
    return check(config, replace(ARGS, n_layers=n_layers), world)


def refused(**keys: object) -> str:
    with pytest.raises(ConfigError) as error:
        layout(**keys)  # type: ignore[arg-type]
    return str(error.value)


def test_the_default_is_1f1b_over_all_rows_of_a_step() -> None:
    plan = layout(training__global_batch_size=12).pipeline
    assert plan is not None
    assert (plan.schedule.name, plan.schedule.microbatches, plan.schedule.n_stages) == ("1F1B", 12, 4)
    assert format_layout(plan.stages) == "E,t*2|t*2|t*2|t,N,H"
    assert not plan.splits_backward
    assert layout(world=1).pipeline is None


def test_schedules_with_several_stages_get_two_a_rank() -> None:
    plan = layout(world=2, parallelism__pipeline_parallel_schedule="ZBVZeroBubble").pipeline
    assert plan is not None
    assert plan.schedule.rank_of_stage == (0, 1, 1, 0)
    assert layer_counts(plan.stages) == (2, 2, 2, 1)
    assert plan.splits_backward


def test_layers_per_stage_says_how_many_stages() -> None:
    keys = {"parallelism__pipeline_parallel_schedule": "Interleaved1F1B"}
    plan = layout(world=2, n_layers=10, parallelism__pipeline_parallel_layers_per_stage=2, **keys).pipeline
    assert plan is not None
    assert (plan.schedule.n_stages, layer_counts(plan.stages)) == (6, (1, 2, 2, 2, 2, 1))
    said = refused(world=2, n_layers=10, parallelism__pipeline_parallel_layers_per_stage=4, **keys)
    assert "layers_per_stage = 4: makes 3 stages, which do not divide over pipeline_parallel_degree = 2" in said
    assert "use 2 or 4 stages" in said


def test_stages_written_out() -> None:
    text = "E,t|t*3|t*2|t,N,H"
    plan = layout(parallelism__pipeline_parallel_layout=text).pipeline
    assert plan is not None
    assert format_layout(plan.stages) == text
    names = [["tok_embeddings", "layers.0"], ["layers.3", "layers.1", "layers.2"]]
    names += [["layers.4", "layers.5"], ["layers.6", "norm", "output"]]
    assert layout(parallelism__module_fqns_per_model_part=names).pipeline == plan
    both = {
        "parallelism__pipeline_parallel_layout": text,
        "parallelism__module_fqns_per_model_part": names,
    }
    assert "keep one of them" in refused(**both)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("E,t*2|t*2|t*2|N,H", "no stage holds layers.6"),  # case 020: a misfit is refused
        ("E,t*2|t*2|t*2|t*2,N,H", "layers.7 is not in the model"),
        ("E,t*2|t*2|t*3,N,H", "makes 3 stages, which do not divide over pipeline_parallel_degree = 4"),
        ("E,t*2|t*2|t*2|t*1,N,X", "'X' in stage 3 is no part"),
    ],
)
def test_layouts_that_do_not_fit(text: str, said: str) -> None:
    assert said in refused(parallelism__pipeline_parallel_layout=text)


def test_too_few_layers() -> None:
    said = refused(world=8, n_layers=3, parallelism__pipeline_parallel_schedule="1F1B")
    assert "model.n_layers = 3 is too few for 8 stages on pipeline_parallel_degree = 8 ranks" in said
    assert "Use at least 6 layers" in said
    assert layout(world=8, n_layers=6).pipeline is not None


def test_micro_batches() -> None:
    said = refused(parallelism__pipeline_parallel_microbatch_size=3)
    assert "microbatch_size = 3 does not divide training.local_batch_size = 4; use one of 1, 2, 4" in said
    plan = layout(parallelism__pipeline_parallel_microbatch_size=2).pipeline
    assert plan is not None and plan.schedule.microbatches == 2


def test_schedules_that_are_not_there_or_take_other_stages() -> None:
    assert "there are GPipe, 1F1B" in refused(parallelism__pipeline_parallel_schedule="1f1b")
    assert "there are GPipe, 1F1B" in refused(n_layers=1, parallelism__pipeline_parallel_schedule="1f1b")
    said = refused(world=2, n_layers=10, parallelism__pipeline_parallel_layers_per_stage=3)
    assert "with 4 stages on 2 ranks: 1F1B puts 1 chunk on a rank, got 2; Interleaved1F1B is its form" in said


def test_a_table_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    write_csv(catalog.build("InterleavedZeroBubble", 2, 2, 4), file)
    key = {"parallelism__pipeline_parallel_schedule_csv": str(file)}
    plan = layout(world=2, **key).pipeline
    assert plan is not None
    assert (plan.schedule.name, plan.schedule.n_stages, plan.splits_backward) == ("mine.csv", 4, True)
    said = refused(world=2, training__local_batch_size=8, **key)
    assert "a table for 4 micro-batches, but a step of this run has 8" in said
    assert "a global batch of 4 rows for each data-parallel rank would fit" in said
    assert "a table for 2 ranks, but pipeline_parallel_degree = 4" in refused(**key)

    file.write_text(file.read_text().replace("1F0", "1F1", 1))
    broken = refused(world=2, **key)
    assert "1F1 is there 2 times" in broken and "lacks 1F0" in broken
    key["parallelism__pipeline_parallel_schedule_csv"] = str(tmp_path / "none.csv")
    assert "cannot be read: No such file" in refused(world=2, **key)


def test_notes() -> None:
    zero_3 = layout(world=4, dp=2, parallelism__zero_stage=3)
    (note,) = pipeline_notes(zero_3)
    assert "gathered for each of the 4 micro-batches" in note
    (note,) = pipeline_notes(layout(training__local_batch_size=2))
    assert "2 micro-batches a step do not fill 4 pipeline ranks" in note
    assert pipeline_notes(layout()) == []
    assert layout(world=4, dp=2).zero_stage == 2  # not 3, which would gather for every micro-batch


def test_a_trace_without_a_pipeline() -> None:
    assert "pipeline_trace = true measures" in refused(world=1, profiling__pipeline_trace=True)
