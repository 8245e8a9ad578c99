"""What the attention of a cut row is compared with, and a ring of threads that needs no process group."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch._dynamo  # the first call of a custom op imports it: a second for each forked rank, or once here
from torch import Tensor

from titan5d.parallel.attention_blocks import BlockKernels, CpuFlash
from titan5d.parallel.block_plan import plan_ring, prepare_documents
from titan5d.parallel.ring import Wait, ring_backward, ring_forward
from titan5d.parallel.zigzag import SequenceCut


@dataclass(frozen=True)
class Inputs:
    """Whole rows. q and grad_out are (B, S, n_heads, head_dim), k and v (B, S, n_kv_heads, head_dim)."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    documents: Tensor | None

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)


def random_inputs(
    documents: Tensor | None = None,
    heads: int = 8,
    kv_heads: int = 2,
    seq_len: int = 32,
    batch: int = 2,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(n_heads: int) -> Tensor:
        return torch.randn(batch, seq_len, n_heads, head_dim, generator=generator).to(dtype)

    return Inputs(normal(heads), normal(kv_heads), normal(kv_heads), normal(heads), documents)


def documents_from(lengths: Sequence[Sequence[int]]) -> Tensor:
    """Document lengths by row -> ids (B, S) int32."""
    rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    return torch.stack(rows).int()


DOCUMENTS: dict[str, Tensor | None] = {
    "causal": None,
    "one": documents_from([[32], [32]]),
    "many": documents_from([[5, 3, 9, 1, 14], [2, 2, 20, 7, 1]]),
    "at chunk edges": documents_from([[8, 8, 8, 8], [4, 12, 12, 4]]),
    "off chunk edges": documents_from([[7, 9, 6, 10], [3, 13, 11, 5]]),
    "across all ranks": documents_from([[1, 30, 1], [31, 1]]),
    "of length 1": documents_from([[1] * 32, [1] * 32]),
    "one row cut, one whole": documents_from([[16, 16], [32]]),
    "inside chunks": documents_from([[2] * 16, [1, 1, 2] * 8]),
}
"""Two rows of 32 tokens; chunks are 8, 4 or 2 tokens for 2, 4 or 8 zig-zag ranks."""


def full_attention(inputs: Inputs) -> dict[str, Tensor]:
    """out, dq, dk, dv from the definition, on whole rows, in fp64."""
    q, k, v = (x.double().detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    group = q.shape[2] // k.shape[2]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(group, 2)) * inputs.scale
    scores = scores.masked_fill(~live_mask(q.shape[1], inputs.documents), float("-inf"))
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.repeat_interleave(group, 2))
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), inputs.grad_out.double())
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def live_mask(seq_len: int, documents: Tensor | None) -> Tensor:
    """(B or 1, 1, S, S): which query (row) may see which key (column)."""
    mask = torch.ones(seq_len, seq_len, dtype=torch.bool).tril()[None, None]
    return mask if documents is None else mask & (documents[:, None, :, None] == documents[:, None, None, :])


def relative_errors(found: dict[str, Tensor], inputs: Inputs) -> dict[str, float]:
    """Largest difference from `full_attention`, relative to the largest element.

    Where the true gradient is zero (dq and dk of documents of length 1) it is relative to grad_out's largest.
    """
    expected = full_attention(inputs)
    floor = float(inputs.grad_out.abs().max())
    sizes = {name: float(x.abs().max()) for name, x in expected.items()}
    return {
        name: float((found[name].double() - x).abs().max()) / (sizes[name] if sizes[name] > 1e-9 else floor)
        for name, x in expected.items()
    }


@dataclass
class ThreadRing:
    """Runs all ranks of a ring as threads of this process; counts what each rank sends."""

    cut: SequenceCut
    kernels: BlockKernels = field(default_factory=CpuFlash)
    timeout: float = 30.0

    def __post_init__(self) -> None:
        ranks = range(self.cut.degree)
        self.boxes = {(a, b): queue.SimpleQueue[Tensor]() for a in ranks for b in ranks}
        self.forward_bytes = [0 for _ in ranks]
        self.backward_bytes = [0 for _ in ranks]

    def run(self, inputs: Inputs) -> dict[str, Tensor]:
        """out, dq, dk, dv of the whole rows."""
        results: list[dict[str, Tensor]] = [{} for _ in range(self.cut.degree)]
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            try:
                results[rank] = self._rank(inputs, rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(r,), daemon=True) for r in range(self.cut.degree)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self.timeout)
        assert not any(thread.is_alive() for thread in threads), "the ring hangs"
        if errors:
            raise errors[0]
        assert all(box.empty() for box in self.boxes.values()), "something was sent that nobody received"
        return {name: self.cut.unshard([result[name] for result in results]) for name in results[0]}

    def _rank(self, inputs: Inputs, rank: int) -> dict[str, Tensor]:
        q, k, v, grad_out = (self.cut.shard(x, rank) for x in (inputs.q, inputs.k, inputs.v, inputs.grad_out))
        documents = prepare_documents(inputs.documents)
        plan = plan_ring(self.cut, rank, q.shape[0], q.shape[1], documents)
        rest = (plan, self._exchange(rank, self.forward_bytes), self.kernels, inputs.scale)
        out, lse = ring_forward(q, k, v, *rest)
        rest = (plan, self._exchange(rank, self.backward_bytes), self.kernels, inputs.scale)
        dq, dkv = ring_backward(grad_out, q, k, v, out, lse, *rest)
        return {"out": out, "dq": dq, "dk": dkv[0], "dv": dkv[1]}

    def _exchange(self, rank: int, counter: list[int]):
        def exchange(sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]) -> Wait:
            for x, peer in sends:
                counter[rank] += x.nbytes
                self.boxes[rank, peer].put(x.clone())

            def wait() -> None:
                for x, peer in receives:
                    x.copy_(self.boxes[peer, rank].get(timeout=self.timeout))

            return wait

        return exchange
