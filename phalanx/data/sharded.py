"""Each rank's share of what any sampler draws: weighted, custom, or a batch sampler, dealt batch by batch.

Every rank draws the whole epoch from the inner sampler, from random numbers seeded alike, and takes its
share. Whether the ranks have drawn the same is compared when a pass begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from phalanx.data import orders, state
from phalanx.data.passes import Pass
from phalanx.data.sampler import DistributedSampler
from phalanx.errors import MisuseError


class ShardedSampler(DistributedSampler):
    """Give each rank its own share of what `sampler` draws, in its order.

        sampler = phalanx.ShardedSampler(WeightedRandomSampler(weights, 1000))
        batches = phalanx.ShardedSampler(BucketBatchSampler(...))  # whole batches; DataLoader(batch_sampler=batches)

    The inner sampler may draw indices, batches or anything else; its length may change from epoch to epoch.
    Before it draws an epoch, the random numbers of torch, numpy and random, and a torch.Generator in its
    attribute `generator`, are seeded with `seed + epoch`, and its `set_epoch` is called if it has one; so every
    rank draws the same. What it draws is held in memory for the epoch. The other arguments, the epochs and the
    state are those of `DistributedSampler`; padding repeats what was drawn first.

    Each pass compares what the ranks have drawn: it is then collective, every rank of the default group, and
    raises RankMismatchError on all if it differs. With `check=False`, or with another number of ranks than that
    group has, nothing is compared, and one rank may make a pass alone.
    """

    def __init__(
        self,
        sampler: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool = True,
        total_batch_size: int | None = None,
        check: bool = True,
    ) -> None:
        name = type(sampler).__name__
        if hasattr(sampler, "num_replicas"):
            raise MisuseError(
                f"ShardedSampler({name}(...)), which deals out shares to ranks already",
                "ShardedSampler with the sampler of one process, or that sampler alone", rank,
            )  # fmt: skip
        if not hasattr(sampler, "__len__"):
            raise MisuseError(
                f"ShardedSampler({name}(...)), which has no length, so that no rank knows its number of steps",
                "define __len__ in it: how many it draws, at least about", rank,
            )  # fmt: skip
        super().__init__(
            sampler, num_replicas, rank, False, seed, drop_last, pad=pad, total_batch_size=total_batch_size
        )
        self.sampler, self.check = sampler, check

    def _draw(self, epoch: int) -> tuple[orders.Order, int, str]:
        items = orders.drawn(self.sampler, self.seed, epoch)
        name = orders.name_of(items)
        if self.check:
            state.agree_on_order(name, epoch, self.num_replicas, self.rank)
        return lambda places: [items[place] for place in places], len(items), name

    def _agreed(self) -> state.State:
        return {"seed": self.seed, "shuffle": type(self.sampler).__name__, "length": None}

    def _sorted_by(self, places: np.ndarray, this: Pass) -> np.ndarray:
        return places


class PerRankState(Sampler[Any]):
    """A sampler as torchdata's StatefulDataLoader wants it: its state is this rank's own, and no collective.

        sampler = phalanx.DistributedSampler(data)
        loader = StatefulDataLoader(data, 32, sampler=phalanx.PerRankState(sampler), num_workers=4)

    That loader saves each rank's own state, prefetched batches taken into account, and resumes with the same
    number of ranks; `phalanx.loader` does with any number.
    """

    def __init__(self, sampler: DistributedSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the epoch of all passes until the next call."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> state.State:
        """Return this rank's part of the sampler's state, counted by what has been drawn."""
        return self.sampler.local_state_dict()

    def load_state_dict(self, state_dict: state.State) -> None:
        """Go on from this rank's part."""
        self.sampler.load_state_dict(state_dict)
