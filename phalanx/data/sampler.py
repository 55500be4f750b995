"""Each rank's share of a data set, for every epoch.

The order is torch's bit for bit: a permutation seeded with `seed + epoch`, lengthened by repeating its
beginning (or cut, with `drop_last`) to a multiple of the number of ranks, dealt out like cards. Added are
shares without padding, an epoch that moves on when nobody calls `set_epoch`, and a state from which any number
of ranks can go on in the middle of an epoch (history.py says how).

Who moves the epoch on. Once `set_epoch` has been called the user does, exactly as in torch: every pass
has the epoch that was set last. Before that the sampler does, at the beginning of a pass, provided the
previous pass took at least a quarter of this rank's items. The proviso is there because ranks do not
talk here, and must not (a pass may be one rank's own affair): when rank 0 alone looks at one batch
before training, an epoch counted for the look would leave rank 0 in another permutation than its peers,
and their shares would overlap. Passes that stay in one order without anyone having asked for it, which
is what torch does silently, are warned about.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence, Sized
from enum import Enum
from types import FrameType
from typing import Any, cast

import numpy as np
import torch.distributed as dist
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from phalanx.data import orders, state
from phalanx.data.history import History
from phalanx.data.passes import Pass
from phalanx.data.shares import Dealer, Rest
from phalanx.errors import MisuseError
from phalanx.group import world

_SUSPICIOUS_PASSES_IN_ONE_ORDER = 3
_CHUNK = 1024  # indices computed at once
_FRAMES_TO_A_LOADER = 8


class _EpochSetBy(Enum):
    """Who moves the epoch on from one pass to the next."""

    SAMPLER = "sampler"
    USER = "user"


class DistributedSampler(TorchDistributedSampler[Any]):
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

    `shuffle="hashed"` shuffles without the memory that torch's permutation takes (8 bytes an index); its order
    is another one. `total_batch_size` deals out whole batches of all ranks, also where the ranks do not divide
    it (the first ranks then have one item more in each), and `drop_last` leaves out the last one if it is
    shorter; `phalanx.loader` sets it.

    `state_dict` and `load_state_dict` stop and resume in the middle of an epoch, with any number of ranks.

    Not collective. Raises ValueError for a rank outside the world and MisuseError for contradictory
    arguments.
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool | str = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool = True,
        total_batch_size: int | None = None,
    ) -> None:
        if drop_last and not pad:
            raise MisuseError(
                f"{type(self).__name__}(drop_last=True, pad=False): the first leaves items out, "
                "the second promises each item exactly once",
                "drop_last=True alone for equal shares, pad=False alone for every item once",
                rank,
            )
        orders.check_shuffle(shuffle, rank)
        num_replicas, rank = _place(num_replicas, rank, type(self).__name__)
        super().__init__(cast(Any, dataset), num_replicas, rank, cast(bool, shuffle), seed, drop_last)
        self.pad = pad
        rest = Rest.DROP if drop_last else Rest.PAD if pad else Rest.KEEP
        self.dealer = Dealer.of(self.num_replicas, total_batch_size, rest, self.rank)
        self.total_size = self.dealer.places(len(dataset))
        self.num_samples = self.dealer.count(self.rank, self.total_size)
        self.last_pass: Pass | None = None
        self._resumed: state.State | None = None  # the state to go on from in its epoch, until a pass has
        self._epoch_set_by = _EpochSetBy.SAMPLER
        self._passes_in_one_order = 0  # since the epoch last moved on or was set
        self._warned = False

    def __iter__(self) -> Iterator[Any]:
        return self.begin()[1]

    def begin(self) -> tuple[Pass, Iterator[Any]]:
        """Begin a pass, as `iter` does; return also where it stands, for a loader that keeps `received` up to date."""
        self._move_on()
        order, length, name = self._draw(self.epoch)
        this = self.last_pass = self._new_pass(length, name)
        return this, self._take(this, order)

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the epoch of all passes until the next call, as in torch.

        The epoch of a state that has been loaded goes on where it was; any other one is a whole epoch.
        """
        super().set_epoch(epoch)
        self._epoch_set_by = _EpochSetBy.USER
        self._passes_in_one_order = 0

    # -- state ---------------------------------------------------------------------------------------

    def state_dict(self, group: dist.ProcessGroup | None = None) -> state.State:
        """Return the epoch and which of its items all ranks have had: the same plain data on every rank.

        Collective: every rank of the group (the default one if None), same order; its size is `num_replicas`.
        One rank's copy is enough to save. It is JSON-able: dicts, lists, strings, numbers, booleans.

        An item counts as had once the training loop has received it: with `phalanx.loader` whatever its
        workers have prefetched, otherwise once it has been drawn from the sampler. Raises MisuseError where
        the workers of a plain DataLoader draw ahead, RankMismatchError if ranks are in different epochs.
        """
        return state.gathered(self.local_state_dict(), self._part_of_ended, group)

    def local_state_dict(self) -> state.State:
        """Return this rank's part of the state, as plain data. Not collective.

        `load_state_dict` takes the list of all ranks' parts, or on the same rank of as many ranks its own.
        """
        this = self.last_pass
        if this is None:
            return self._part_before_a_pass(self.rank)
        if this.drawn_ahead and this.received is None:
            raise MisuseError(
                f"the state of a {type(self).__name__} whose DataLoader has workers: they draw ahead, and what the "
                "training loop has not received would be lost",
                "phalanx.loader(dataset, total_batch_size=...), which counts what the loop receives", self.rank,
            )  # fmt: skip
        return self._part(this, this.rank, this.done)

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from a state: the next pass of its epoch has exactly the items that nobody has had.

        Takes what `state_dict` has returned on any rank of any number of ranks, a list of every rank's
        `local_state_dict`, or this rank's own one. After a finished epoch, `epoch` is the next one. Not
        collective, but for a right result every rank loads the same. Raises MisuseError for the state of another
        data set, seed or shuffle.

        With `pad=False` each item then comes exactly once an epoch, through any number of stops and ranks. With
        `drop_last` none comes twice, and only the run that ends the epoch leaves items out, fewer than it has ranks
        (or than `total_batch_size`). With padding each comes at least once; where the ranks stop after equally
        many steps, only the run that ends the epoch repeats items, fewer than it has ranks (or than
        `total_batch_size`, where that does not divide).
        """
        resumed = state.whole(state_dict, self.rank, self.num_replicas)
        state.check_order(resumed, self._agreed(), type(self).__name__, self.rank)
        # A rank's own part does not tell whether the others have finished, too.
        self.epoch = resumed["epoch"] + (resumed["finished"] and state.is_whole(resumed))
        self._resumed = resumed
        self.last_pass = None
        self._passes_in_one_order = 0

    def keys(self, count: int) -> np.ndarray:
        """Return a number for each of the first `count` items of the last pass, by which all ranks' are sorted.

        It is -1 for repetitions. The sequence of numbers is that of the data set (of what the inner sampler
        draws). Not collective.
        """
        this = self.last_pass or self._new_pass(self._length, "")
        places, repeated = this.places_from(this.start, this.start + count)
        return np.where(repeated, -1, self._sorted_by(places, this))

    # -- passes --------------------------------------------------------------------------------------

    def _move_on(self) -> None:
        last = self.last_pass
        # An epoch that differs from the last pass's was assigned by hand, and stays.
        by_hand = last is not None and self.epoch != last.epoch
        if last is not None and last.counts:
            self._resumed = None
            if self._epoch_set_by is _EpochSetBy.SAMPLER and not by_hand:
                self.epoch += 1
        if last is None or self.epoch != last.epoch:
            self._passes_in_one_order = 0
        if last is None or last.done > last.start or not self._passes_in_one_order:
            self._passes_in_one_order += 1  # a pass of which nothing was drawn is none
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
            stacklevel=5,
        )

    def _draw(self, epoch: int) -> tuple[orders.Order, int, str]:
        """Return the order of an epoch, its length, and a name for it where seed and length do not name it."""
        length = self._length
        self._check_length(length)
        return orders.indices(length, self.shuffle, self.seed, epoch, self.rank), length, ""

    def _sorted_by(self, places: np.ndarray, this: Pass) -> np.ndarray:
        order = orders.indices(this.length, self.shuffle, self.seed, this.epoch, self.rank)
        return np.array(order(places), dtype=np.int64)

    def _new_pass(self, length: int, order_name: str) -> Pass:
        """Return a pass of the present epoch, from where a state that was loaded has left it."""
        resumed = self._resumed_in(self.epoch)
        if resumed is None:
            places = self.total_size if not order_name else self.dealer.places(length)
            return Pass(self.epoch, length, History(), self.dealer, self.rank, places, order_name=order_name)
        if resumed["length"] != length or resumed["order"] not in ("", order_name):
            raise MisuseError(
                f"{type(self).__name__} goes on in epoch {self.epoch}, which had {resumed['length']} items in order "
                f"{resumed['order']!r}; now it has {length} in order {order_name!r}",
                "the same data set, and a sampler that draws the same again for the same seed and epoch", self.rank,
            )  # fmt: skip
        history, counts = self._had_before(resumed)
        places = 0 if resumed["finished"] else self.dealer.places(length - history.total)
        return Pass(self.epoch, length, history, self.dealer, self.rank, places, counts[self.rank], order_name)

    def _resumed_in(self, epoch: int) -> state.State | None:
        """Return the state to go on from in this epoch; None if the whole epoch is still to come."""
        resumed = self._resumed
        if resumed is None or resumed["epoch"] != epoch or not (resumed["history"] or "taken" in resumed):
            return None
        return resumed

    def _had_before(self, resumed: state.State) -> tuple[History, list[int]]:
        """Return what was dealt before the present dealing, and how much of it each rank has had."""
        history = History(resumed["history"])
        if not state.is_whole(resumed):
            counts = [0] * self.num_replicas
            counts[self.rank] = sum(count for _, count in resumed["taken"])
            return history, counts
        before, taken = history.for_lanes(self.dealer.lanes)
        had = self.dealer.counts(taken)
        return (before, had) if had is not None else (history, [0] * self.num_replicas)

    @property
    def _length(self) -> int:
        return len(cast(Sized, self.dataset))

    # -- parts of the state --------------------------------------------------------------------------

    def _agreed(self) -> state.State:
        """What names the order, the same on all ranks."""
        return {"seed": self.seed, "shuffle": self.shuffle, "length": self._length}

    def _part(self, this: Pass, rank: int, done: int) -> state.State:
        lanes = self.dealer.taken([done if other == rank else 0 for other in range(self.num_replicas)])
        return {
            "version": state.VERSION, "epoch": this.epoch, "history": this.history.plain(), **self._agreed(),
            "length": this.length, "order": this.order_name, "ranks": self.num_replicas, "lanes": self.dealer.lanes,
            "rank": rank, "taken": [[lane, lanes[lane]] for lane in range(rank, len(lanes), self.num_replicas)],
            "finished": done >= self.dealer.count(rank, this.places),
        }  # fmt: skip

    def _part_of_ended(self, rank: int) -> state.State:
        """The part of a rank that has left join(): it has received its whole share."""
        this = self.last_pass
        if this is None:
            return self._part_before_a_pass(rank)
        return self._part(this, rank, self.dealer.count(rank, this.places))

    def _part_before_a_pass(self, rank: int) -> state.State:
        """The part before the first pass: nothing, or what was had before the state that has been loaded."""
        resumed = self._resumed
        finished = resumed is not None and resumed["finished"] and self.epoch - resumed["epoch"] in (0, 1)
        if resumed is not None and (finished or self._resumed_in(self.epoch) is not None):
            history, counts = self._had_before(resumed)
            this = Pass(resumed["epoch"], resumed["length"], history, self.dealer, rank, 0)
            this.order_name = resumed["order"]
            return {**self._part(this, rank, counts[rank]), "finished": finished}
        this = Pass(self.epoch, self._length, History(), self.dealer, rank, 0)
        return {**self._part(this, rank, 0), "finished": False}

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

    def _take(self, this: Pass, order: orders.Order) -> Iterator[Any]:
        """Yield the items of a pass, and note how far it has come."""
        this.drawn_ahead = _drawn_by_workers()
        for start in range(this.start, this.count, _CHUNK):
            places, _ = this.places_from(start, min(start + _CHUNK, this.count))
            for item in order(places):
                this.drawn += 1
                yield item
        this.ended = this.ended or this.received is None


def _drawn_by_workers() -> bool:
    """Whether the pass is drawn for the worker processes of a DataLoader, ahead of the training loop."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_TO_A_LOADER):
        if frame is not None:
            if isinstance(frame.f_locals.get("self"), _MultiProcessingDataLoaderIter):
                return True
            frame = frame.f_back
    return False


def _place(num_replicas: int | None, rank: int | None, name: str) -> tuple[int, int]:
    """Fill in the number of ranks and this rank from the world where the user left them out."""
    if rank is None and num_replicas is not None and num_replicas > 1 and world.world_size() == 1:
        raise MisuseError(
            f"{name}(num_replicas={num_replicas}) without a rank, in a world of one: every "
            "process would take the share of rank 0",
            "call phalanx.init() before, or give both num_replicas and rank",
        )
    return (
        world.world_size() if num_replicas is None else num_replicas,
        world.rank() if rank is None else rank,
    )
