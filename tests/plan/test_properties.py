"""What must hold whatever the numbers are: directions, sums, and known closed forms."""

from __future__ import annotations

from dataclasses import replace
from math import isclose
from typing import Any

import pytest

from tests.plan.planning import case_with, config_with, machine_of, planned
from titan5d.models.args import count_parameters
from titan5d.plan.activations import block_bytes, kept_by_layer
from titan5d.plan.compute import Computer, attention_shapes, block_time
from titan5d.plan.memory import layer_activation_bytes
from titan5d.plan.network import Group
from titan5d.plan.parts import rank_parts
from titan5d.plan.plan_run import plan_run
from titan5d.plan.predict import predict
from titan5d.plan.step_time import step_time

BASE: dict[str, Any] = {
    "model.flavor": "70B",
    "training.seq_len": 8192,
    "training.local_batch_size": 1,
    "training.global_batch_size": 1024,
    "parallelism.zero_stage": 3,
}
MOE = BASE | {"model.name": "qwen3", "model.flavor": "30B-A3B", "training.seq_len": 4096}


def total(keys: dict[str, Any], gpus: int = 64) -> float:
    return planned("h100-80g", gpus, BASE | keys).fullest.total


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("parallelism.tensor_parallel_degree", (1, 2, 4, 8)),
        ("parallelism.context_parallel_degree", (1, 2, 4, 8)),
        ("activation_checkpoint.mode", ("none", "selective", "full")),
        ("parallelism.zero_stage", (1, 2, 3)),
        ("training.loss_chunk_mib", (0.0, 512.0)),  # below that the head's gradient in backward is more
    ],
)
def test_more_of_it_needs_less_memory(key: str, values: tuple[Any, ...]) -> None:
    found = [total({key: value}) for value in values]
    assert found == sorted(found, reverse=True) and len(set(found)) == len(found)


@pytest.mark.parametrize("key", ["training.local_batch_size", "training.seq_len"])
def test_more_tokens_need_more_memory(key: str) -> None:
    small = total({key: BASE[key]})
    assert small < total({key: 2 * BASE[key]})


def test_more_gpus_need_less_memory_each_and_are_faster_together() -> None:
    few, many = (planned("h100-80g", gpus, BASE) for gpus in (64, 256))
    assert many.fullest.total < few.fullest.total
    assert few.tokens_per_second < many.tokens_per_second < 4.2 * few.tokens_per_second


def test_slower_links_are_never_faster() -> None:
    config = config_with(BASE | {"parallelism.tensor_parallel_degree": 8, "training.global_batch_size": 64})
    speeds = [
        plan_run(config, machine_of("h100-80g", 64, inter=rate, intra=4 * rate))[0].tokens_per_second
        for rate in (5e9, 20e9, 80e9)
    ]
    assert speeds == sorted(speeds) and len(set(speeds)) == 3


def test_hsdp_moves_weights_only_inside_nodes() -> None:
    keys = BASE | {"model.flavor": "8B", "activation_checkpoint.mode": "full"}
    found = planned(
        "h100-80g",
        64,
        keys
        | {
            "parallelism.data_parallel_replicate_degree": 8,
            "parallelism.data_parallel_shard_degree": 8,
        },
    )
    crossing = {one.axis for one in found.time.traffic if one.group.crosses}
    assert crossing == {"dp_replicate"}
    assert {one.axis for one in planned("h100-80g", 64, keys).time.traffic if one.group.crosses} == {
        "dp_shard"
    }


