"""The router: which experts a token goes to, and with what weight. Always fp32.

    logits = x W^T                                   fp32, whatever the model computes in
    scores = softmax(logits) or sigmoid(logits)
    choice = scores + bias                           the bias decides who is chosen and enters no weight
    groups = the n_limited_groups with the highest sum of their two best choices      (DeepSeek-V3, 2.1.2)
    experts = top_k of choice within the groups
    weights = scores of the experts; divided by their sum (router_normalize); times router_scale

bf16 keeps 8 bits: logits that differ by less than half a percent would tie, and the bias, which moves by thousandths,
would stand still.

Padding goes to no expert and counts nowhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan5d.models.args import ModelArgs
from titan5d.models.balance import count_choices, load_balancing_loss, updated_bias, with_loss, z_loss
from titan5d.models.capacity import drop_over_capacity

ENTROPY, AUX_LOSS, Z_LOSS = 0, 1, 2
"""Places in `step_sums`."""


class Router(nn.Module):
    """Chooses top_k of n_experts for each token.

    What a step must know of the whole batch is told it by `begin_step`; what it counts is collected in `step_counts`
    and `step_sums`, for `end_step`. A forward pass only *sets* the counts of its micro-batch, and the decoder adds them
    up, since a block may be recomputed and the decoder never is: so nothing is counted twice.

    Attributes:
        weight: (E, D).
        bias: (E,) fp32, saved: the selection bias.
        load: (E,) int64, saved: choices of each expert in the whole step before.
        step_counts: (E + 1,) int64: choices of each expert so far in this step, and how many choices were dropped.
        step_sums: (3,) fp32, sums so far of: entropy of the scores (nats, over tokens), load-balancing loss, z-loss.
        local_weight: `weight` -> the tensor to multiply with on this device; here it is the same.
        sum_over_row: adds up counts (B, E) over the devices that hold parts of these rows; here there is one.
        drop: choices (B, S, k), n_experts, factor -> the choices, those over an expert's capacity of the row replaced.
        places: how many tokens of each row are here, device -> (S,) int64, their places in the whole row.
    """

    bias: Tensor
    load: Tensor
    factors: Tensor
    micro_batch_counts: Tensor
    micro_batch_sums: Tensor
    step_counts: Tensor
    step_sums: Tensor

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.n_experts, self.top_k = args.n_experts, args.top_k
        self.score, self.normalize, self.scale = args.router_score, args.router_normalize, args.router_scale
        self.n_groups, self.n_limited_groups = args.n_expert_groups, args.n_limited_groups
        self.balance = args.balance
        self.weight = nn.Parameter(torch.empty(args.n_experts, args.dim))
        nn.init.normal_(self.weight, std=0.02)
        self.local_weight: Callable[[Tensor], Tensor] = _same
        self.sum_over_row: Callable[[Tensor], Tensor] = _same
        self.drop: Callable[[Tensor, int, float], Tensor] = drop_over_capacity
        self.places: Callable[[int, torch.device], Tensor] = _whole_row
        for name, value in self._fresh_buffers(self.weight.device).items():
            self.register_buffer(name, value, persistent=name in ("bias", "load"))

    def _fresh_buffers(self, device: torch.device | str) -> dict[str, Tensor]:
        counts = torch.zeros(self.n_experts + 1, dtype=torch.int64, device=device)
        sums = torch.zeros(3, dtype=torch.float32, device=device)
        return {
            "bias": torch.zeros(self.n_experts, dtype=torch.float32, device=device),
            "load": torch.zeros(self.n_experts, dtype=torch.int64, device=device),
            # a training step without begin_step is to be seen
            "factors": torch.full((2,), float("nan"), device=device),
            "micro_batch_counts": counts,
            "micro_batch_sums": sums,
            "step_counts": counts.clone(),
            "step_sums": sums.clone(),
        }

    def init_buffers(self, device: torch.device | str) -> None:
        """The state of a model that has not trained: bias and counts 0. A checkpoint is loaded after it."""
        for name, value in self._fresh_buffers(device).items():
            setattr(self, name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = getattr(self, name)
            if new.dtype != old.dtype:  # a model that is cast to bf16 keeps its bias and sums
                setattr(self, name, old.to(new.device))
        return self

    def forward(self, x: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
        """
        Args:
            x: (B, S, D).
            padding: (B, S) bool, True where there is no token; None = nowhere.

        Returns:
            (experts, weights), (B, S, top_k) each: int64, n_experts where a choice goes nowhere; and fp32.
        """
        with torch.autocast(x.device.type, enabled=False):
            weight = self.local_weight(self.weight).to(x.device, torch.float32)
            logits = F.linear(x.float(), weight)  # (B, S, E)
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        experts = self._choose(scores.detach())
        weights = scores.gather(-1, experts)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * self.scale
        if padding is not None:
            experts = experts.masked_fill(padding.unsqueeze(-1), self.n_experts)
        sent = experts
        if self.balance.capacity_factor:
            sent = self.drop(experts, self.n_experts, self.balance.capacity_factor)
        if self.training:
            weights = self._balanced(weights, logits, scores, experts, sent, padding)
        return sent, weights

    def _choose(self, scores: Tensor) -> Tensor:
        """The top_k experts of each token: (B, S, E) -> (B, S, top_k)."""
        if self.balance.force_load_balance:
            # by the place in the whole row alone, so that no layout shows in it
            first = self.places(scores.shape[1], scores.device) * self.top_k  # (S,)
            turns = first[:, None] + torch.arange(self.top_k, device=scores.device)  # (S, k)
            return (turns % self.n_experts).expand(scores.shape[0], -1, -1)
        choice = scores + self.bias
        if self.n_limited_groups < self.n_groups:
            groups = choice.unflatten(-1, (self.n_groups, -1))  # (B, S, groups, experts of one)
            value = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)  # (B, S, groups)
            best = value.topk(self.n_limited_groups, dim=-1).indices
            out = torch.ones_like(value, dtype=torch.bool).scatter_(-1, best, False)
            choice = groups.masked_fill(out.unsqueeze(-1), float("-inf")).flatten(-2)
        return choice.topk(self.top_k, dim=-1).indices

    def _balanced(
        self,
        weights: Tensor,
        logits: Tensor,
        scores: Tensor,
        experts: Tensor,
        sent: Tensor,
        padding: Tensor | None,
    ) -> Tensor:
        """The weights, with the gradients of the losses attached; sets the statistics of this micro-batch."""
        shares = scores if self.score == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)
        if padding is not None:
            shares = shares.masked_fill(padding.unsqueeze(-1), 0)
        counts = count_choices(experts, self.n_experts)  # (B, E)
        losses = torch.zeros(2, device=logits.device)
        if self.balance.aux_loss_coefficient or self.balance.z_loss_coefficient:
            by_row = self.sum_over_row(counts)
            kind, load = self.balance.aux_loss_kind, self.load
            aux = load_balancing_loss(shares.sum(1), by_row, self.top_k, kind, load)
            losses = torch.stack((aux, z_loss(logits, padding))) * self.factors
            weights = with_loss(weights, losses.sum())
        with torch.no_grad():
            dropped = (sent != experts).sum()
            self.micro_batch_counts.copy_(torch.cat((counts.sum(0), dropped[None])))
            entropy = torch.special.entr(shares).sum()
            self.micro_batch_sums.copy_(torch.cat((entropy[None], losses.detach())))
        return weights

    @torch.no_grad()
    def begin_step(self, tokens: int, rows: int, micro_batches: int) -> None:
        """Says what the optimizer step holds, over all ranks and its whole accumulation: what the losses divide by.

        Args:
            tokens: without padding.
            rows: sequences.
            micro_batches: forward passes whose rows differ.
        """
        parts = {"sequence": rows, "micro_batch": micro_batches, "global_batch": tokens}[
            self.balance.aux_loss_kind
        ]
        aux = self.balance.aux_loss_coefficient / parts
        self.factors.copy_(torch.tensor([aux, self.balance.z_loss_coefficient / tokens]))

    @torch.no_grad()
    def add_micro_batch(self) -> None:
        """Adds what the last forward pass counted to the step's counts."""
        self.step_counts += self.micro_batch_counts
        self.step_sums += self.micro_batch_sums

    @torch.no_grad()
    def end_step(self, load: Tensor, updated: bool) -> None:
        """Moves the bias, once per optimizer step, and starts counting anew.

        Args:
            load: (E,) int64: choices of each expert over all ranks.
            updated: whether the optimizer stepped; when a step is left out, so is the bias.
        """
        if updated:
            if self.balance.bias_update_rate:
                self.bias.copy_(updated_bias(self.bias, load, self.balance.bias_update_rate))
            self.load.copy_(load)
        self.step_counts.zero_()
        self.step_sums.zero_()

    def extra_repr(self) -> str:
        return f"n_experts={self.n_experts}, top_k={self.top_k}, score={self.score}"


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _whole_row(length: int, device: torch.device) -> Tensor:
    return torch.arange(length, device=device)
