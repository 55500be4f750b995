"""Each rank's share of a data set, for every epoch.

The order is torch's bit for bit: a permutation seeded with `seed + epoch`, lengthened by repeating its
beginning (or cut, with `drop_last`) to a multiple of the number of ranks, dealt out like cards. Two
things are added: shares without padding, and an epoch that moves on when nobody calls `set_epoch`.

Who moves the epoch on. Once `set_epoch` has been called the user does, exactly as in torch: every pass
has the epoch that was set last. Before that the sampler does, at the beginning of a pass, provided the
previous pass took at least a quarter of this rank's items. The proviso is there because ranks do not
talk here, and must not (a pass may be one rank's own affair): when rank 0 alone looks at one batch
before training, an epoch counted for the look would leave rank 0 in another permutation than its peers,
and their shares would overlap. Passes that stay in one order without anyone having asked for it, which
is what torch does silently, are warned about.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence, Sized
from enum import Enum

import torch
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from phalanx.errors import MisuseError
from phalanx.group import world

_SUSPICIOUS_PASSES_IN_ONE_ORDER = 3


class _EpochSetBy(Enum):
    """Who moves the epoch on from one pass to the next."""

    SAMPLER = "sampler"
    USER = "user"


class DistributedSampler(TorchDistributedSampler):
    """Give each rank its own share of the indices of `dataset`, in torch's order.

    Arguments are those of `torch.utils.data.distributed.DistributedSampler`; `num_replicas` and `rank`
    default to the world that this process has joined (a world of one if none).

    With `pad=False` every index goes to exactly one rank: nothing is repeated to even the shares out, so
    that a measure over the whole test set counts each item once. The first `len(dataset) % num_replicas`
    ranks then have one item more than the others, and with fewer items than ranks some have none;
    `len(sampler)` is this rank's own number. It excludes `drop_last=True`.

    Without any call of `set_epoch`, each pass is the next epoch, starting from 0 (a pass that took less
    than a quarter of the items, such as a look at one batch, does not count as one). After a call of
    `set_epoch`, each pass has the epoch that was set last, as in torch.

    Not collective. Raises ValueError for a rank outside the world and MisuseError for contradictory
    arguments.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool = True,
    ) -> None:
        if drop_last and not pad:
            raise MisuseError(
                "DistributedSampler(drop_last=True, pad=False): the first leaves items out, "
                "the second promises each item exactly once",
                "drop_last=True alone for equal shares, pad=False alone for every item once",
                rank,
            )
        num_replicas, rank = _place(num_replicas, rank)
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.pad = pad
        if not pad:
            self.total_size = len(dataset)
            self.num_samples = len(range(self.rank, self.total_size, self.num_replicas))
        self._epoch_set_by = _EpochSetBy.SAMPLER
        self._pass = 0  # passes begun; names the pass that an iterator belongs to
        self._pass_counts = False  # the pass begun last took enough items to count as an epoch
        self._pass_epoch: int | None = None  # the epoch of the pass begun last
        self._passes_in_one_order = 0  # since the epoch last moved on or was set
        self._warned = False

    def __iter__(self) -> Iterator[int]:
        self._begin_pass()
        return self._take(self._share(), self._pass)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the epoch of all passes until the next call, as in torch."""
        super().set_epoch(epoch)
        self._epoch_set_by = _EpochSetBy.USER
        self._passes_in_one_order = 0

    def _begin_pass(self) -> None:
        # An epoch that differs from the last pass's was assigned by hand, and stays.
        by_hand = self._pass_epoch is not None and self.epoch != self._pass_epoch
        if self._epoch_set_by is _EpochSetBy.SAMPLER and self._pass_counts and not by_hand:
            self.epoch += 1
        if self.epoch != self._pass_epoch:
            self._passes_in_one_order = 0
        self._passes_in_one_order += 1
        self._pass_epoch = self.epoch
        self._pass += 1
        self._pass_counts = False
        if self._passes_in_one_order == _SUSPICIOUS_PASSES_IN_ONE_ORDER:
            self._warn_of_one_order()

    def _warn_of_one_order(self) -> None:
        if not self.shuffle or self._warned:
            return
        self._warned = True
        if self._epoch_set_by is _EpochSetBy.USER:
            why = f"since set_epoch({self.epoch}) was called once and not again"
        else:
            why = "since the passes before took less than a quarter of the items, which is no epoch"
        warnings.warn(
            f"[rank {self.rank}] DistributedSampler begins a third pass over the same order (epoch "
            f"{self.epoch}), {why}. Call sampler.set_epoch(epoch) before every epoch.",
            stacklevel=4,
        )

    def _share(self) -> list[int]:
        """Return this rank's indices for the current epoch."""
        length = len(self.dataset)
        self._check_length(length)
        positions = range(self.rank, self.total_size, self.num_replicas)
        if not self.shuffle:
            return [position % length for position in positions]
        generator = torch.Generator()
        generator.manual_seed(self.seed + self.epoch)
        order = torch.randperm(length, generator=generator)
        if not positions:
            return []
        # Padding repeats the order from its beginning, which is what the remainder says.
        return order[torch.arange(positions.start, positions.stop, positions.step) % length].tolist()

    def _check_length(self, length: int) -> None:
        """Raise MisuseError if the data set has changed so much that the shares do not cover it."""
        if self.drop_last:
            covered = length >= self.total_size
        elif self.pad:
            covered = length <= self.total_size and (length > 0 or self.total_size == 0)
        else:
            covered = length == self.total_size
        if not covered:
            raise MisuseError(
                f"the data set has {length} items now, but DistributedSampler was made to hand out "
                f"{self.total_size} places to {self.num_replicas} ranks",
                "make a new DistributedSampler when the length of the data set has changed",
                self.rank,
            )

    def _take(self, share: Sequence[int], this_pass: int) -> Iterator[int]:
        """Yield the share; on the way, note that the pass has become an epoch."""
        enough = max(-(-len(share) // 4) - 1, 0)
        yield from share[:enough]
        if this_pass == self._pass:
            self._pass_counts = True
        yield from share[enough:]


def _place(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Fill in the number of ranks and this rank from the world where the user left them out."""
    if rank is None and num_replicas is not None and num_replicas > 1 and world.world_size() == 1:
        raise MisuseError(
            f"DistributedSampler(num_replicas={num_replicas}) without a rank, in a world of one: every "
            "process would take the share of rank 0",
            "call phalanx.init() before, or give both num_replicas and rank",
        )
    return (
        world.world_size() if num_replicas is None else num_replicas,
        world.rank() if rank is None else rank,
    )