def test_data_traffic_is_the_closed_form() -> None:
    # docs/data_parallel.md: 2 m q P gathered (the last unit once), 4 m P reduced, times (N - 1) / N
    found = planned("h100-80g", 64, BASE)
    case, m = found.case, 16
    parts = rank_parts(case, 0)
    gathered = m * (2 * (parts.shared + parts.shared - parts.units[-1])) * 63 / 64
    by_what = {one.what: one.size for one in found.time.traffic}
    assert by_what["gather weights, forward"] + by_what["gather weights, backward"] == pytest.approx(gathered)
    assert by_what["reduce-scatter gradients"] == pytest.approx(4 * m * parts.shared * 63 / 64)
    once = planned("h100-80g", 64, BASE | {"parallelism.zero_stage": 1})
    by_what = {one.what: one.size for one in once.time.traffic}
    assert by_what["gather weights, forward"] == pytest.approx(2 * parts.shared * 63 / 64)
    assert by_what["reduce-scatter gradients"] == pytest.approx(4 * parts.shared * 63 / 64)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_tensor_traffic_is_the_closed_form(mode: str) -> None:
    # docs/tensor_parallel.md: 8 T D q (t-1)/t a block and micro-batch, 2 more to gather again, or 3 when repeated
    keys = BASE | {"parallelism.tensor_parallel_degree": 8, "activation_checkpoint.mode": mode}
    found = planned("h100-80g", 64, keys)
    (sent,) = [one for one in found.time.traffic if one.axis == "tp"]
    times = 8 + (2 if mode == "none" else 3)
    assert sent.size == pytest.approx(times * 80 * 128 * 8192 * 8192 * 2 * 7 / 8)


def test_parts_add_up_to_the_model() -> None:
    for name, flavor in (("llama3", "8B"), ("qwen3", "30B-A3B"), ("deepseek_v3", "671B"), ("qwen3", "0.6B")):
        keys = {"model.name": name, "model.flavor": flavor, "training.global_batch_size": 64}
        case = case_with(1, keys | {"training.local_batch_size": 1})
        parts = rank_parts(case, 0)
        assert parts.shared + sum(parts.experts) + parts.routers == count_parameters(case.args).total
        case = case_with(
            4, keys | {"parallelism.pipeline_parallel_degree": 4, "training.local_batch_size": 1}
        )
        shares = [rank_parts(case, rank) for rank in range(4)]
        tied = case.args.vocab_size * case.args.dim if case.args.tie_embeddings else 0
        pieces = sum(one.shared + sum(one.experts) + one.routers for one in shares)
        assert pieces == count_parameters(case.args).total + tied  # a tied matrix is on both ends


def test_one_rank_keeps_what_one_device_keeps() -> None:
    for mode in ("none", "selective", "full"):
        case = case_with(1, BASE | {"parallelism.zero_stage": 0})
        assert block_bytes(case, False, mode) == pytest.approx(
            layer_activation_bytes(case.args, 8192, 2, mode)
        )


def test_a_step_is_the_sum_of_its_parts() -> None:
    for keys in (
        BASE,
        BASE | {"parallelism.tensor_parallel_degree": 8, "parallelism.pipeline_parallel_degree": 4},
        MOE,
    ):
        found = planned("h100-80g", 64, keys)
        assert isclose(sum(found.time.parts.values()), found.time.total, rel_tol=1e-9)


def test_a_short_table_tells_the_time_of_a_long_one() -> None:
    keys = BASE | {"parallelism.tensor_parallel_degree": 8, "parallelism.pipeline_parallel_degree": 4}
    case = case_with(64, keys | {"parallelism.zero_stage": 1})
    machine = machine_of("h100-80g", 64)
    short = case_with(64, keys | {"parallelism.zero_stage": 1, "training.global_batch_size": 24})
    assert case.schedule is not None and short.schedule is not None
    assert (case.microbatches, short.microbatches) == (512, 12)
    shortened = replace(case, schedule=short.schedule)
    whole = step_time(case, machine.computer, machine.network).total
    assert step_time(shortened, machine.computer, machine.network).total == pytest.approx(whole, rel=1e-3)
    assert step_time(case, machine.computer, machine.network, play=False).total <= whole


def test_mfu_is_below_what_products_reach() -> None:
    found = planned("h100-80g", 64, BASE)
    assert found.mfu <= found.hfu < found.machine.assumptions.gemm


def test_small_products_reach_less() -> None:
    computer = Computer(machine_of("h100-80g", 8).device, machine_of("h100-80g", 8).assumptions)
    rates = [2 * m * m * m / computer.product(m, m, m, 2) for m in (256, 1024, 4096, 16384)]
    assert rates == sorted(rates) and rates[-1] < 0.61 * 989e12


def test_block_flops_are_those_of_the_metrics() -> None:
    case = case_with(1, BASE | {"parallelism.zero_stage": 0, "model.flavor": "8B"})
    shapes = [*attention_shapes(case), *[(case.args.ffn_dim, case.args.dim)] * 3]
    weights = sum(n * k for n, k in shapes)
    count = count_parameters(case.args)
    assert weights == (count.matmul - count.embedding) / case.args.n_layers
    block = block_time(case, Computer(machine_of("h200", 1).device, machine_of("h200", 1).assumptions), False)
    assert block.forward > 2 * case.tokens * weights / 989e12


