"""The per-rank DataLoader for a total batch size, with a state that counts what the training loop receives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert

from phalanx.data.feeds import Feed, IndexFeed, Receiver
from phalanx.data.iterable import ShardedIterable
from phalanx.data.sampler import DistributedSampler
from phalanx.data.sharded import ShardedSampler
from phalanx.data.state import State
from phalanx.data.streams import StreamFeed, TaggedStream, TaggingCollate
from phalanx.errors import MisuseError
from phalanx.group import world

_OURS = {
    "batch_size": "total_batch_size=..., the batch of all ranks together",
    "generator": "seed=..., from which the order and the random numbers of the workers come",
}

_NOT_FOR_STREAMS = {
    "shuffle": "shuffle in the data set; its random numbers are seeded alike on all ranks, per epoch",
    "pad": "leave pad out: each item comes exactly once, and ddp.join() takes care of uneven numbers of batches",
    "drop_last": "leave drop_last out: each worker would leave out a rest of its own",
    "sampler": "leave sampler out, or a data set with __getitem__",
    "batch_sampler": "leave batch_sampler out, or a data set with __getitem__",
    "persistent_workers": "leave persistent_workers out: workers of an earlier epoch would not learn of the next one",
}
_MAY_BE_FALSE = ("shuffle", "pad")


def loader(
    dataset: Any,
    total_batch_size: int | None = None,
    *,
    shuffle: bool | str | None = None,
    drop_last: bool = False,
    pad: bool | None = None,
    uneven: bool = False,
    num_workers: int = 0,
    seed: int = 0,
    sampler: Any = None,
    batch_sampler: Any = None,
    num_replicas: int | None = None,
    rank: int | None = None,
    **options: Any,
) -> Loader:
    """Return this rank's DataLoader for batches that have `total_batch_size` items over all ranks.

    Each rank gets `total_batch_size / ranks` of them. Where that does not divide, it raises MisuseError with the
    nearest sizes that do; with `uneven=True` the first ranks get one item more, and `ddp.weigh` keeps the
    gradient that of the whole batch. `loader.batch_size` is this rank's part.

    `shuffle` (True unless said, with `sampler` as that one draws), `drop_last` and `pad` (True unless said) are
    those of `DistributedSampler`: with `pad=False` each item comes exactly once an epoch, and in the last batch
    some ranks may have fewer items or no batch at all. `drop_last` leaves out the last batch if it has not
    `total_batch_size` items. A `sampler` of any kind, made for one process, is dealt out item by item, and a
    `batch_sampler` batch by batch (without a `total_batch_size`), as by `ShardedSampler`. An iterable data set
    is dealt out to ranks and workers, as by `ShardedIterable`, without padding or dropping; without a
    `total_batch_size` its items are taken for whole batches.

    Workers' random numbers (torch, numpy, random) follow from `seed`, the epoch and the batch, so that they
    differ between ranks, workers and epochs and are the same when a run resumes. `options` go to the DataLoader.

    Not collective, but every rank calls it alike. Epochs move on by themselves or by `loader.set_epoch`.
    """
    ranks = world.world_size() if num_replicas is None else num_replicas
    rank = world.rank() if rank is None else rank
    _refuse({name: options.get(name) for name in _OURS}, "phalanx.loader", _OURS, rank)
    options |= {"num_workers": num_workers, "generator": torch.Generator()}
    size = _own_size(total_batch_size, ranks, rank, uneven)
    asked = {"shuffle": shuffle, "pad": pad, "drop_last": drop_last or None, "sampler": sampler,
             "batch_sampler": batch_sampler}  # fmt: skip
    if isinstance(dataset, IterableDataset):
        asked["persistent_workers"] = options.get("persistent_workers") or None
        _refuse(asked, "phalanx.loader of an iterable data set", _NOT_FOR_STREAMS, rank)
        return _of_stream(ShardedIterable(dataset, ranks, rank, seed), size, total_batch_size, options)
    _check_indexed(asked, total_batch_size, options, rank)
    inner = batch_sampler if sampler is None else sampler
    common: dict[str, Any] = {"drop_last": drop_last, "pad": pad is not False, "total_batch_size": total_batch_size}
    dealt: DistributedSampler
    if inner is None:
        dealt = DistributedSampler(dataset, ranks, rank, shuffle is None or shuffle, seed, **common)
    else:
        dealt = ShardedSampler(inner, ranks, rank, seed, **common)
    whole: dict[str, Any] = {"batch_sampler": dealt} if batch_sampler is not None else {}
    batches = whole or {"batch_size": size, "sampler": dealt, "drop_last": drop_last}
    return Loader(dataset, IndexFeed(dealt, size, options["generator"]), total_batch_size, **batches, **options)


class Loader(DataLoader[Any]):
    """A rank's DataLoader, made by `phalanx.loader`; its state says which items all ranks have received.

    `len(loader)` is the number of this rank's batches in a whole epoch, also after a resume in the middle of one.
    """

    def __init__(self, dataset: Any, feed: Feed, total_batch_size: int | None, **options: Any) -> None:
        self.feed, self.total_batch_size = feed, total_batch_size
        self.received: Receiver | None = None
        super().__init__(dataset, **options)

    @property
    def _index_sampler(self) -> Any:
        return self.feed if isinstance(self.feed, IndexFeed) else super()._index_sampler

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.received = self.feed.begin()
        with self.received.random_numbers:
            fetched = super().__iter__()
        return _receiving(fetched, self.received)

    @property
    def num_replicas(self) -> int:
        """How many ranks share the data set."""
        return self.feed.num_replicas

    @property
    def epoch(self) -> int:
        """The epoch of the pass begun last; before the first and after `load_state_dict` that of the next one.

        `for epoch in range(loader.epoch, epochs)` is right for a new run and for one that resumes.
        """
        return self.feed.epoch

    def set_epoch(self, epoch: int) -> None:
        """Make `epoch` the epoch of all passes until the next call; without it they move on by themselves."""
        self.feed.set_epoch(epoch)

    def state_dict(self, group: dist.ProcessGroup | None = None) -> State:
        """Return the epoch and which of its items all ranks have received: the same plain data on every rank.

        Collective: every rank of the group (the default one if None), same order. One rank's copy is enough to
        save; it is JSON-able. Items that workers have prefetched and the loop has not received do not count.
        """
        return self.feed.state_dict(group)

    def local_state_dict(self) -> State:
        """Return this rank's part of the state, as plain data. Not collective; see `load_state_dict`."""
        return self.feed.local_state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Go on from a state, with any number of ranks and workers, as `DistributedSampler.load_state_dict` says.

        Takes what `state_dict` has returned, the list of every rank's `local_state_dict`, or this rank's own one.
        """
        self.feed.load_state_dict(state_dict)


def _receiving(fetched: Iterator[Any], received: Receiver) -> Iterator[Any]:
    end = object()
    while True:
        with received.random_numbers:
            data = next(fetched, end)
        if data is end:
            received.end()
            return
        yield received.receive(data)


def _of_stream(sharded: ShardedIterable, size: int | None, total: int | None, options: dict[str, Any]) -> Loader:
    collate = options.pop("collate_fn", None) or (default_convert if size is None else default_collate)
    feed = StreamFeed(sharded, options["num_workers"], size is None, options["generator"])
    tagging = TaggingCollate(collate, sharded)
    return Loader(TaggedStream(sharded), feed, total, batch_size=size, collate_fn=tagging, **options)


def _own_size(total: int | None, ranks: int, rank: int, uneven: bool) -> int | None:
    """Return this rank's part of the total batch size; MisuseError where it does not divide and may not be uneven."""
    if total is None:
        return None
    if total < ranks:
        raise MisuseError(
            f"phalanx.loader(total_batch_size={total}) for {ranks} ranks leaves some rank without items",
            f"total_batch_size={ranks} or more", rank,
        )  # fmt: skip
    if total % ranks and not uneven:
        below, above = total // ranks * ranks, (total // ranks + 1) * ranks
        raise MisuseError(
            f"phalanx.loader(total_batch_size={total}) does not divide by {ranks} ranks",
            f"total_batch_size={below} or {above}; or uneven=True, with ddp.weigh(loss, n), for {total // ranks} items "
            f"on some ranks and {total // ranks + 1} on others", rank,
        )  # fmt: skip
    return len(range(rank, total, ranks))


