"""Cut 5, experts: each rank holds some experts of every layer, and rows travel to the experts they were routed to.

    rank 0   tokens [A ...]   experts [0 1 . . . . . .]        ep = 4 ranks, 8 experts, top_k = 2:
    rank 1   tokens [B ...]   experts [. . 2 3 . . . .]        a token of A that chose experts 1 and 6 is copied
    rank 2   tokens [C ...]   experts [. . . . 4 5 . .]        to rank 0 (itself) and to rank 3, and the two
    rank 3   tokens [D ...]   experts [. . . . . . 6 7]        results travel back

Axes sliced: experts, and inside an expert the width of its hidden vectors (etp slices). There are no ranks of their
own for it: the ranks that share the rest of the model, dp_shard x cp x tp of them, are the efsdp x etp x ep ranks of
the experts, ep innermost (mesh.py).

    dp_shard 2, tp 2          attention and shared experts       experts with ep = 2       with ep = 4
    rank 0   s 0  t 0         heads 0, shard 0                   half 0, shard 0           quarter 0
    rank 1   s 0  t 1         heads 1, shard 0                   half 1, shard 0           quarter 1
    rank 2   s 1  t 0         heads 0, shard 1                   half 0, shard 1           quarter 2
    rank 3   s 1  t 1         heads 1, shard 1                   half 1, shard 1           quarter 3

An expert is a sum over its hidden width, so it can be cut along that, as a dense feed-forward is:

    w2 (silu(w1 x) * w3 x)  =  sum over slices s of   w2[:, s] (silu(w1[s] x) * w3[s] x)

    ep 2, etp 2    rank 0  slice 0 of 0 1    rank 1  slice 0 of 2 3    rank 2  slice 1 of 0 1    rank 3  slice 1 of 2 3

A row goes to the etp ranks of its expert, and their outputs are summed when they come back: nothing else changes, the
ranks route their own tokens once.

Collectives per layer with experts: four all-to-alls of etp k T D elements of which 1 - 1/(ep etp) leave the rank, two
forward, two backward (expert_dispatch.py), and one of etp E counts. Capacity and the loss of load balance by row are
rules about whole rows: where a row is cut (cp, tp), its counts are summed, or its choices gathered, over the ranks that
share it.

Gradients: an expert, or a slice of one, has seen the tokens of all etp x ep ranks, so its gradient is summed over efsdp
(and dp_replicate) by FSDP2, as any other, with no factor. The router's weight is whole on every rank, its gradient
there a summand.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from titan5d.models.capacity import drop_over_capacity
from titan5d.models.decoder import Decoder, padding_of
from titan5d.models.experts import Experts
from titan5d.models.moe import MoE
from titan5d.models.router import Router
from titan5d.parallel.attention_op import group_named
from titan5d.parallel.expert_dispatch import AllToAll
from titan5d.parallel.mesh import Meshes
from titan5d.parallel.zigzag import LoadBalancer, SequenceCut

HIDDEN_WIDTH = {"w1": 1, "w3": 1, "w2": 2}
"""Which dimension of each stack of matrices is the width of the hidden vectors."""


def apply_expert_parallel(model: Decoder, meshes: Meshes, load_balancer: LoadBalancer = "headtail") -> None:
    """Cuts the experts of `model` (in place, best on the meta device) and gives every rank its routers.

    With tensor ranks the sequence must be cut too (sequence parallelism). The number of experts is a multiple of ep,
    their hidden width of etp.

    Args:
        load_balancer: how rows are cut over context ranks.
    """
    topology, place = meshes.topology, meshes.coordinates
    piece = RowPiece(SequenceCut(topology.cp, load_balancer), place["cp"], topology.tp, place["tp"])
    for block in model.layers.values():
        moe = block.feed_forward
        if not isinstance(moe, MoE):
            continue
        if meshes.stage.size() > 1:
            replicate_router(moe.router, meshes.stage)
        if meshes.row.size() > 1:
            cut_rows(moe.router, piece, meshes.row.get_group())
        if topology.expert_ranks > 1:
            assert meshes.experts is not None
            cut = meshes.experts["ep"] if topology.etp == 1 else meshes.experts["etp", "ep"]
            spread_experts(moe.experts, cut)
            moe.exchange = AllToAll(meshes.group("ep_etp"), topology.etp)
    if meshes.row.size() > 1:
        model.prepare_padding = piece.padding


def replicate_router(router: Router, mesh: DeviceMesh) -> None:
    """Gives every rank the router's weight whole, in the type it is stored in.

    A router decides by differences that a bf16 copy would not have; it is one row an expert, so keeping it whole costs
    little. Its gradient is a partial sum on each rank, added up once a step (gradients.reduce_partial_gradients).
    """
    weight = distribute_tensor(router.weight.detach(), mesh, [Replicate()], src_data_rank=None)
    router.weight = nn.Parameter(weight)
    router.local_weight = _local_summand


def _local_summand(weight: Tensor) -> Tensor:
    """A replicated weight as a plain tensor, whose gradient on this rank is a summand."""
    assert isinstance(weight, DTensor)
    return weight.to_local(grad_placements=[Partial()])


def spread_experts(experts: Experts, mesh: DeviceMesh) -> None:
    """Leaves this rank of `mesh`, (ep) or (etp, ep), its share of the experts, and of each its slice."""
    for name, weight in list(experts.named_parameters()):
        placements = [Shard(0)] if mesh.ndim == 1 else [Shard(HIDDEN_WIDTH[name]), Shard(0)]
        mine = distribute_tensor(weight.detach(), mesh, placements, src_data_rank=None)
        setattr(experts, name, nn.Parameter(mine))
    experts.local_weight = _local_experts


def _local_experts(weight: Tensor) -> Tensor:
    assert isinstance(weight, DTensor)
    return weight.to_local()


@dataclass(frozen=True)
class RowPiece:
    """The part of every row whose tokens this rank routes: of a context rank's tokens a tensor rank's slice.

    Ranks are numbered as in the mesh `row`: context_rank * tensor_ranks + tensor_rank.
    """

    cut: SequenceCut
    context_rank: int
    tensor_ranks: int
    tensor_rank: int

    def of(self, rows: Tensor) -> Tensor:
        """(B, S, ...) -> (B, S / ranks, ...)."""
        return self.cut.shard(rows, self.context_rank).chunk(self.tensor_ranks, dim=1)[self.tensor_rank]

    def join(self, pieces: Tensor) -> Tensor:
        """The pieces of all ranks (ranks, B, S / ranks, ...) -> whole rows (B, S, ...)."""
        contexts = pieces.unflatten(0, (-1, self.tensor_ranks))  # (cp, tp, B, S / ranks, ...)
        return self.cut.unshard([torch.cat(list(slices), dim=1) for slices in contexts])

    def places(self, length: int, device: torch.device) -> Tensor:
        """Where in the whole row the `length` tokens of this rank stand: (length,) int64."""
        ranks = self.cut.degree * self.tensor_ranks
        return self.of(torch.arange(length * ranks, device=device)[None])[0]

    def padding(self, document_ids: Tensor | None) -> Tensor | None:
        """document ids (B, S) of whole rows -> (B, S / ranks) bool."""
        return None if document_ids is None else padding_of(self.of(document_ids))


def cut_rows(router: Router, piece: RowPiece, group: dist.ProcessGroup) -> None:
    """Makes what a router does by row do so for rows that are shared by the ranks of `group`."""
    router.places = piece.places
    router.sum_over_row = partial(sum_counts, group_name=group.group_name)
    router.drop = partial(_drop_in_whole_rows, piece=piece, group_name=group.group_name, ranks=group.size())


def _drop_in_whole_rows(
    experts: Tensor, n_experts: int, factor: float, piece: RowPiece, group_name: str, ranks: int
) -> Tensor:
    whole = piece.join(gather_choices(experts, group_name, ranks))  # (B, S, k)
    return piece.of(drop_over_capacity(whole, n_experts, factor)).contiguous()


# Operators, so that a compiled block stays one graph.


@torch.library.custom_op("titan5d::sum_counts", mutates_args=())
def sum_counts(counts: Tensor, group_name: str) -> Tensor:
    """The sum of whole numbers over the ranks of a group."""
    total = counts.clone()
    dist.all_reduce(total, group=group_named(group_name))
    return total


@torch.library.custom_op("titan5d::gather_choices", mutates_args=())
def gather_choices(experts: Tensor, group_name: str, ranks: int) -> Tensor:
    """(B, s, k) of each rank -> (ranks, B, s, k)."""
    gathered = experts.new_empty(ranks, *experts.shape)
    dist.all_gather(list(gathered.unbind()), experts.contiguous(), group=group_named(group_name))
    return gathered


@sum_counts.register_fake
def _(counts: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(counts)


@gather_choices.register_fake
def _(experts: Tensor, group_name: str, ranks: int) -> Tensor:
    return experts.new_empty(ranks, *experts.shape)
