"""Any config becomes a small case of the same kind, and what was changed is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan5d.config.load import ConfigError, load_config
from titan5d.models.args import count_parameters
from titan5d.verify.case import case_of, reference_case
from titan5d.verify.layouts import parse_layouts
from titan5d.verify.shrink import arguments, shrink

CONFIGS = sorted(file.stem for file in (Path(__file__).parents[2] / "train_configs").glob("*.toml"))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_of_ours_is_small_legal_and_of_the_same_kind(name: str) -> None:
    config = load_config(["--config", name])
    small = shrink(config)
    before, after = arguments(config), case_of(small, small.layouts[0]).args
    assert count_parameters(after).total < 600_000
    assert small.layouts[0].topology.world_size <= 16
    assert before.n_heads / before.n_kv_heads == after.n_heads / after.n_kv_heads
    for kind in ("n_experts", "n_shared_experts", "n_dense_layers", "kv_lora_rank", "q_lora_rank"):
        assert bool(getattr(before, kind)) == bool(getattr(after, kind)), kind
    for same in (
        "tie_embeddings",
        "qk_norm",
        "attention_bias",
        "rope_scaling",
        "router_score",
        "router_scale",
        "balance",
        "norm_eps",
    ):
        assert getattr(before, same) == getattr(after, same), same
    own, cut = config.parallelism, small.layouts[0].topology
    assert (cut.pp > 1, cut.tp > 1, cut.cp > 1, cut.ep > 1) == tuple(
        degree > 1
        for degree in (
            own.pipeline_parallel_degree,
            own.tensor_parallel_degree,
            own.context_parallel_degree,
            own.expert_parallel_degree,
        )
    )
    layout = case_of(small, small.layouts[0]).layout
    assert layout.accumulation >= 2
    assert own.zero_stage is None or layout.zero_stage == own.zero_stage
    assert reference_case(small).layout.global_batch_size == layout.global_batch_size


FAR = [
    "--config=deepseek_v3_671b",
    "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble",
    "--activation_checkpoint.mode=selective",
    "--activation_checkpoint.selective_ac_option=8",
    "--compile.enable=true",
    "--moe.capacity_factor=1.5",
]


def test_options_stay_and_changes_are_said() -> None:
    small = shrink(load_config(FAR))
    config = case_of(small, small.layouts[0]).config
    assert config.parallelism.pipeline_parallel_schedule == "ZBVZeroBubble"
    assert config.activation_checkpoint.mode == "selective"
    assert config.activation_checkpoint.selective_ac_option == "2"
    assert config.moe.capacity_factor == 1.5 and config.moe.bias_update_rate == 0.001
    assert config.compile.enable and config.compile.backend == "aot_eager"
    said = "\n".join(small.notes)
    for word in (
        "bfloat16 -> float32",
        "AdamW -> SGD",
        "n_layers 61 ->",
        "pp 16",
        "aot_eager",
        "selective_ac_option",
    ):
        assert word in said, word
    # experts are shared and sharded here, as 128 ranks share and shard them there
    assert str(small.layouts[0]) == "dp4pp2ep2"


def test_stages_that_are_written_out_are_kept_with_their_layers() -> None:
    written = [
        "--parallelism.pipeline_parallel_degree=3",
        "--parallelism.pipeline_parallel_layout=E,t*2|t*3|t,N,H",
    ]
    small = shrink(load_config(written))
    case = case_of(small, small.layouts[0])
    assert case.args.n_layers == 6 and case.layout.topology.pp == 3
    assert case.layout.pipeline is not None and len(case.layout.pipeline.stages[1]) == 3


def test_regrouped_shards_get_ranks_to_regroup() -> None:
    small = shrink(
        load_config(
            [
                "--parallelism.data_parallel_shard_degree=16",
                "--parallelism.zero_stage=3",
                "--parallelism.zero_reshard_degree=8",
                "--training.local_batch_size=1",
            ]
        )
    )
    case = case_of(small, small.layouts[0])
    assert case.layout.topology.dp_shard == 4 and case.config.parallelism.zero_reshard_degree == 2


@pytest.mark.parametrize(
    ("degrees", "small"),
    [
        ({"data_parallel_shard_degree": 4, "expert_parallel_degree": 2}, "dp4ep2etp2"),  # 2 ranks are not 2 x 2
        ({"data_parallel_shard_degree": 2, "tensor_parallel_degree": 4, "expert_parallel_degree": 4}, "dp2tp2ep2etp2"),
        ({"data_parallel_shard_degree": 1, "context_parallel_degree": 4, "expert_parallel_degree": 2}, "cp4ep2etp2"),
        ({"data_parallel_shard_degree": 8, "expert_parallel_degree": 2}, "dp8ep2etp2"),  # shared, cut and sharded
        ({"data_parallel_shard_degree": 8}, "dp4etp2"),
    ],
)
def test_experts_stay_cut(degrees: dict[str, int], small: str) -> None:
    words = [f"--parallelism.{key}={degree}" for key, degree in degrees.items()]
    words += ["--parallelism.expert_tensor_parallel_degree=2", "--training.local_batch_size=1"]
    config = load_config(["--config=moe_debug", *words])
    case = shrink(config)
    assert str(case.layouts[0]) == small
    assert case_of(case, case.layouts[0]).layout.topology.etp == 2


def test_the_width_of_experts_divides_into_the_slices() -> None:
    layouts = parse_layouts("dp2, dp3etp3")
    small = shrink(load_config(["--config=moe_debug", "--model.moe_ffn_dim=96"]), layouts)
    assert small.config.model.moe_ffn_dim == 36
    assert case_of(small, layouts[1]).args.moe_ffn_dim == 36


def test_rows_that_do_not_divide_stay_so() -> None:
    small = shrink(load_config(["--model.vocab_size=4097"]))
    assert small.config.model.vocab_size == 257


def test_a_config_that_cannot_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="expert_parallel_degree = 2 shares experts"):
        shrink(load_config(["--parallelism.expert_parallel_degree=2"]))


def test_what_the_file_refuses_is_refused_though_the_small_sizes_would_fit() -> None:
    """9 query heads cannot be shared by two ranks; the small model might have had 2 or 4."""
    config = load_config(["--model.n_heads=9", "--model.n_kv_heads=3", "--model.head_dim=16"])
    small = shrink(config, parse_layouts("dp2, tp2"))
    case_of(small, small.layouts[0])
    with pytest.raises(ConfigError, match="n_heads = 9"):
        case_of(small, small.layouts[1])


@pytest.mark.parametrize("rows", [1, 4])
def test_two_micro_batches_at_once_stay_where_a_layout_has_them(rows: int) -> None:
    words = ["--config=deepseek_v3_671b", "--parallelism.pipeline_parallel_schedule=DualPipeV"]
    words += ["--parallelism.pipeline_parallel_expert_parallel_overlap=true", "--training.local_batch_size=4"]
    config = load_config([*words, f"--parallelism.pipeline_parallel_microbatch_size={rows}"])
    for asked, overlaps in ((None, True), ("dp2ep2", False)):
        small = shrink(config, None if asked is None else parse_layouts(asked))
        plan = case_of(small, small.layouts[0]).layout.pipeline
        assert (plan is not None and plan.overlaps_experts and plan.has_overlaps) == overlaps