def _refuse(asked: Mapping[str, Any], where: str, instead: Mapping[str, str], rank: int) -> None:
    for name, value in asked.items():
        if value is not None and not (value is False and name in _MAY_BE_FALSE):
            raise MisuseError(f"{where} with {name}={value!r}", instead[name], rank)


def _check_indexed(asked: Mapping[str, Any], total: int | None, options: Mapping[str, Any], rank: int) -> None:
    """Raise MisuseError for arguments that exclude each other."""
    deals_batches = asked["batch_sampler"] is not None
    if deals_batches == (total is not None) or (deals_batches and asked["sampler"] is not None):
        raise MisuseError(
            "phalanx.loader with " + ("a batch_sampler and more" if deals_batches else "no total_batch_size"),
            "total_batch_size=... with or without sampler=..., or batch_sampler=... alone", rank,
        )  # fmt: skip
    if asked["shuffle"] is not None and (deals_batches or asked["sampler"] is not None):
        raise MisuseError(
            f"phalanx.loader(shuffle={asked['shuffle']!r}) with a sampler, which has an order of its own",
            "leave shuffle out", rank,
        )  # fmt: skip
    if options.get("in_order") is False:
        raise MisuseError(
            "phalanx.loader(in_order=False): which items the training loop has had could not be told",
            "leave in_order out", rank,
        )  # fmt: skip
