"""What a block keeps for backward: A1 / t, and what gathering again saves (docs/tensor_parallel.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch._dynamo  # the first custom operator imports it: once here instead of on each forked rank

from tests.parity import TINY, Case, global_batch
from titan5d.config.schema_execution import ActivationCheckpoint, Compile
from titan5d.launch.local_ranks import run_ranks
from titan5d.models.args import ModelArgs
from titan5d.parallel.apply import build_parallel_model
from titan5d.parallel.data import DataParallel
from titan5d.parallel.mesh import Meshes
from titan5d.parallel.tensor import TensorParallel
from titan5d.topology import Topology

WIDE = replace(TINY, n_layers=1, dim=128, head_dim=16, ffn_dim=384)
ROWS, SEQ, FP32 = 2, 64, 4


def kept_bytes(tp: int, tensor: TensorParallel, compiled: bool) -> int:
    """Bytes of all storages that one block saves for backward, without parameters and rotary tables."""
    case = Case(Topology(tp=tp), args=WIDE, seq_len=SEQ, valid=(SEQ,) * ROWS)
    meshes = Meshes(case.topology, "cpu")
    model = build_parallel_model(
        case.args,
        meshes,
        DataParallel(0),
        ActivationCheckpoint(),
        Compile(enable=compiled, backend="aot_eager"),
        torch.float32,
        seed=5,
        device=torch.device("cpu"),
        tensor=tensor,
    )
    tokens, _, positions, _ = global_batch(case, 0)
    assert model.tok_embeddings is not None
    h = model.tok_embeddings(tokens).detach().requires_grad_()
    cos, sin = model.rope(positions, SEQ)
    others = {storage(cos), storage(sin), *(storage(local(p)) for p in model.parameters())}
    kept: dict[int, int] = {}

    def pack(saved: torch.Tensor) -> torch.Tensor:
        if storage(saved) not in others:
            kept[storage(saved)] = saved.untyped_storage().nbytes()
        return saved

    block = model.layers["0"]
    block(h, cos, sin, None, None)  # compiles
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        out = block(h, cos, sin, None, None)
    assert out.shape == h.shape
    return sum(kept.values())


def local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def layer_elements(args: ModelArgs) -> int:
    """A1 a token in elements: two norm inputs and outputs, q, k, v, attention's output and its log-sum-exp, gate, up
    and their product, and the two norms' factors."""
    heads, kv_heads = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    return 4 * args.dim + 2 * heads + 2 * kv_heads + args.n_heads + 3 * args.ffn_dim + 2


A1 = ROWS * SEQ * FP32 * layer_elements(WIDE)
GATHERED = 2 * ROWS * SEQ * FP32 * WIDE.dim
"""The inputs of q, k, v and of gate, up, whole."""


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_block_keeps_its_share(tp: int) -> None:
    assert run_ranks(kept_bytes, tp, tp, TensorParallel(), False)[0] == pytest.approx(A1 / tp, rel=0.03)


@pytest.mark.parametrize("tp", [2, 4])
def test_what_gathering_again_saves(tp: int) -> None:
    kept = run_ranks(kept_bytes, tp, tp, TensorParallel(regather_input=False), False)[0]
    # the pieces of the gathered inputs need not be kept beside them
    assert kept == pytest.approx(A1 / tp + GATHERED * (1 - 1 / tp), rel=0.03)


@pytest.mark.parametrize("tp", [2, 4])
def test_without_sequence_parallelism_the_stream_is_whole(tp: int) -> None:
    kept = run_ranks(kept_bytes, tp, tp, TensorParallel(sequence_parallel=False), False)[0]
    stream = ROWS * SEQ * FP32 * (4 * WIDE.dim + 2)
    assert kept == pytest.approx(stream + (A1 - stream) / tp, rel=0.03)


def test_a_compiled_block_gathers_in_backward_too() -> None:
    # a compiler that moved the second gather into forward would keep both whole inputs, 1.4 times as much
    assert run_ranks(kept_bytes, 4, 4, TensorParallel(), True, timeout=100)[0] <= 1.03 * A1 / 4
