"""What a loader draws from, and what it learns from each batch that the training loop receives.

A feed is made once per loader: IndexFeed for a data set with indices, StreamFeed for an iterable one. Each pass
has a receiver, which is told of every batch, so that the state counts what the loop has received and not what
workers have prefetched.

A worker's random numbers. torch seeds a worker when it starts. Here every batch seeds the worker that
fetches it, with a number that belongs to the batch: of the seed, the epoch and the place of its first item. So
augmentations differ between ranks, workers and epochs, and are the same again in a run that resumes in the
middle of an epoch, whatever worker gets the batch. In the main process (no workers) nothing is seeded: those
random numbers are the model's, too, and are a checkpoint's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from phalanx.data import randomness
from phalanx.data.passes import Pass
from phalanx.data.permutation import mixed
from phalanx.data.sampler import DistributedSampler
from phalanx.data.state import State


class Receiver(Protocol):
    """Follows one pass of a loader."""

    random_numbers: AbstractContextManager[Any]
    """Where the main process fetches batches."""
    whole_batches: bool
    """Whether `keys` has one number per batch, and not one per item."""

    def receive(self, data: Any) -> Any:
        """Take note of what the DataLoader has made, and return the batch."""
        ...

    def end(self) -> None:
        """Take note that nothing more comes."""
        ...

    def keys(self) -> list[np.ndarray]:
        """Return for each batch received what `DistributedSampler.keys` says of its items."""
        ...


class Feed(Protocol):
    """Where a loader's batches come from."""

    num_replicas: int

    @property
    def epoch(self) -> int:
        """The epoch of the pass begun last, or of the next one."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the epoch of all passes until the next call."""
        ...

    def begin(self) -> Receiver:
        """Begin a pass, before the DataLoader draws and its workers copy the data set; return its receiver."""
        ...

    def state_dict(self, group: dist.ProcessGroup | None) -> State:
        """The whole state. Collective."""
        ...

    def local_state_dict(self) -> State:
        """This rank's part of the state."""
        ...

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from a state."""
        ...


class SeedingBatch(list[Any]):
    """A batch of indices that seeds the worker process in which it is gone through."""

    seed = 0

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            randomness.seed_all(self.seed)
        return super().__iter__()


class IndexFeed:
    """The indices of a sampler in batches of `size`, or with None the batches that it deals out.

    Also the batch sampler of the DataLoader. `generator` is what the DataLoader seeds its workers from.
    """

    def __init__(self, sampler: DistributedSampler, size: int | None, generator: torch.Generator) -> None:
        self.sampler, self.size, self._generator = sampler, size, generator
        self.num_replicas = sampler.num_replicas
        self._batches: Iterator[list[Any]] = iter(())  # those of the pass begun last

    def __iter__(self) -> Iterator[list[Any]]:
        return self._batches

    def __len__(self) -> int:
        return -(-len(self.sampler) // (self.size or 1))

    def _seeding(self, drawn: Iterator[Any], this: Pass) -> Iterator[list[Any]]:
        number = this.start
        while batch := list(islice(drawn, self.size or 1)):
            batch = SeedingBatch(batch if self.size else batch[0])
            batch.seed = mixed(self.sampler.seed, this.epoch, this.first_place(number))
            number += self.size or 1
            yield batch

    @property
    def epoch(self) -> int:
        """The epoch of the pass begun last, or of the next one."""
        return self.sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the epoch of all passes until the next call."""
        self.sampler.set_epoch(epoch)

    def begin(self) -> Receiver:
        """Begin a pass, before the DataLoader draws, and return its receiver."""
        this, drawn = self.sampler.begin()
        this.received = this.start
        self._batches = self._seeding(drawn, this)
        self._generator.manual_seed(mixed(self.sampler.seed, this.epoch, self.sampler.rank) >> 1)
        return _IndexReceiver(self.sampler, self.size, this)

    def state_dict(self, group: dist.ProcessGroup | None) -> State:
        """The whole state. Collective."""
        return self.sampler.state_dict(group)

    def local_state_dict(self) -> State:
        """This rank's part of the state."""
        return self.sampler.local_state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from a state."""
        self.sampler.load_state_dict(state)


class _IndexReceiver:
    """Batches come in the order in which they were drawn, so counting them is enough."""

    random_numbers: AbstractContextManager[Any] = nullcontext()

    def __init__(self, sampler: DistributedSampler, size: int | None, this: Pass) -> None:
        self._sampler, self._size, self._pass = sampler, size or 1, this
        self.whole_batches = size is None

    def receive(self, data: Any) -> Any:
        this = self._pass
        this.received = min(this.done + self._size, this.count)
        return data

    def end(self) -> None:
        self._pass.ended = True

    def keys(self) -> list[np.ndarray]:
        had = self._pass.done - self._pass.start
        return np.split(self._sampler.keys(had), range(self._size, had, self._size)) if had else []
