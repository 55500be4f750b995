"""What all ranks have computed for their items, in the order of the data set, each item once.

The outputs of a rank are taken apart into columns: one per leaf of the structure, with one entry per item. The
ranks exchange what their columns look like, and what is wrong with them; then each column of tensors travels
as one all-gather, padded to the longest share, and all other columns as pickles. Each rank sorts the rows by
the numbers that the sampler gives them, drops the repetitions, and puts the structure together again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.data.columns import Column, ColumnError, Layout, Node, columns_of, rebuilt
from phalanx.data.loader import Loader
from phalanx.data.sampler import DistributedSampler
from phalanx.errors import MisuseError

_REPEATED = -1
_NO_KEYS = np.zeros(0, dtype=np.int64)
_PLAIN = (str, bytes, int, float, complex, type(None))


@dataclass(frozen=True)
class _Share:
    """What one rank says about its share before tensors move; `wrong` is empty if all is well."""

    wrong: str = ""
    keys: np.ndarray = field(default_factory=lambda: _NO_KEYS)
    layout: Node | int | None = None
    looks: tuple[tuple[torch.dtype, tuple[int, ...], str] | None, ...] = ()  # per column of tensors
    lists: tuple[list[Any], ...] = ()  # all other columns


def gather(
    outputs: Any,
    source: Loader | DistributedSampler | Sequence[int] | Tensor,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Return the outputs of all ranks in data set order, each item once, on every rank.

        outputs = [{"logits": model(x), "label": y} for x, y in loader]
        everything = phalanx.gather(outputs, loader)  # {"logits": [items, classes], "label": [items]}

    `outputs` has one element for each batch that this rank has had; or it is one structure for all of its items.
    A structure is nested of dicts, tuples, NamedTuples and dataclasses. Its leaves hold one entry per item: a
    tensor or an array in its first dimension, a list of anything. A number, a string or a tensor without
    dimensions stands for every item of its batch. Tensors come back on their device and without their graph,
    arrays as tensors; all other leaves as lists. A rank may have no batch at all.

    `source` says which items these are: the loader or sampler that has just been gone through, or the data set
    indices of the items. What a sampler has repeated for padding is dropped. The order is that of the data set's
    indices, of what an inner sampler draws (`ShardedSampler`), or of the stream; of indices, the first entry
    of each counts.

    Collective: every rank of the group (the default one if None). Raises MisuseError on every rank, naming the
    one at fault, if the entries are not as many as the items or a structure is another one.
    """
    size = dist.get_world_size(group) if dist.is_initialized() else 1
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    mine, columns = _described(outputs, source, size)
    shares: list[_Share] = [mine] * size
    if size > 1:
        dist.all_gather_object(shares, mine, group)
    model = _model(shares, rank)
    if model is None:
        return []
    keys = np.concatenate([share.keys for share in shares])
    unique, first = np.unique(keys, return_index=True)
    rows = first[unique != _REPEATED]
    together: list[Any] = []
    for number, look in enumerate(model.looks):
        if look is None:
            entries = [entry for share in shares if share.layout is not None for entry in share.lists[number]]
            together.append([entries[row] for row in rows])
        else:
            own = cast(Tensor, columns[number]) if columns else _nothing_like(look)
            column = own if size == 1 else _all_gathered(own, [len(share.keys) for share in shares], group)
            together.append(column[torch.from_numpy(rows).to(column.device)])
    return rebuilt(cast(Layout, model.layout), together)


def _described(outputs: Any, source: Any, size: int) -> tuple[_Share, list[Column]]:
    """Take this rank's outputs apart. What is wrong with them is said to all ranks, which raise it together."""
    try:
        keys, layout, columns = _with_keys(outputs, source, size)
    except ColumnError as error:
        return _Share(wrong=str(error)), []
    looks = tuple(
        (column.dtype, tuple(column.shape[1:]), column.device.type) if isinstance(column, Tensor) else None
        for column in columns
    )
    lists = tuple([] if isinstance(column, Tensor) else column for column in columns)
    return _Share("", keys, layout, looks, lists), columns


