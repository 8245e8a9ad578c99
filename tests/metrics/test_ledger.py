"""The communication ledger against the ring's closed forms, for every way into a collective."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._dynamo  # the first custom op imports it: once here instead of on each forked rank
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.utils.checkpoint import checkpoint

from titan5d.launch.local_ranks import RankFailed, run_ranks
from titan5d.metrics.ledger import CommunicationLedger, Entry, Traffic
from titan5d.parallel.ring import ring_attention

N = 4
SIZE = 24 * 4  # bytes of 24 fp32 numbers


def _all_to_all_uneven() -> None:
    rank = dist.get_rank()
    splits = [1, 2, 3, 4]  # rows for ranks 0..3; what stays is splits[rank]
    received = [splits[rank]] * N
    dist.all_to_all_single(torch.empty(sum(received), 2), torch.ones(10, 2), received, splits)


def _all_to_all_lists() -> None:
    pieces = [torch.ones(6) for _ in range(N)]
    dist.all_to_all([torch.empty(6) for _ in range(N)], pieces)


def _gather() -> None:
    x, root = torch.ones(6), dist.get_rank() == 0
    dist.gather(x, [torch.empty(6) for _ in range(N)] if root else None)


def _scatter() -> None:
    root = dist.get_rank() == 0
    dist.scatter(torch.empty(6), [torch.ones(6) for _ in range(N)] if root else None)


def _coalesced() -> None:
    with dist._coalescing_manager():
        dist.all_reduce(torch.ones(16))
        dist.all_reduce(torch.ones(8))


# name -> (calls, op, bytes of the tensor counted, bytes sent by a rank)
COLLECTIVES: dict[str, tuple[Callable[[], object], str, int, float]] = {
    "all_reduce": (lambda: dist.all_reduce(torch.ones(24)), "all_reduce", SIZE, 1.5 * SIZE),
    "coalesced": (_coalesced, "all_reduce", SIZE, 1.5 * SIZE),
    "bf16": (
        lambda: dist.all_reduce(torch.ones(24, dtype=torch.bfloat16)),
        "all_reduce",
        SIZE // 2,
        0.75 * SIZE,
    ),
    "all_gather": (
        lambda: dist.all_gather_into_tensor(torch.empty(24), torch.ones(6)),
        "all_gather",
        SIZE,
        0.75 * SIZE,
    ),
    "all_gather list": (
        lambda: dist.all_gather([torch.empty(6) for _ in range(N)], torch.ones(6)),
        "all_gather",
        SIZE,
        0.75 * SIZE,
    ),
    "reduce_scatter": (
        lambda: dist.reduce_scatter_tensor(torch.empty(6), torch.ones(24)),
        "reduce_scatter",
        SIZE,
        0.75 * SIZE,
    ),
    "reduce_scatter list": (
        lambda: dist.reduce_scatter(torch.empty(6), [torch.ones(6) for _ in range(N)]),
        "reduce_scatter",
        SIZE,
        0.75 * SIZE,
    ),
    "broadcast": (lambda: dist.broadcast(torch.ones(24), 0), "broadcast", SIZE, 0.75 * SIZE),
    "reduce": (lambda: dist.reduce(torch.ones(24), 0), "reduce", SIZE, 0.75 * SIZE),
    "gather": (_gather, "gather", SIZE // 4, 0.75 * SIZE / 4),
    "scatter": (_scatter, "scatter", SIZE // 4, 0.75 * SIZE / 4),
    "all_to_all": (
        lambda: dist.all_to_all_single(torch.empty(24), torch.ones(24)),
        "all_to_all",
        SIZE,
        0.75 * SIZE,
    ),
    "all_to_all list": (_all_to_all_lists, "all_to_all", SIZE, 0.75 * SIZE),
    "barrier": (lambda: dist.barrier(), "barrier", 0, 0),
    "functional all_reduce": (
        lambda: funcol.all_reduce(torch.ones(24), "sum", dist.group.WORLD).sum(),
        "all_reduce",
        SIZE,
        1.5 * SIZE,
    ),
    "functional all_gather": (
        lambda: funcol.all_gather_tensor(torch.ones(6), 0, dist.group.WORLD).sum(),
        "all_gather",
        SIZE,
        0.75 * SIZE,
    ),
    "functional reduce_scatter": (
        lambda: funcol.reduce_scatter_tensor(torch.ones(24), "sum", 0, dist.group.WORLD).sum(),
        "reduce_scatter",
        SIZE,
        0.75 * SIZE,
    ),
    "functional broadcast": (
        lambda: funcol.broadcast(torch.ones(24), 0, dist.group.WORLD).sum(),
        "broadcast",
        SIZE,
        0.75 * SIZE,
    ),
    "functional all_to_all": (
        lambda: funcol.all_to_all_single(torch.ones(24), None, None, dist.group.WORLD).sum(),
        "all_to_all",
        SIZE,
        0.75 * SIZE,
    ),
    "functional coalesced": (
        lambda: [
            x.sum()
            for x in funcol.all_reduce_coalesced([torch.ones(16), torch.ones(8)], "sum", dist.group.WORLD)
        ],
        "all_reduce",
        SIZE,
        1.5 * SIZE,
    ),
}


def _each_collective() -> dict[str, list[Entry]]:
    seen = {}
    for name, (call, *_) in COLLECTIVES.items():
        with CommunicationLedger({"world": dist.group.WORLD}) as ledger:
            call()
        seen[name] = ledger.entries
    return seen


@pytest.fixture(scope="module")
def each_collective() -> list[dict[str, list[Entry]]]:
    return run_ranks(_each_collective, N)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_is_one_call_of_its_closed_form(name: str, each_collective) -> None:
    _, op, tensor_bytes, sent = COLLECTIVES[name]
    for entries in (seen[name] for seen in each_collective):
        assert [(entry.axis, entry.op) for entry in entries] == [("world", op)]
        assert entries[0].traffic == Traffic(1, sent, tensor_bytes)


def _uneven() -> Traffic:
    with CommunicationLedger({"world": dist.group.WORLD}) as ledger:
        _all_to_all_uneven()
    return ledger.total(op="all_to_all")


def test_an_uneven_all_to_all_counts_what_leaves_the_rank() -> None:
    for rank, traffic in enumerate(run_ranks(_uneven, N)):
        assert traffic == Traffic(1, (10 - (1, 2, 3, 4)[rank]) * 8, 80)


def _point_to_point() -> list[Entry]:
    rank, x, y = dist.get_rank(), torch.ones(24), torch.empty(24)
    following, previous = (rank + 1) % N, (rank - 1) % N
    with CommunicationLedger({"world": dist.group.WORLD}) as ledger:
        transfers = [dist.P2POp(dist.isend, x, following), dist.P2POp(dist.irecv, y, previous)]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        work = dist.isend(x, following)
        dist.recv(y, previous)
        work.wait()
    return ledger.entries


def test_point_to_point_is_counted_by_the_sender() -> None:
    for entries in run_ranks(_point_to_point, N):
        recv, send = entries
        assert (recv.op, recv.traffic) == ("recv", Traffic(2, 0, 2 * SIZE))
        assert (send.op, send.traffic) == ("send", Traffic(2, 2 * SIZE, 2 * SIZE))


def _ring(recompute: bool) -> tuple[Traffic, Traffic, Traffic]:
    group = dist.group.WORLD
    q = torch.randn(2, 8, 4, 8, requires_grad=True)
    k, v = (torch.randn(2, 8, 2, 8, requires_grad=True) for _ in range(2))

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        return ring_attention(*qkv, None, True, group.group_name, 1.0)[0]

    forward, backward = CommunicationLedger({"cp": group}), CommunicationLedger({"cp": group})
    with forward:
        out = checkpoint(attend, q, k, v, use_reentrant=False) if recompute else attend(q, k, v)
    with backward:
        out.sum().backward()
    return forward.total("cp", "send"), backward.total("cp", "send"), backward.total("cp", "recv")


def test_ring_attention_inside_its_custom_ops() -> None:
    kv = 2 * 2 * 8 * 2 * 8 * 4  # K and V of one rank, fp32
    hops = N - 1
    for forward, backward, received in run_ranks(_ring, N, False):
        assert forward == Traffic(hops, hops * kv, hops * kv)
        assert backward == Traffic(2 * hops, 2 * hops * kv, 2 * hops * kv)  # K/V again, and their gradients
        assert received == Traffic(2 * hops, 0, 2 * hops * kv)


def test_recompute_sends_again() -> None:
    kv = 2 * 2 * 8 * 2 * 8 * 4
    for forward, backward, _ in run_ranks(_ring, N, True):
        assert (forward.count, backward.count) == (3, 9)
        assert backward.bytes == 3 * forward.bytes == 9 * kv


def _dtensor_product() -> list[Entry]:
    """A row-wise product, redistributed: partial sums are all-reduced, their gradient needs nothing."""
    mesh = init_device_mesh("cpu", (N,), mesh_dim_names=("tp",))
    x = DTensor.from_local(torch.ones(6, 2), mesh, [Shard(1)])
    w = DTensor.from_local(torch.ones(2, 6, requires_grad=True), mesh, [Shard(0)])
    with CommunicationLedger({"tp": mesh.get_group()}) as ledger:
        (x @ w).redistribute(placements=[Replicate()]).sum().to_local().backward()
    return ledger.entries


def test_dtensor() -> None:
    for entries in run_ranks(_dtensor_product, N):
        assert entries == [Entry("tp", "all_reduce", "float32", Traffic(1, 1.5 * 36 * 4, 36 * 4))]


class _Exchange(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops._c10d_functional.wait_tensor(
            torch.ops._c10d_functional.all_reduce(x * 2, "sum", dist.group.WORLD.group_name)
        )


def _compiled_and_autograd() -> tuple[list[Entry], Traffic, Traffic]:
    block = _Exchange()
    block.compile(backend="aot_eager", fullgraph=True)
    with CommunicationLedger({"tp": dist.group.WORLD}) as compiled:
        block(torch.ones(24))
    x = torch.ones(24, requires_grad=True)
    forward, backward = (CommunicationLedger({"ep": dist.group.WORLD}) for _ in range(2))
    with forward:
        y = funcol.all_to_all_single_autograd(x, [6] * N, [6] * N, dist.group.WORLD)
    with backward:
        y.sum().backward()
    return compiled.entries, forward.total(), backward.total()


def test_compiled_graphs_and_backward_of_functional_collectives() -> None:
    for compiled, forward, backward in run_ranks(_compiled_and_autograd, N):
        assert compiled == [Entry("tp", "all_reduce", "float32", Traffic(1, 1.5 * SIZE, SIZE))]
        assert forward == backward == Traffic(1, 0.75 * SIZE, SIZE)


def _axes() -> tuple[list[Entry], str]:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("outer", "inner", "alone"))
    twin = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0]  # the same ranks as "inner"
    foreign = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])[0]
    groups = {axis: mesh.get_group(axis) for axis in mesh.mesh_dim_names}
    ledger = CommunicationLedger(groups)
    for group in (*groups.values(), twin, foreign):
        with ledger:  # entered again and again: it adds up
            dist.all_reduce(torch.ones(24), group=group)
            funcol.all_reduce(torch.ones(24), "sum", group).sum()
    dist.all_reduce(torch.ones(24))  # outside: not counted
    return ledger.entries, ledger.table()


def test_axes_have_the_names_of_their_groups_and_one_rank_moves_nothing() -> None:
    pairs = ["0,3", "1,2", "1,2", "0,3"]
    for (entries, table), ranks in zip(run_ranks(_axes, N), pairs, strict=True):
        calls = {entry.axis: entry.traffic for entry in entries}
        assert calls == {
            "outer": Traffic(2, 2 * SIZE, 2 * SIZE),
            "inner": Traffic(4, 4 * SIZE, 4 * SIZE),
            f"ranks {ranks}": Traffic(2, 2 * SIZE, 2 * SIZE),
        }
        assert table.splitlines()[1].split() == ["inner", "all_reduce", "float32", "4", "384", "384"]


def _reduce_and_fail() -> None:
    dist.all_reduce(torch.ones(2))
    raise RankFailed(0, "on purpose")


def _leaves_nothing_behind() -> bool:
    before = dict(dist.ProcessGroup.__dict__)
    outer, inner = (CommunicationLedger({"world": dist.group.WORLD}) for _ in range(2))
    with pytest.raises(RankFailed), outer, inner:
        _reduce_and_fail()
    assert outer.total().count == inner.total().count == 1
    after = dict(dist.ProcessGroup.__dict__)
    dist.all_reduce(torch.ones(2))
    assert outer.total().count == 1
    return before == after


def test_an_error_inside_leaves_torch_as_it_was() -> None:
    assert run_ranks(_leaves_nothing_behind, 2) == [True, True]


def test_totals_select_and_add() -> None:
    totals = [Traffic(3, 48, 56), Traffic(2, 40, 40), Traffic(1, 8, 16), Traffic(1, 32, 32), Traffic()]
    assert run_ranks(_three_kinds, 2) == [totals, totals]


def _three_kinds() -> list[Traffic]:
    with CommunicationLedger({"world": dist.group.WORLD}) as ledger:
        dist.all_reduce(torch.ones(8))
        dist.all_reduce(torch.ones(4, dtype=torch.bfloat16))
        dist.all_gather_into_tensor(torch.empty(4), torch.ones(2))
    return [
        ledger.total(),
        ledger.total("world", op="all_reduce"),
        ledger.total(op="all_gather"),
        ledger.total(op="all_reduce", dtype="float32"),
        ledger.total("tp"),
    ]
