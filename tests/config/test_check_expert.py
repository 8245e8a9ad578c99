"""What expert parallelism refuses before any process group exists, and what it says; its train_configs."""

from __future__ import annotations

from pathlib import Path

import pytest

from titan5d.config.check import Layout, check
from titan5d.config.load import ConfigError, load_config
from titan5d.config.schema import Config
from titan5d.models.args import Balance, ModelArgs
from titan5d.models.families import model_args
from titan5d.plan.fits import peak_bytes

ARGS = ModelArgs(
    dim=64,
    n_layers=4,
    n_heads=8,
    n_kv_heads=4,
    ffn_dim=128,
    vocab_size=256,
    n_experts=12,
    top_k=2,
    moe_ffn_dim=64,
)
DENSE = ModelArgs(dim=64, n_layers=4, n_heads=8, n_kv_heads=4, ffn_dim=128, vocab_size=256)
CONFIGS = Path(__file__).parents[2] / "train_configs"


def checked(ep: int, ranks: int, args: ModelArgs = ARGS, **keys: object) -> Layout:
    config = Config()
    config.validation.enable = False
    config.parallelism.expert_parallel_degree = ep
    for key, value in keys.items():
        setattr(config.parallelism, key, value)
    return check(config, args, ranks)


def problem(*args: object, **keys: object) -> str:
    with pytest.raises(ConfigError) as error:
        checked(*args, **keys)  # type: ignore[arg-type]
    (found,) = error.value.problems
    return found


@pytest.mark.parametrize(
    ("ep", "ranks", "degrees"),
    [
        (1, 8, {}),
        (2, 8, {}),
        (4, 8, {"tensor_parallel_degree": 2, "context_parallel_degree": 2}),
        (4, 4, {"tensor_parallel_degree": 4}),
        (2, 8, {"data_parallel_replicate_degree": 2, "pipeline_parallel_degree": 2}),
        (12, 24, {}),
    ],
)
def test_what_fits(ep: int, ranks: int, degrees: dict[str, int]) -> None:
    topology = checked(ep, ranks, **degrees).topology
    assert topology.ep * topology.efsdp == topology.dp_shard * topology.cp * topology.tp


SLICES = "expert_tensor_parallel_degree"


@pytest.mark.parametrize(
    ("ep", "etp", "ranks", "degrees"),
    [
        (1, 2, 2, {}),
        (2, 4, 16, {"data_parallel_replicate_degree": 2}),
        (4, 2, 8, {"tensor_parallel_degree": 2}),
        (2, 2, 8, {"context_parallel_degree": 4, "pipeline_parallel_degree": 2}),
    ],
)
def test_slices_that_fit(ep: int, etp: int, ranks: int, degrees: dict[str, int]) -> None:
    topology = checked(ep, ranks, **degrees, **{SLICES: etp}).topology
    assert topology.etp == etp and topology.expert_ranks == ep * etp
    assert ep * etp * topology.efsdp == topology.dp_shard * topology.cp * topology.tp


def test_slices_and_ranks_do_not_divide() -> None:
    found = problem(2, 8, **{SLICES: 8})
    assert f"{SLICES} = 8 does not divide the 4 ranks that each expert has, 8 that share the rest" in found
    assert "data_parallel_shard_degree 8 x" in found and "/ expert_parallel_degree 2" in found
    assert found.endswith("degrees that fit both: 1, 2, 4")


def test_slices_and_width_do_not_divide() -> None:
    found = problem(1, 6, **{SLICES: 3})
    assert f"{SLICES} = 3 does not divide model.moe_ffn_dim = 64" in found
    assert found.endswith("degrees that fit both: 1, 2")


def test_slices_of_no_experts_or_none_of_them() -> None:
    found = problem(1, 2, DENSE, **{SLICES: 2})
    assert f"{SLICES} = 2 shares experts" in found and "n_experts = 0" in found and found.endswith("set 1")
    assert f"{SLICES} = 0: a degree is 1 or more" in problem(1, 2, **{SLICES: 0})


def test_a_wrong_expert_degree_hides_no_slices() -> None:
    """How many ranks an expert has is known only once expert_parallel_degree divides; it is mended first."""
    assert "expert_parallel_degree = 3" in problem(3, 8, ARGS, **{SLICES: 2})


def test_no_experts_to_share() -> None:
    found = problem(2, 2, DENSE)
    assert "expert_parallel_degree = 2" in found and "n_experts = 0" in found and found.endswith("set 1")


def test_degree_and_ranks_do_not_divide() -> None:
    """Replicas and stages have all experts each, so their ranks do not count."""
    degrees = {"data_parallel_replicate_degree": 2, "pipeline_parallel_degree": 2}
    found = problem(4, 8, **degrees)
    assert "does not divide the 2 ranks" in found and "data_parallel_shard_degree 2 x" in found
    assert found.endswith("degrees that fit both: 1, 2")


def test_degree_and_experts_do_not_divide() -> None:
    found = problem(8, 8)
    assert "expert_parallel_degree = 8" in found and "model.n_experts = 12" in found
    assert "degrees that fit both: 1, 2, 4" in found


def test_zero() -> None:
    assert "expert_parallel_degree = 0: a degree is 1 or more" in problem(0, 2)


def test_tensor_ranks_without_sequence_parallelism() -> None:
    found = problem(2, 2, tensor_parallel_degree=2, sequence_parallel=False)
    assert "sequence_parallel = false" in found and found.endswith("sequence_parallel = true is needed")


def test_a_loss_by_micro_batch_needs_the_same_micro_batches_in_a_pipeline() -> None:
    """Found by `titan5d verify`: the loss of two rows is not the mean of the losses of each."""
    args = ARGS.with_overrides(balance=Balance(aux_loss_coefficient=0.01, aux_loss_kind="micro_batch"))
    found = problem(1, 2, args, pipeline_parallel_degree=2)
    assert "local_batch_size = 8" in found and "pipeline_parallel_microbatch_size = 1" in found
    checked(1, 2, args, pipeline_parallel_degree=2, pipeline_parallel_microbatch_size=8)
    checked(1, 2, args)


def test_width_of_shared_experts() -> None:
    args = ARGS.with_overrides(n_shared_experts=1, moe_ffn_dim=66)
    assert "model.n_shared_experts x moe_ffn_dim = 66" in problem(4, 4, args, tensor_parallel_degree=4)


@pytest.mark.parametrize(
    ("name", "ranks", "memory"),
    [
        ("mixtral_8x7b", 64, 80e9),
        ("qwen3_30b_a3b", 32, 80e9),
        ("deepseek_v3_671b", 2048, 80e9),
        ("moe_debug", 2, 2e9),
    ],
)
def test_train_configs_hold_together_and_fit(name: str, ranks: int, memory: float) -> None:
    config = load_config(["--config", str(CONFIGS / f"{name}.toml")], [])
    args = model_args(config.model, config.moe, config.debug.moe_force_load_balance)
    layout = check(config, args, ranks)
    assert 0 < peak_bytes(config, args, layout, "cuda") < 0.6 * memory
