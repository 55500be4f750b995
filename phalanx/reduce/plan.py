"""The bucket plan: where every parameter's gradient lives, and which bucket it belongs to. Pure.

Gradients of one dtype and device lie in one region, in the order in which backward usually produces them
(the reverse of registration), so that a bucket is one range of its region and is never packed. Every rank
makes the plan for itself; the fingerprints are compared when the model is wrapped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

_ALIGN_BYTES = 64

NOWHERE = (-1, -1)
"""The place of a parameter without dense gradient memory: a sparse one, or one without elements."""


@dataclass(frozen=True)
class Entry:
    """One parameter: what of it must be equal on all ranks."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    device: str
    sparse: bool = False
    strides: tuple[int, ...] | None = None
    """How its elements lie in memory; None where they lie in the order of their indices."""

    @property
    def count(self) -> int:
        """Number of elements."""
        product = 1
        for size in self.shape:
            product *= size
        return product

    def describe(self) -> str:
        """As people write it: `0.weight: float32 [3, 2]`."""
        text = f"{self.name}: {self.dtype} {list(self.shape)}" + (" sparse" if self.sparse else "")
        return text if self.strides is None else f"{text} with strides {list(self.strides)}"


@dataclass(frozen=True)
class Region:
    """All gradients of one dtype on one device; `count` elements."""

    dtype: str
    device: str
    count: int


@dataclass(frozen=True)
class Bucket:
    """A range of a region, and the parameters in it, in order."""

    index: int
    region: int
    start: int
    stop: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """`places[i]` is (region, first element) of parameter i; NOWHERE if it has no dense gradient memory."""

    entries: tuple[Entry, ...]
    regions: tuple[Region, ...]
    places: tuple[tuple[int, int], ...]
    buckets: tuple[Bucket, ...]
    fingerprint: int

    def spans(self, used: Iterable[int]) -> list[tuple[int, int, int]]:
        """The ranges (region, start, stop) that the dense parameters in `used` fill, joined where they touch."""
        ranges = []
        for index in used:
            place = self.places[index]
            if place is not NOWHERE:
                ranges.append((place[0], place[1], place[1] + self.entries[index].count))
        ranges.sort()
        joined: list[list[int]] = []
        for region, start, stop in ranges:
            if joined and joined[-1][0] == region and joined[-1][2] == start:
                joined[-1][2] = stop
            else:
                joined.append([region, start, stop])
        return [(region, start, stop) for region, start, stop in joined]

    def label(self, model: str) -> str:
        """What is synchronised, for texts: the model's name, its first and last parameter, its buckets."""
        first, last, count = self.entries[0].name, self.entries[-1].name, len(self.buckets)
        names = f"parameter {first}" if len(self.entries) == 1 else f"parameters {first} to {last}"
        return f"{model}, {names}, {count} bucket{'s' * (count != 1)}"

    def whole(self) -> list[tuple[int, int, int]]:
        """The spans when every parameter is used."""
        return [(number, 0, region.count) for number, region in enumerate(self.regions)]


def make_plan(entries: Sequence[Entry], caps: Sequence[int]) -> Plan:
    """Assign gradients to buckets. `caps` are bytes: of the first bucket, the second, ...; the last repeats."""
    filling: dict[tuple[str, str], _Filling] = {}
    places = [NOWHERE] * len(entries)
    closed: list[tuple[int, int, int, tuple[int, ...]]] = []
    for index in reversed(range(len(entries))):
        entry = entries[index]
        if entry.sparse or not entry.count:
            continue
        key = (entry.dtype, entry.device)
        region = filling.setdefault(key, _Filling(len(filling)))
        places[index] = (region.number, region.at)
        region.members.append(index)
        region.at += entry.count
        cap = caps[min(region.closed, len(caps) - 1)]
        if (region.at - region.start) * entry.itemsize >= cap:
            closed.append(region.close(entry.itemsize))
    for (_, _), region in filling.items():
        if region.members:
            closed.append(region.close(entries[region.members[0]].itemsize))
    closed.sort(key=lambda bucket: -bucket[3][0])
    return Plan(
        tuple(entries),
        tuple(Region(dtype, device, region.at) for (dtype, device), region in filling.items()),
        tuple(places),
        tuple(Bucket(number, *bucket) for number, bucket in enumerate(closed)),
        fingerprint(entries, caps),
    )


class _Filling:
    """A region while the plan is made."""

    def __init__(self, number: int) -> None:
        self.number, self.at, self.start, self.closed = number, 0, 0, 0
        self.members: list[int] = []

    def close(self, itemsize: int) -> tuple[int, int, int, tuple[int, ...]]:
        bucket = (self.number, self.start, self.at, tuple(self.members))
        step = max(1, _ALIGN_BYTES // itemsize)
        self.at = -(-self.at // step) * step
        self.start, self.members, self.closed = self.at, [], self.closed + 1
        return bucket


def fingerprint(entries: Sequence[Entry], caps: Sequence[int]) -> int:
    """A 63-bit hash of all that must be equal on every rank."""
    text = repr(([(e.name, e.shape, e.dtype, e.sparse, e.strides) for e in entries], list(caps)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def first_difference(models: Mapping[int, Sequence[Entry]]) -> str:
    """Say in which parameter the models of the ranks first differ; empty if they do not."""
    ranks = sorted(models)
    reference = models[ranks[0]]
    for rank in ranks[1:]:
        other = models[rank]
        for position in range(max(len(reference), len(other))):
            mine = reference[position] if position < len(reference) else None
            theirs = other[position] if position < len(other) else None
            if mine is None or theirs is None or _differs(mine, theirs):
                here = mine.describe() if mine else "no parameter"
                there = theirs.describe() if theirs else "no parameter"
                name = (mine or theirs).name  # type: ignore[union-attr]
                return (
                    f"the first difference is parameter {position}, {name!r}: rank {ranks[0]} has {here}, "
                    f"rank {rank} has {there}"
                )
    return ""


def _differs(a: Entry, b: Entry) -> bool:
    return (a.name, a.shape, a.dtype, a.sparse, a.strides) != (b.name, b.shape, b.dtype, b.sparse, b.strides)
