"""The global random states of torch (CPU), numpy and random: seed them, or lend them for a while."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from phalanx.data.permutation import mixed


def seed_all(seed: int) -> None:
    """Seed all three, each with a number of its own."""
    torch.default_generator.manual_seed(mixed(seed, 0) >> 1)
    np.random.seed(mixed(seed, 1) & 0xFFFFFFFF)
    random.seed(mixed(seed, 2))


def states() -> tuple[Any, Any, Any]:
    """Return the states of all three."""
    return torch.random.get_rng_state(), np.random.get_state(), random.getstate()


def restore(saved: tuple[Any, Any, Any]) -> None:
    """Put all three back to what `states` has returned."""
    torch.random.set_rng_state(saved[0])
    np.random.set_state(saved[1])
    random.setstate(saved[2])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all three for this block, and put them back afterwards."""
    before = states()
    seed_all(seed)
    try:
        yield
    finally:
        restore(before)


class Stream:
    """Random states of one's own, which stand in for the global ones inside `with stream:`."""

    def __init__(self, seed: int) -> None:
        with seeded(seed):
            self._own = states()
        self._others: tuple[Any, Any, Any] | None = None

    def __enter__(self) -> None:
        self._others = states()
        restore(self._own)

    def __exit__(self, *error: object) -> None:
        self._own = states()
        if self._others is not None:
            restore(self._others)
