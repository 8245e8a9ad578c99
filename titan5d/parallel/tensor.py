"""Cut 2, hidden (tensor parallel) and 3a, sequence (sequence parallel): several ranks share every matrix product.

Axis sliced: the width of each matrix, and between the products the sequence. t ranks, t = 4:

             residual stream          attention                     residual stream
    rank 0   tokens [#...]  gather    heads [## .. .. ..]   reduce- tokens [#...]
    rank 1   tokens [.#..]  ------->  heads [.. ## .. ..]   ------> tokens [.#..]   the feed-forward likewise,
    rank 2   tokens [..#.]  all       heads [.. .. ## ..]   scatter tokens [..#.]   with slices of its width for
    rank 3   tokens [...#]  tokens    heads [.. .. .. ##]           tokens [...#]   heads

    weight                         placement       cut by
    wq, wk, wv; w1, w3             Shard(0)        outputs ("column"): rank r makes its heads, its slice of the width
    wo; w2                         Shard(1)        inputs ("row"): rank r's summand of the output
    wk, wv with n_kv_heads < t     Replicate       each rank uses the one head its queries read
    latent attention's down        Replicate       nothing: they are small, and all heads read what they make
    tok_embeddings, output         Shard(0)        vocabulary (vocab_parallel.py)
    all norms                      Replicate       nothing

Collectives per block: forward two gathers and two reduce-scatters of T D elements, backward the same, and two gathers
more for the inputs that were not kept (tensor_products.py). Without sequence parallelism: two all-reduces each way.

A parameter's placement says what its gradient is. Of a replicated parameter each rank makes a summand where ranks see
different tokens or different heads, and the whole where they see the same; the table's last rows say which.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from titan5d.models.attention import Attention
from titan5d.models.decoder import Decoder
from titan5d.models.experts import Experts
from titan5d.models.feed_forward import FeedForward
from titan5d.models.mla import LatentAttention
from titan5d.models.norm import RMSNorm, rms_norm
from titan5d.models.output import OutputHead
from titan5d.models.router import Router
from titan5d.parallel.tensor_collectives import TensorCut
from titan5d.parallel.tensor_products import TensorParallelProducts, local_replica
from titan5d.parallel.vocab_parallel import VocabParallelEmbedding, VocabParallelHead


@dataclass(frozen=True)
class TensorParallel:
    """How the tensor axis is executed.

    Attributes:
        sequence_parallel: norms and residuals work on S/t tokens of each row; otherwise on all, on every rank.
        loss_parallel: the softmax is completed from three numbers a token; otherwise each chunk's logits are gathered.
        regather_input: see TensorCut. Blocks that are recomputed whole gather again anyway, so they should keep it.
        overlap: see TensorCut.
    """

    sequence_parallel: bool = True
    loss_parallel: bool = True
    regather_input: bool = True
    overlap: bool = False


Placements = dict[str, Placement]

COLUMN: Placements = {"weight": Shard(0), "bias": Shard(0)}
ROW: Placements = {"weight": Shard(1), "bias": Replicate()}
REPLICATED: Placements = {"weight": Replicate(), "bias": Replicate()}

# Kind of module -> its part ("" = itself) -> where that part's weight and bias live.
PLAN: dict[type[nn.Module], dict[str, Placements]] = {
    nn.Embedding: {"": COLUMN},
    Attention: {"wq": COLUMN, "wk": COLUMN, "wv": COLUMN, "wo": ROW},
    LatentAttention: {
        "wq": COLUMN,
        "wq_a": REPLICATED,
        "wq_b": COLUMN,
        "wkv_a": REPLICATED,
        "wkv_b": COLUMN,
        "wo": ROW,
    },
    FeedForward: {"w1": COLUMN, "w3": COLUMN, "w2": ROW},
    RMSNorm: {"": REPLICATED},
    OutputHead: {"": COLUMN},
}
FEW_KV_HEADS: dict[str, Placements] = {"wk": REPLICATED, "wv": REPLICATED}
LATER = (Router, Experts)
"""Placed by the expert cut, which comes next."""


class ReplicatedNorm(RMSNorm):
    """An RMSNorm whose weight is a replicated DTensor.

    Args:
        partial: this rank normalises tokens or heads of its own, so its gradient of the weight is a summand.
    """

    def __init__(self, norm: RMSNorm, partial: bool) -> None:
        nn.Module.__init__(self)
        self.eps, self.weight, self.partial = norm.eps, norm.weight, partial

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, local_replica(self.weight, self.partial), self.eps)


class ReplicatedLinear(nn.Linear):
    """A linear layer whose weight is a replicated DTensor; `partial` as in ReplicatedNorm."""

    def __init__(self, linear: nn.Linear, partial: bool) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias, self.partial = linear.weight, linear.bias, partial

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else local_replica(self.bias, self.partial)
        return F.linear(x, local_replica(self.weight, self.partial), bias)


def apply_tensor_parallel(model: Decoder, mesh: DeviceMesh, plan: TensorParallel) -> None:
    """Cuts `model` (in place, best on the meta device) over the ranks of the one-dimensional `mesh`.

    The sizes must divide as config/check.py demands. Afterwards every parameter is a DTensor on `mesh` under its old
    name; the hidden states between blocks are (B, S/t, D) with sequence parallelism.

    Raises ValueError naming parameters for which there is no plan.
    """
    cut = TensorCut(
        mesh.get_group().group_name,
        mesh.size(),
        mesh.get_local_rank(),
        plan.sequence_parallel,
        plan.regather_input,
        plan.overlap,
    )
    few_kv_heads = model.args.n_kv_heads < cut.degree
    for module in list(model.modules()):
        parts = PLAN.get(type(module), {})
        if isinstance(module, Attention) and few_kv_heads:
            parts = parts | FEW_KV_HEADS
        for name, placements in parts.items():
            part = getattr(module, name) if name else module
            if part is not None:
                _distribute(part, mesh, placements)
    if model.args.tie_embeddings and model.tok_embeddings is not None and model.output is not None:
        model.output.weight = model.tok_embeddings.weight  # two names of one tensor again
    _check_complete(model)

    products = TensorParallelProducts(cut, _kv_rows(model, cut) if few_kv_heads else None)
    for module in list(model.modules()):
        if isinstance(module, Attention | LatentAttention | FeedForward):
            module.products = products
        for name, child in module.named_children():
            if isinstance(child, RMSNorm):
                own_heads = isinstance(module, Attention)  # norms of query and key heads
                setattr(module, name, ReplicatedNorm(child, partial=own_heads or plan.sequence_parallel))
            elif isinstance(child, nn.Linear) and PLAN.get(type(module), {}).get(name) is REPLICATED:
                setattr(module, name, ReplicatedLinear(child, partial=plan.sequence_parallel))
    if model.tok_embeddings is not None:
        model.tok_embeddings = VocabParallelEmbedding(model.tok_embeddings, cut)
    if model.output is not None:
        model.output = VocabParallelHead(model.output, cut, gather_logits=not plan.loss_parallel)


def _distribute(module: nn.Module, mesh: DeviceMesh, placements: Placements) -> None:
    """Makes the parameters of one module DTensors; each rank keeps its slice of what it has, nothing is sent."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        slices = distribute_tensor(parameter.detach(), mesh, [placements[name]], src_data_rank=None)
        setattr(module, name, nn.Parameter(slices, parameter.requires_grad))


def _kv_rows(model: Decoder, cut: TensorCut) -> tuple[int, int]:
    """Rows of wk and wv of the one key/value head that this rank's query heads read."""
    args = model.args
    head = cut.rank * args.n_kv_heads // cut.degree
    return head * args.head_dim, (head + 1) * args.head_dim


def _check_complete(model: Decoder) -> None:
    later = {
        parameter
        for module in model.modules()
        if isinstance(module, LATER)
        for parameter in module.parameters()
    }
    left = [
        name
        for name, parameter in model.named_parameters()
        if not isinstance(parameter, DTensor) and parameter not in later
    ]
    if left:
        raise ValueError(
            f"tensor parallelism has no plan for {', '.join(left)}: without one the ranks would hold copies whose"
            " gradients nobody sums; add the module's kind to PLAN in parallel/tensor.py"
        )
