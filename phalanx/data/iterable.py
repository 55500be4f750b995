"""Iterable data sets, dealt out to ranks and loader workers item by item.

Every worker of every rank goes through the whole stream and keeps each n-th item, n being the number of all
workers; lane worker x ranks + rank is its own. So no length need be known, nothing is repeated or dropped, and
a state says for each lane how many it has had. That needs one stream: every worker sees the same items in
the same order. The stream therefore has random numbers of its own, seeded with seed and epoch alike everywhere,
and sees itself as the only worker, so that one which shards by worker does not do it twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from phalanx.data import randomness
from phalanx.data.history import History
from phalanx.data.permutation import mixed
from phalanx.group import world


@runtime_checkable
class Seekable(Protocol):
    """An iterable data set that can begin in the middle, so that resuming need not go through what is past."""

    def iterate_from(self, place: int) -> Iterator[Any]:
        """Iterate from item number `place` of the stream on."""
        ...


class ShardedIterable(IterableDataset[Any]):
    """Give each rank and each of its loader workers its own share of the items of an iterable data set.

        loader = DataLoader(phalanx.ShardedIterable(stream), batch_size=32, num_workers=4)

    Each item comes exactly once over all ranks and workers, nothing is repeated or dropped, and shares differ by
    at most one item per worker; ranks may have different numbers of batches (`ddp.join()`). `stream` must give
    the same items in the same order in every process, as a function of its random numbers (of torch, numpy and
    random, which are seeded for it with `seed` and the epoch) and of the epoch, if it has `set_epoch`. It must
    not shard by rank itself; by worker it may, since here it finds itself the only one. A method
    `iterate_from(place)` lets it resume without going through what is past.

    `phalanx.loader` makes one for an iterable data set, moves its epoch on and keeps its state.
    """

    def __init__(
        self, dataset: Iterable[Any], num_replicas: int | None = None, rank: int | None = None, seed: int = 0
    ) -> None:
        self.dataset, self.seed, self.epoch = dataset, seed, 0
        self.num_replicas = world.world_size() if num_replicas is None else num_replicas
        self.rank = world.rank() if rank is None else rank
        self.history = History()
        self.had: list[int] = []  # per lane, of the dealing that follows the history; empty for none
        self.finished = False  # nothing of this epoch is left

    def __iter__(self) -> Iterator[Any]:
        return (item for _, _, item in self.tagged(randomness.Stream(self.stream_seed)))

    @property
    def stream_seed(self) -> int:
        """The seed of the stream's random numbers in the present epoch, the same in every process."""
        return mixed(self.seed, self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the epoch of iterations that begin from now on: seeds the stream's random numbers."""
        self.epoch = epoch

    def tagged(self, random_numbers: AbstractContextManager[Any]) -> Iterator[tuple[int, int, Any]]:
        """Iterate over this worker's share: its lane, the number of the item in the lane, the item.

        The stream is moved on inside of `random_numbers`: a context of random numbers that nobody else uses.
        """
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        lane, lanes = worker * self.num_replicas + self.rank, workers * self.num_replicas
        had = self.had[lane] if self.had else 0
        stream = iter(()) if self.finished else self._stream(random_numbers)
        for k, item in enumerate(self.history.unseen(stream)):
            if k % lanes == lane and k // lanes >= had:
                yield lane, k // lanes, item

    def _stream(self, random_numbers: AbstractContextManager[Any]) -> Iterator[Any]:
        """The items from the first one on that has not been had."""
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(self.epoch)
        skip = self.history.beginning
        with random_numbers, _as_only_worker():
            if isinstance(self.dataset, Seekable):
                items, skip = self.dataset.iterate_from(skip), 0
            else:
                items = iter(self.dataset)
        end = object()
        while True:
            with random_numbers, _as_only_worker():
                item = next(items, end)
            if item is end:
                return
            if skip:
                skip -= 1
            else:
                yield item


@contextmanager
def _as_only_worker() -> Iterator[None]:
    """Let code that asks for its DataLoader worker find worker 0 of 1."""
    info = torch_worker._worker_info
    if info is not None:
        torch_worker._worker_info = torch_worker.WorkerInfo(0, 1, info.seed, info.dataset)
    try:
        yield
    finally:
        torch_worker._worker_info = info
