"""Random generators of a rank: Python, NumPy, torch, and the device. Each rank has its own, and gets its own back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_generators(seed: int, rank: int) -> None:
    """Other numbers on every rank, the same at every start of a run."""
    mixed = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def generator_state(device: torch.device) -> dict[str, Tensor]:
    """All of it as tensors, so that nothing has to be unpickled."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, next_gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*np.asarray(keys).tolist(), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor(gauss, dtype=torch.float64),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor([] if next_gauss is None else [next_gauss], dtype=torch.float64),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_generator_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Puts back what `generator_state` took."""
    torch.set_rng_state(state["torch"])
    *keys, position, has_gauss = state["numpy"].tolist()
    gauss = float(state["numpy_gauss"])
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, *words = state["python"].tolist()
    next_gauss: Any = state["python_gauss"].tolist()
    random.setstate((version, tuple(words), next_gauss[0] if next_gauss else None))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
