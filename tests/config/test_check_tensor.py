"""What tensor parallelism refuses before any process group exists, and what it says."""

from __future__ import annotations

import pytest

from titan5d.config.check import Layout, check, device_problems
from titan5d.config.load import ConfigError
from titan5d.config.schema import Config
from titan5d.models.args import ModelArgs
from titan5d.topology import Topology

ARGS = ModelArgs(dim=64, n_layers=2, n_heads=12, n_kv_heads=4, head_dim=8, ffn_dim=120, vocab_size=250)


def checked(tp: int, args: ModelArgs = ARGS, seq_len: int = 64, cp: int = 1, **keys: object) -> Layout:
    config = Config()
    config.training.seq_len = seq_len
    config.validation.enable = False
    config.parallelism.tensor_parallel_degree = tp
    config.parallelism.context_parallel_degree = cp
    for key, value in keys.items():
        setattr(config.parallelism, key, value)
    return check(config, args, tp * cp)


def problems(*args: object, **keys: object) -> list[str]:
    with pytest.raises(ConfigError) as error:
        checked(*args, **keys)  # type: ignore[arg-type]
    return error.value.problems


@pytest.mark.parametrize("tp", [1, 2, 4, 12])
def test_what_fits(tp: int) -> None:
    assert checked(tp, seq_len=48).topology.tp == tp  # 12 ranks share 4 key/value heads


def test_heads_do_not_divide() -> None:
    (problem,) = problems(8, seq_len=64)
    assert "tensor_parallel_degree = 8" in problem and "model.n_heads = 12" in problem
    assert problem.endswith("degrees that fit this model: 1, 2, 4, 12")


def test_kv_heads_and_degree_of_which_neither_divides_the_other() -> None:
    (problem,) = problems(6, seq_len=60)
    assert "model.n_kv_heads = 4: neither divides the other" in problem and "1, 2, 4, 12" in problem


def test_feed_forward_width_does_not_divide() -> None:
    args = ModelArgs(dim=64, n_layers=2, n_heads=8, n_kv_heads=4, ffn_dim=130, vocab_size=250)
    (problem,) = problems(4, args)
    assert "model.ffn_dim = 130" in problem and "degrees that fit this model: 1, 2" in problem


def test_a_rank_without_vocabulary() -> None:
    args = ModelArgs(dim=64, n_layers=2, n_heads=8, n_kv_heads=4, ffn_dim=128, vocab_size=9)
    (problem,) = problems(8, args)
    assert "leaves ranks without a row of model.vocab_size = 9" in problem


@pytest.mark.parametrize(
    ("seq_len", "tp", "near"), [(63, 2, "62 or 64"), (66, 4, "64 or 68"), (3, 4, "use 4, or")]
)
def test_sequence_does_not_divide(seq_len: int, tp: int, near: str) -> None:
    """Case 023."""
    (problem,) = problems(tp, seq_len=seq_len)
    assert f"training.seq_len = {seq_len}" in problem and f"tensor_parallel_degree = {tp}" in problem
    assert near in problem and "sequence_parallel = false" in problem
    assert checked(tp, seq_len=seq_len, sequence_parallel=False).topology.tp == tp


def test_sequence_with_context_parallelism_is_one_problem() -> None:
    """Case 023."""
    (problem,) = problems(2, seq_len=60, cp=4)
    assert "seq_len = 60" in problem and "context_parallel_degree = 4" in problem
    (problem,) = problems(1, seq_len=66, cp=4)
    assert "seq_len = 66" in problem and "64 or 72" in problem
    assert checked(1, seq_len=68, cp=2).topology.cp == 2


def test_overlap_needs_sequence_parallelism_and_ranks() -> None:
    (problem,) = problems(1, enable_async_tensor_parallel=True)
    assert "tensor_parallel_degree = 1 and sequence_parallel = true" in problem
    (problem,) = problems(2, enable_async_tensor_parallel=True, sequence_parallel=False)
    assert "tensor_parallel_degree = 2 and sequence_parallel = false" in problem


def test_overlap_needs_devices_that_reach_each_other() -> None:
    config = Config()
    assert device_problems(config, Topology(tp=4), "cpu", 4) == []
    config.parallelism.enable_async_tensor_parallel = True
    assert "this run is on cpu" in device_problems(config, Topology(tp=4), "cpu", 4)[0]
    assert "a node has 2 ranks" in device_problems(config, Topology(tp=4), "cuda", 2)[0]
    assert device_problems(config, Topology(tp=4), "cuda", 8) == []
