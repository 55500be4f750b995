"""The random states of this rank: python's, numpy's, torch's on the CPU and on the current CUDA device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """Return the states of all generators that phalanx.seed seeds, as data that a checkpoint holds."""
    version, numbers, gauss = random.getstate()
    name, words, *rest = np.random.get_state()
    return {
        "python": [version, torch.tensor(numbers), gauss],
        "numpy": [name, words, *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def restore(state: dict[str, Any]) -> None:
    """Put the generators back to where `capture` found them."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(state["torch"].clone())
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].clone())