def test_groups_of_whole_nodes_use_all_their_cards() -> None:
    network = machine_of("h100-80g", 64).network
    assert network.group(64, 1) == Group(64, 8)
    assert network.group(8, 8) == Group(8, 1)
    assert network.bandwidth(network.group(8, 1)) == pytest.approx(0.8 * 450e9)
    assert network.bandwidth(network.group(8, 8)) == pytest.approx(0.85 * 50e9)
    assert network.bandwidth(network.group(64, 1)) == pytest.approx(8 * 0.85 * 50e9)
    assert network.ring(0, Group(1, 1)) == network.all_to_all(1e9, Group(1, 1)) == 0


def test_expert_ranks_hold_fewer_experts_and_as_many_rows() -> None:
    one, eight = (planned("h100-80g", 64, MOE | {"parallelism.expert_parallel_degree": ep}) for ep in (1, 8))
    assert sum(rank_parts(eight.case, 0).experts) * 8 == 48 * 3 * 128 * 768 * 2048
    assert not rank_parts(one.case, 0).experts
    assert one.fullest.lines["activations"] == pytest.approx(eight.fullest.lines["activations"])
    assert {sent.axis for sent in eight.time.traffic} == {"dp_shard", "efsdp", "ep", "dp"}


def test_slices_of_experts_hold_as_much_and_are_sent_more() -> None:
    keys = MOE | {"parallelism.expert_parallel_degree": 8}
    whole, halves = (
        planned("h100-80g", 64, keys | {"parallelism.expert_tensor_parallel_degree": slices}) for slices in (1, 2)
    )
    assert sum(rank_parts(halves.case, 0).experts) * 16 == 48 * 3 * 128 * 768 * 2048
    assert halves.fullest.lines["weights"] == whole.fullest.lines["weights"]  # sharded over all ranks either way
    rows = {sent.axis: sent for sent in (*whole.time.traffic, *halves.time.traffic) if "rows" in sent.what}
    assert rows["ep"].size / (1 - 1 / 8) * 2 == pytest.approx(rows["ep_etp"].size / (1 - 1 / 16))
    one_more_of_each_row = 8 * whole.case.tokens * 2048 * 2
    assert kept_by_layer(halves.case, True) - kept_by_layer(whole.case, True) == pytest.approx(one_more_of_each_row)


def test_gpipe_holds_every_micro_batch() -> None:
    keys = BASE | {"parallelism.tensor_parallel_degree": 8, "parallelism.pipeline_parallel_degree": 4}
    keys |= {"training.global_batch_size": 16}
    flight = {}
    for name in ("GPipe", "1F1B"):
        case = case_with(
            64, keys | {"parallelism.pipeline_parallel_schedule": name, "parallelism.zero_stage": 1}
        )
        flight[name] = [one.in_flight for one in predict(case, machine_of("h100-80g", 64)).ranks]
    assert flight == {"GPipe": [8, 8, 8, 8], "1F1B": [4, 3, 2, 1]}


def test_tensor_ranks_keep_their_share_of_a_block() -> None:
    # docs/tensor_parallel.md, "What it costs"; 8 KV heads on 8 ranks, so nothing is copied
    keys = BASE | {
        "parallelism.zero_stage": 0,
        "training.global_batch_size": 8,
        "training.local_batch_size": 8,
    }
    tokens, dim = 8 * 8192, 8192
    whole = block_bytes(case_with(1, keys), False, "none")
    keys |= {"parallelism.tensor_parallel_degree": 8}
    assert block_bytes(case_with(8, keys), False, "none") == pytest.approx(whole / 8)
    kept = case_with(8, keys | {"parallelism.tensor_parallel_regather_input": False})
    assert block_bytes(kept, False, "none") == pytest.approx(whole / 8 + tokens * 4 * dim * 7 / 8)
    plain = case_with(8, keys | {"parallelism.sequence_parallel": False})
    stream = tokens * (8 * dim + 8)
    assert block_bytes(plain, False, "none") == pytest.approx(stream + (whole - stream) / 8)