def _with_keys(outputs: Any, source: Any, size: int) -> tuple[np.ndarray, Node | int | None, list[Column]]:
    """Return the number of each item by which the items of all ranks are sorted, the structure and its columns.

    Outputs that are no list, or a list of plain values, are those of all items at once.
    """
    per_batch = _keys_of_batches(source, size) if isinstance(source, Loader) else None
    all_at_once = not isinstance(outputs, list) or (outputs and all(isinstance(entry, _PLAIN) for entry in outputs))
    batches = [outputs] if all_at_once else outputs
    sizes: list[int | None] = [None] * len(batches)
    if per_batch is not None and not source.received.whole_batches:
        per_batch = [np.concatenate([_NO_KEYS, *per_batch])] if all_at_once else per_batch
        sizes = [len(keys) for keys in per_batch]
    if per_batch is not None and len(batches) != len(per_batch):
        raise ColumnError(f"{len(batches)} outputs, and the loader has given {len(per_batch)} batches")
    layout, columns, counts = columns_of(batches, sizes)
    if per_batch is None:
        return _keys_of_items(source, sum(counts), size), layout, columns
    if source.received.whole_batches:
        per_batch = [_within(int(key[0]), count) for key, count in zip(per_batch, counts, strict=True)]
    return np.concatenate([_NO_KEYS, *per_batch]), layout, columns


def _keys_of_batches(source: Loader, size: int) -> list[np.ndarray]:
    if source.received is None:
        raise ColumnError("the loader has not been gone through")
    _check_ranks("loader", source.num_replicas, size)
    return source.received.keys()


def _keys_of_items(source: Any, count: int, size: int) -> np.ndarray:
    if not isinstance(source, DistributedSampler):
        keys = np.asarray(source, dtype=np.int64)
        if len(keys) != count:
            raise ColumnError(f"{count} entries for {len(keys)} indices")
        return keys
    _check_ranks("sampler", source.num_replicas, size)
    this = source.last_pass
    if this is None:
        raise ColumnError("the sampler has not been gone through")
    if count not in (this.count - this.start, this.done - this.start):
        raise ColumnError(f"{count} entries, and the sampler has given {this.done - this.start} items")
    return source.keys(count)


def _check_ranks(what: str, ranks: int, size: int) -> None:
    if ranks != size:
        raise ColumnError(f"the {what} deals out to {ranks} ranks, and the group has {size}")


def _within(key: int, count: int) -> np.ndarray:
    """The numbers of the items of one batch that is dealt out as a whole."""
    if key == _REPEATED:
        return np.full(count, _REPEATED, dtype=np.int64)
    return (key << 32) + np.arange(count, dtype=np.int64)


def _model(shares: Sequence[_Share], rank: int) -> _Share | None:
    """Return a share that shows what all look like; None if nobody has a batch. Raises what is wrong with one."""
    model = None
    for place, share in enumerate(shares):
        wrong = share.wrong
        if not wrong and share.layout is not None:
            model = model or share
            if (share.layout, share.looks) != (model.layout, model.looks):
                wrong = "its outputs are nested in another way, or their entries have other shapes, than rank " + str(
                    shares.index(model)
                )
        if wrong:
            raise MisuseError(
                f"phalanx.gather: on rank {place}, {wrong}",
                "one output for each batch received, whose leaves have one entry per item, alike on all ranks", rank,
            )  # fmt: skip
    return model


def _nothing_like(look: tuple[torch.dtype, tuple[int, ...], str]) -> Tensor:
    dtype, shape, device = look
    return torch.empty((0, *shape), dtype=dtype, device=device)


def _all_gathered(own: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> Tensor:
    """Return the rows of all ranks, in order of rank."""
    padded = own.new_zeros((max(counts), *own.shape[1:]))
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded, group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
