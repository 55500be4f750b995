"""In which order an epoch goes through its items: a function from places (int64) to items, drawn per epoch."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from phalanx.data.permutation import HashedPermutation, mixed
from phalanx.data.randomness import seeded
from phalanx.errors import MisuseError

Order = Callable[[np.ndarray], list[Any]]

HASHED = "hashed"
_LARGE = 1 << 27  # items: a permutation of so many takes 1 GiB in each process


def check_shuffle(shuffle: object, rank: int | None) -> None:
    """Raise MisuseError for a string other than "hashed"."""
    if isinstance(shuffle, str) and shuffle != HASHED:
        raise MisuseError(f"shuffle={shuffle!r}", f'True, False or "{HASHED}"', rank)


def indices(length: int, shuffle: bool | str, seed: int, epoch: int, rank: int) -> Order:
    """The order of a data set's indices: as they are, torch's permutation, or a hashed one."""
    if shuffle == HASHED:
        hashed = HashedPermutation(length, mixed(seed, epoch))
        return lambda places: hashed(places).tolist()
    if not shuffle:
        return np.ndarray.tolist
    if length >= _LARGE:
        warnings.warn(
            f"[rank {rank}] shuffle=True draws a permutation of {length} items, {8 * length / 2**30:.1f} GiB in each "
            f'process. shuffle="{HASHED}" needs no memory; its order is another one.',
            stacklevel=5,
        )
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    permutation = torch.randperm(length, generator=generator).numpy()
    return lambda places: permutation[places].tolist()


def drawn(sampler: Any, seed: int, epoch: int) -> list[Any]:
    """Return all that a sampler draws for an epoch, the same in every process.

    Its random numbers are seeded with `seed + epoch`, whether it takes them from torch, numpy, random, or a
    torch.Generator in its attribute `generator` (of its inner samplers, too). A `set_epoch` that it has is
    called. The global random states are as before afterwards.
    """
    for part in _chain(sampler):
        if isinstance(getattr(part, "generator", None), torch.Generator):
            part.generator.manual_seed(seed + epoch)
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)
    with seeded(seed + epoch):
        return list(sampler)


def name_of(items: Sequence[Any]) -> str:
    """A short name of an order of items: equal names, equal orders."""
    return hashlib.blake2b(repr(items).encode(), digest_size=8).hexdigest()


def _chain(sampler: Any) -> list[Any]:
    """The sampler and those it is made of, by the attributes that torch's classes have for them."""
    parts = [sampler]
    for part in parts:
        inner = [getattr(part, name, None) for name in ("sampler", "batch_sampler")]
        parts += [one for one in inner if one is not None and all(one is not known for known in parts)]
    return parts
