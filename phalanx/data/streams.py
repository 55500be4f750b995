"""The feed of an iterable data set: batches say whose they are, and the state counts them per lane."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from phalanx.data import randomness, state
from phalanx.data.feeds import Receiver
from phalanx.data.history import History
from phalanx.data.iterable import ShardedIterable
from phalanx.data.permutation import mixed
from phalanx.errors import MisuseError

_KIND = "stream"  # stands in the state where a sampler's says how it shuffles


class Tagged(NamedTuple):
    """A batch with the lane that it is from, the number of its first item there, and how many items it has."""

    lane: int
    first: int
    size: int
    batch: Any


class TaggedStream(IterableDataset[Any]):
    """The data set that the DataLoader sees."""

    def __init__(self, sharded: ShardedIterable) -> None:
        self._sharded = sharded

    def __iter__(self) -> Iterator[tuple[int, int, Any]]:
        # Nobody else draws random numbers between two items: in a worker there is only the collate function,
        # which has its own, and in the main process the receiver lends the stream its own.
        if get_worker_info() is not None:
            randomness.seed_all(self._sharded.stream_seed)
        return self._sharded.tagged(nullcontext())


class TaggingCollate:
    """Collates the items of a batch with random numbers of its own, and tags it."""

    def __init__(self, collate: Callable[[Any], Any], sharded: ShardedIterable) -> None:
        self._collate, self._sharded = collate, sharded

    def __call__(self, items: Any) -> Tagged:
        batched = isinstance(items, list)
        lane, first, _ = items[0] if batched else items
        with randomness.seeded(mixed(self._sharded.stream_seed, lane, first)):
            batch = self._collate([item for _, _, item in items] if batched else items[2])
        return Tagged(lane, first, len(items) if batched else 1, batch)


class StreamFeed:
    """The share of an iterable data set that falls to this rank and its `workers` (0: the main process)."""

    def __init__(self, sharded: ShardedIterable, workers: int, whole_batches: bool, generator: torch.Generator) -> None:
        self.sharded, self.whole_batches, self._generator = sharded, whole_batches, generator
        self.num_replicas = sharded.num_replicas
        self.lanes = max(workers, 1) * sharded.num_replicas
        self.in_main = workers == 0
        self._epoch_set_by_user = False
        self._resumed: state.State | None = None
        self.last: _StreamReceiver | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the pass begun last, or of the next one."""
        return self.sharded.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the epoch of all passes until the next call."""
        self.sharded.set_epoch(epoch)
        self._epoch_set_by_user = True

    def begin(self) -> Receiver:
        """Begin a pass, before the DataLoader draws and its workers copy the data set; return its receiver."""
        sharded, last = self.sharded, self.last
        if last is not None and last.counts:
            self._resumed = None
            if not self._epoch_set_by_user:
                sharded.set_epoch(sharded.epoch + 1)
        sharded.history, sharded.had, sharded.finished = History(), [0] * self.lanes, False
        if (resumed := self._resumed) is not None and resumed["epoch"] == sharded.epoch:
            sharded.history, sharded.had = self._had_before(resumed)
            sharded.finished = resumed["finished"] and state.is_whole(resumed)
        self._generator.manual_seed(mixed(sharded.seed, sharded.epoch, sharded.rank) >> 1)
        self.last = _StreamReceiver(self)
        return self.last

    def state_dict(self, group: dist.ProcessGroup | None) -> state.State:
        """The whole state. Collective."""
        return state.gathered(self.local_state_dict(), self._unknown, group)

    def local_state_dict(self) -> state.State:
        """This rank's part of the state."""
        if self.last is not None:
            last = self.last
            return self._part(last.epoch, last.history, last.had, last.ended)
        resumed = self._resumed
        if resumed is not None and self.epoch - resumed["epoch"] in (0, int(resumed["finished"])):
            return self._part(resumed["epoch"], *self._had_before(resumed), resumed["finished"])
        return self._part(self.epoch, History(), [0] * self.lanes, False)

    def load_state_dict(self, given: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from a state."""
        sharded = self.sharded
        resumed = state.whole(given, sharded.rank, sharded.num_replicas)
        mine = {"seed": sharded.seed, "shuffle": _KIND, "length": None}
        state.check_order(resumed, mine, "a loader of an iterable data set", sharded.rank)
        if not state.is_whole(resumed) and resumed["lanes"] != self.lanes:
            raise MisuseError(
                f"load_state_dict: this rank's own state is of {resumed['lanes'] // sharded.num_replicas} workers, and "
                f"the loader has {self.lanes // sharded.num_replicas}",
                "state_dict(), which is whole, or the list of every rank's local_state_dict()", sharded.rank,
            )  # fmt: skip
        sharded.epoch = resumed["epoch"] + (resumed["finished"] and state.is_whole(resumed))
        self._resumed, self.last = resumed, None

    def _had_before(self, resumed: state.State) -> tuple[History, list[int]]:
        history = History(resumed["history"])
        if state.is_whole(resumed):
            return history.for_lanes(self.lanes)
        had = [0] * self.lanes
        for lane, count in resumed["taken"]:
            had[lane] = count
        return history, had

    def _part(self, epoch: int, history: History, had: Sequence[int], finished: bool) -> state.State:
        rank, ranks = self.sharded.rank, self.sharded.num_replicas
        return {
            "version": state.VERSION, "epoch": epoch, "history": history.plain(), "seed": self.sharded.seed,
            "shuffle": _KIND, "length": None, "order": "", "ranks": ranks, "lanes": self.lanes, "rank": rank,
            "taken": [[lane, had[lane]] for lane in range(rank, self.lanes, ranks)], "finished": finished,
        }  # fmt: skip

    def _unknown(self, rank: int) -> state.State:
        raise MisuseError(
            f"state_dict() of a loader of an iterable data set after rank {rank} has left join(): how much it had is "
            "not known here",
            "state_dict() before join() or after it", self.sharded.rank,
        )  # fmt: skip


class _StreamReceiver:
    """Counts the items received per lane."""

    def __init__(self, feed: StreamFeed) -> None:
        sharded = feed.sharded
        self.epoch, self.history, self.had = sharded.epoch, sharded.history, list(sharded.had)
        self.whole_batches, self.ended = feed.whole_batches, False
        self.random_numbers: AbstractContextManager[Any] = nullcontext()
        if feed.in_main:
            self.random_numbers = randomness.Stream(sharded.stream_seed)
        self._batches: list[tuple[int, int, int]] = []

    @property
    def counts(self) -> bool:
        """Whether the pass has taken enough to count as an epoch: more than a look at one batch."""
        return self.ended or len(self._batches) > 1

    def receive(self, data: Any) -> Any:
        lane, first, count, batch = data
        self.had[lane] = first + count
        self._batches.append((lane, first, count))
        return batch

    def end(self) -> None:
        self.ended = True

    def keys(self) -> list[np.ndarray]:
        lanes = len(self.had)
        return [
            self.history.left(lane + lanes * np.arange(first, first + count, dtype=np.int64))
            for lane, first, count in self._batches
        ]
