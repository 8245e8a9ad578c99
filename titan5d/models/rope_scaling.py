"""Frequencies of the rotary embedding, plain and stretched to longer contexts. Pure Python.

A head of width `d` has `d / 2` planes; plane i turns by `position * theta ** (-2 i / d)`. To train or run beyond the
length a model was made for, slow planes (few turns within the original length) are slowed down by `factor`, fast ones
are left alone, and those in between are blended. The two rules here differ in how they blend.

What a rule gives depends on its own numbers only, never on the length of the sequences at hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def plain_frequencies(head_dim: int, theta: float) -> list[float]:
    """`theta ** (-2 i / head_dim)` for i in 0..head_dim/2-1, radians per position (RoFormer, eq. 15)."""
    return [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's rule: blend by the number of turns a plane makes within the original length.

    Attributes:
        factor: how much slower the slow planes turn.
        low_freq_factor: planes with fewer turns than this are slowed down fully.
        high_freq_factor: planes with more turns than this stay as they are.
        original_max_seq_len: context the frequencies were made for, tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int

    @property
    def attention_factor(self) -> float:
        """Factor on the rotated queries and on the rotated keys."""
        return 1.0

    def frequencies(self, head_dim: int, theta: float) -> list[float]:
        """Radians per position of each plane, (head_dim / 2,)."""
        scaled = []
        for frequency in plain_frequencies(head_dim, theta):
            turns = self.original_max_seq_len * frequency / (2 * math.pi)
            keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
            keep = min(max(keep, 0.0), 1.0)
            scaled.append(keep * frequency + (1 - keep) * frequency / self.factor)
        return scaled

    def problems(self) -> list[str]:
        """Why this rule cannot work, one sentence each."""
        found = _common_problems(self.factor, self.original_max_seq_len)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            found.append(
                f"model.rope_scaling: low_freq_factor = {self.low_freq_factor} and high_freq_factor ="
                f" {self.high_freq_factor}, but 0 < low_freq_factor < high_freq_factor is needed (Llama 3.1: 1 and 4)"
            )
        return found


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """0.1 weight ln(factor) + 1 (YaRN, eq. 22). `weight` is what DeepSeek's files call mscale and mscale_all_dim."""
    return 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): blend linearly over the planes, and sharpen the softmax.

    Attributes:
        factor: how much slower the slow planes turn.
        original_max_seq_len: context the frequencies were made for, tokens.
        beta_fast, beta_slow: planes with more turns than beta_fast within the original context stay as they are,
            those with fewer than beta_slow are slowed down fully.
        attention_factor: factor on the rotated queries and on the rotated keys, which sharpens the softmax; 0 stands
            for the paper's value, `yarn_mscale(factor)`, and is replaced by it.
    """

    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0

    def __post_init__(self) -> None:
        if self.attention_factor == 0 and self.factor >= 1:
            object.__setattr__(self, "attention_factor", yarn_mscale(self.factor))

    @property
    def softmax_multiplier(self) -> float:
        """What the attention scores gain by it; a model that rotates only part of a head scales its scores by this."""
        return self.attention_factor**2

    def frequencies(self, head_dim: int, theta: float) -> list[float]:
        """Radians per position of each plane, (head_dim / 2,)."""
        first = max(math.floor(self._plane(self.beta_fast, head_dim, theta)), 0)
        last = min(math.ceil(self._plane(self.beta_slow, head_dim, theta)), head_dim - 1)
        width = max(last - first, 0.001)  # one plane may be both ends
        scaled = []
        for i, frequency in enumerate(plain_frequencies(head_dim, theta)):
            slow = min(max((i - first) / width, 0.0), 1.0)
            scaled.append((1 - slow) * frequency + slow * frequency / self.factor)
        return scaled

    def _plane(self, turns: float, head_dim: int, theta: float) -> float:
        """The (fractional) plane that makes so many turns within the original context."""
        return head_dim * math.log(self.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    def problems(self) -> list[str]:
        """Why this rule cannot work, one sentence each."""
        found = _common_problems(self.factor, self.original_max_seq_len)
        if self.attention_factor < 0:
            found.append(f"model.rope_scaling: attention_factor = {self.attention_factor}, but it is above 0")
        if not 0 < self.beta_slow < self.beta_fast:
            found.append(
                f"model.rope_scaling: beta_slow = {self.beta_slow} and beta_fast = {self.beta_fast}, but"
                " 0 < beta_slow < beta_fast is needed (the paper: 1 and 32)"
            )
        return found


RopeScaling = Llama3Scaling | YarnScaling


def _common_problems(factor: float, original_max_seq_len: int) -> list[str]:
    found = []
    if factor < 1:
        found.append(f"model.rope_scaling: factor = {factor}, but contexts are stretched, so it is 1 or more")
    if original_max_seq_len < 1:
        found.append(
            f"model.rope_scaling: original_max_seq_len = {original_max_seq_len}, but it counts tokens"
        )
    return found
