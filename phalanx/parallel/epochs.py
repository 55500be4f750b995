"""Whether somebody has forgotten set_epoch(), with a sampler that is not of Phalanx.

torch's DistributedSampler deals the same shares in the same order until its epoch is set. Passes over a DataLoader
cannot be seen from outside without replacing methods of torch's; so they are looked at where Phalanx hands out the
batches itself, in `phalanx.progress` and `ddp.micro_batches`. Phalanx's own sampler moves on by itself.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from phalanx import misuse

_begun: weakref.WeakKeyDictionary[DistributedSampler[Any], int | None] = weakref.WeakKeyDictionary()
"""The epoch that each sampler's last pass had; None once it has been warned about."""


def pass_begins(batches: object) -> None:
    """Note that a pass over `batches` begins; warn if its sampler has the epoch of the pass before. No collective."""
    sampler = _sampler_of(batches) if isinstance(batches, DataLoader) else None
    if sampler is None or not sampler.shuffle or type(sampler).__module__.startswith("phalanx."):
        return
    before = _begun.get(sampler, -1)
    if before is None:
        return
    _begun[sampler] = sampler.epoch
    if before == sampler.epoch:
        _begun[sampler] = None
        misuse.warn(
            "no-set-epoch",
            f"a second pass over torch's DistributedSampler in epoch {sampler.epoch}: it deals the same items to the "
            "same ranks in the same order again",
            "sampler.set_epoch(epoch) before each pass; or phalanx.DistributedSampler, which moves on by itself",
            sampler.rank,
        )  # fmt: skip


def _sampler_of(loader: DataLoader[Any]) -> DistributedSampler[Any] | None:
    candidates = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    return next((each for each in candidates if isinstance(each, DistributedSampler)), None)
