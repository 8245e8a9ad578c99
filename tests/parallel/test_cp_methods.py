"""All context-parallel methods, as modules on real process groups, against one process's full attention."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from tests.parallel.attention_parity import DOCUMENTS, Inputs, documents_from, random_inputs, relative_errors
from titan5d.launch.local_ranks import run_ranks
from titan5d.parallel.allgather_kv import AllGatherAttention
from titan5d.parallel.block_plan import prepare_documents
from titan5d.parallel.ring import RingAttention
from titan5d.parallel.ulysses import UlyssesAttention
from titan5d.parallel.zigzag import LoadBalancer, SequenceCut

Method = type[RingAttention] | type[AllGatherAttention] | type[UlyssesAttention]
METHODS: list[Method] = [RingAttention, AllGatherAttention, UlyssesAttention]
BALANCERS: list[LoadBalancer] = ["headtail", "none"]


def attend(method: Method, balancer: LoadBalancer, inputs: Inputs) -> dict[str, Tensor]:
    """out, dq, dk, dv of this rank's pieces."""
    rank, cut = dist.get_rank(), SequenceCut(dist.get_world_size(), balancer)
    q, k, v = (cut.shard(x, rank).requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out = method(dist.group.WORLD, balancer)(q, k, v, prepare_documents(inputs.documents))
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), cut.shard(inputs.grad_out, rank))
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def attend_all(method: Method, cases: list[tuple[LoadBalancer, Inputs]]) -> list[dict[str, Tensor]]:
    return [attend(method, balancer, inputs) for balancer, inputs in cases]


def assert_parity(
    method: Method, degree: int, cases: list[tuple[LoadBalancer, Inputs]], out: float, grad: float
):
    by_rank = run_ranks(attend_all, degree, method, cases, timeout=60)
    for (balancer, inputs), *pieces in zip(cases, *by_rank, strict=True):
        cut = SequenceCut(degree, balancer)
        found = {name: cut.unshard([piece[name] for piece in pieces]) for name in pieces[0]}
        errors = relative_errors(found, inputs)
        case = balancer, tuple(inputs.k.shape), inputs.documents, errors
        assert errors["out"] < out, case
        assert max(errors.values()) < grad, case


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_parity(method: Method, degree: int):
    cases = [
        (balancer, random_inputs(documents, kv_heads=kv_heads))
        for balancer in BALANCERS
        for documents in DOCUMENTS.values()
        for kv_heads in (8, 2, 1)
    ]
    assert_parity(method, degree, cases, out=1e-6, grad=2e-6)


@pytest.mark.parametrize("method", METHODS)
def test_parity_on_eight_ranks(method: Method):
    cases = [("headtail", random_inputs(DOCUMENTS[name])) for name in ("causal", "many", "across all ranks")]
    assert_parity(method, 8, cases, out=1e-6, grad=2e-6)


@pytest.mark.parametrize("method", METHODS)
def test_parity_in_bf16(method: Method):
    cases = [
        (balancer, random_inputs(DOCUMENTS[name], dtype=torch.bfloat16))
        for balancer in BALANCERS
        for name in ("causal", "many")
    ]
    assert_parity(method, 4, cases, out=1e-2, grad=1.5e-2)


def test_ulysses_with_kv_heads_that_do_not_divide():
    """12 query heads and 3, 6 or 12 KV heads on 4 ranks: each KV head goes to all ranks whose queries read it."""
    cases = [
        ("headtail", random_inputs(DOCUMENTS["many"], heads=12, kv_heads=kv_heads)) for kv_heads in (3, 6, 12)
    ]
    assert_parity(UlyssesAttention, 4, cases, out=1e-6, grad=2e-6)


def _ulysses_refusal() -> str:
    inputs = random_inputs(heads=6, kv_heads=2)
    with pytest.raises(ValueError) as refusal:
        UlyssesAttention(dist.group.WORLD)(inputs.q, inputs.k, inputs.v)
    return str(refusal.value)


def test_ulysses_refuses_heads_that_do_not_divide():
    message = run_ranks(_ulysses_refusal, 4)[0]
    assert (
        "the 6 query heads" in message and "context_parallel_degree = 4" in message and "6 % 4 = 2" in message
    )
    assert "context_parallel_method = 'ring'" in message


class Block(nn.Module):
    """Projections round the attention, so that the compiler has something to fuse and autograd something to save."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wq, self.wk, self.wv = (nn.Linear(64, heads * 8, bias=False) for heads in (8, 2, 2))
        self.wo = nn.Linear(64, 64, bias=False)
        self.core = core

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (w(x).unflatten(2, (-1, 8)) for w in (self.wq, self.wk, self.wv))  # (B, L, heads, 8)
        return x + self.wo(self.core(q, k, v, mask).flatten(2))


def block_results(block: Block, x: Tensor, mask: Tensor | None, run) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = run(block, x, mask)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])]


def _eager_compiled_recomputed(method: Method) -> tuple[int, float, float]:
    """Compilations, and the largest differences of compiled and of recomputed from eager."""
    cut = SequenceCut(dist.get_world_size())
    whole = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(0))
    x = cut.shard(whole, dist.get_rank())
    block = Block(method(dist.group.WORLD))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, backend=counter, fullgraph=True)
    worst = [0.0, 0.0]
    for lengths in ([[32], [32]], [[5, 27], [8, 24]], [[1, 2, 3, 26], [30, 2]]):
        mask = prepare_documents(documents_from(lengths))
        eager = block_results(block, x, mask, lambda b, x, m: b(x, m))
        other = block_results(block, x, mask, lambda b, x, m: compiled(x, m))
        again = block_results(block, x, mask, lambda b, x, m: checkpoint(b, x, m, use_reentrant=False))
        for n, results in enumerate((other, again)):
            for a, b in zip(eager, results, strict=True):
                worst[n] = max(worst[n], float((a - b).abs().max() / a.abs().max()))
    return counter.frame_count, worst[0], worst[1]


@pytest.mark.parametrize("method", METHODS)
def test_one_graph_for_any_documents_and_recomputation_is_bitwise(method: Method):
    for compilations, compiled, recomputed in run_ranks(_eager_compiled_recomputed, 2, method, timeout=60):
        assert compilations == 1  # fullgraph, and new documents do not compile again
        assert compiled < 1e-6
        assert recomputed == 0.0
