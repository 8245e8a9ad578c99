"""Cut 3 in a whole step against one process: methods, balancers, documents, data and tensor cuts beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.parity import TINY, Case, assert_parity, reference
from titan5d.config.schema_execution import ActivationCheckpoint, Compile
from titan5d.launch.local_ranks import run_ranks
from titan5d.parallel.apply import build_parallel_model
from titan5d.parallel.context import ContextParallel
from titan5d.parallel.data import DataParallel
from titan5d.parallel.mesh import Meshes
from titan5d.parallel.zigzag import SequenceCut
from titan5d.topology import Topology

METHODS = ("ring", "allgather", "ulysses")


@pytest.mark.parametrize("balancer", ["headtail", "none"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cp", [2, 4])
def test_methods(cp: int, method: str, balancer: str) -> None:
    context = ContextParallel(method, balancer)  # type: ignore[arg-type]
    assert_parity(Case(Topology(cp=cp), stage=2, accumulation=2, documents=True, steps=2, lr=0.1, context=context))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_beside_data(stage: int) -> None:
    assert_parity(Case(Topology(dp_shard=2, cp=2), stage=stage, accumulation=2, documents=True, steps=2, lr=0.1))


def test_one_document_a_row_and_eight_ranks() -> None:
    assert_parity(Case(Topology(cp=8), stage=3, steps=2, lr=0.1))


@pytest.mark.parametrize("method", METHODS)
def test_beside_tensor(method: str) -> None:
    context = ContextParallel(method)  # type: ignore[arg-type]
    assert_parity(Case(Topology(cp=2, tp=2), stage=2, documents=True, steps=2, lr=0.1, context=context))


def test_all_of_data_context_tensor() -> None:
    assert_parity(Case(Topology(dp_replicate=2, cp=2, tp=2), stage=2, documents=True, max_norm=0.1, steps=2))


def test_recompute_and_compile() -> None:
    case = Case(Topology(dp_shard=2, cp=2), stage=3, documents=True, steps=2, lr=0.1)
    assert_parity(replace(case, recompute="full"))
    assert_parity(replace(case, compile=True), timeout=100)


@pytest.mark.parametrize("place", [0, 63])
@pytest.mark.parametrize(("cp", "balancer"), [(2, "headtail"), (4, "headtail"), (4, "none")])
def test_the_only_target_at_either_end(cp: int, balancer: str, place: int) -> None:
    """Case 006: a count over one rank's tokens alone would halve the gradient at every doubling of the degree."""
    context = ContextParallel(load_balancer=balancer)  # type: ignore[arg-type]
    case = Case(Topology(cp=cp), stage=2, valid=(1,), only_target=place, context=context)
    assert_parity(case)
    assert reference(case).norms[0] > 0


def test_multi_query_heads() -> None:
    assert_parity(Case(Topology(cp=4), stage=2, args=replace(TINY, n_kv_heads=1), documents=True))


def test_chunks_of_odd_length() -> None:
    """Case 023: rows of 68 tokens are 4 chunks of 17."""
    assert_parity(Case(Topology(cp=2), stage=2, seq_len=68, documents=True))


CONTEXTS = [ContextParallel(method, balancer) for method in METHODS for balancer in ("headtail", "none")]  # type: ignore[arg-type]


def token_losses(topology: Topology, contexts: list[ContextParallel]) -> list[torch.Tensor]:
    """Of each way to execute the context axis the loss of every token, (2, 64) in the order of the text."""
    meshes, found = Meshes(topology, "cpu"), []
    tokens = torch.randint(256, (2, 65), generator=torch.Generator().manual_seed(3))
    tokens, labels = tokens[:, :-1], tokens[:, 1:]
    lengths = torch.tensor([5, 11, 48])
    ids = torch.arange(3).repeat_interleave(lengths).expand(2, -1).int().clone()
    ids[1] = 0  # the second row is one document
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]), torch.arange(64)])
    off = ActivationCheckpoint(), Compile()
    for context in contexts:
        data = DataParallel(stage=2 if topology.cp > 1 else 0)
        cpu = torch.device("cpu")
        model = build_parallel_model(TINY, meshes, data, *off, torch.float32, seed=5, device=cpu, context=context)
        cut = SequenceCut(topology.cp, context.load_balancer)
        with torch.no_grad():
            logits = model(tokens, positions, ids)  # (2, 64 / cp, V)
        mine = cut.shard(labels, meshes.coordinates["cp"])
        losses = F.cross_entropy(logits.transpose(1, 2), mine, reduction="none")
        pieces = [torch.empty_like(losses) for _ in range(topology.cp)]
        dist.all_gather(pieces, losses, group=meshes.group("cp"))
        found.append(cut.unshard(pieces))
    return found


def test_every_token_has_its_position_and_its_target() -> None:
    """Case 027: at the edges of pieces (15, 16, 31, 32, 47, 48) as anywhere; documents of 5, 11 and 48 tokens."""
    ((expected,),) = run_ranks(token_losses, 1, Topology(), CONTEXTS[:1])
    assert expected.std() > 0.1
    for ways in run_ranks(token_losses, 4, Topology(cp=4), CONTEXTS, timeout=60):
        for context, losses in zip(CONTEXTS, ways, strict=True):
            assert (losses - expected).abs().max() <= 1e-5, context
