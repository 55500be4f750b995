"""Copying a rank's contributions into its slots, piece by piece, wherever the gradients are."""

from __future__ import annotations

import itertools
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from phalanx.transport.pieces import Part
from phalanx.transport.reductions import constant
from phalanx.transport.shared_gradients import SharedGradients


class Share(NamedTuple):
    """Elements `low` to `high`, in memory order, of a parameter's gradient; `whole` if these are all."""

    parameter: int
    low: int
    high: int
    whole: bool


class Contributions:
    """The gradients of `indices`, whose places are at elements `starts` of the regions of a store.

    `views[i]` is the place of parameter i: its gradient's shape and strides. `shaped(flat, i)` gives a flat
    range of memory these.
    """

    def __init__(
        self,
        indices: Sequence[int],
        starts: Sequence[tuple[int, int]],
        views: Sequence[torch.Tensor],
        shaped: Callable[[torch.Tensor, int], torch.Tensor],
    ) -> None:
        self._starts = dict(zip(indices, starts, strict=True))
        self._in_order = sorted((region, start, index) for index, (region, start) in self._starts.items())
        self._counts = {index: views[index].numel() for index in indices}
        self._strides = {index: views[index].stride() for index in indices}
        self._shaped = shaped
        self._given: Sequence[torch.Tensor | None] = ()
        self._flat: dict[int, torch.Tensor] = {}
        self.made: list[torch.Tensor] = []

    def begin(self, given: Sequence[torch.Tensor | None], made: list[torch.Tensor]) -> None:
        """Take what is posted next: a gradient or None by parameter; `made` has all, if autograd has just made all."""
        self._given, self.made = given, made
        self._flat.clear()

    def end(self) -> None:
        """Let go of the gradients."""
        self._given, self.made = (), []
        self._flat.clear()

    def shares_in(self, region: int, start: int, stop: int) -> Iterator[Share]:
        """What of the gradients lies in elements `start` to `stop` of a region, in order."""
        at = max(bisect_right(self._in_order, (region, start, sys.maxsize)) - 1, 0)
        for number, first, index in itertools.islice(self._in_order, at, None):
            if (number, first) >= (region, stop):
                return
            low, high = max(start - first, 0), min(stop - first, self._counts[index])
            if number == region and low < high:
                yield Share(index, low, high, high - low == self._counts[index])

    def start_of(self, share: Share) -> int:
        """The element of its region where a share begins."""
        return self._starts[share.parameter][1] + share.low

    def shape(self, memory: torch.Tensor, share: Share) -> torch.Tensor:
        """Flat memory for a share in the form of what of() returns."""
        return self._shaped(memory, share.parameter) if share.whole else memory

    def of(self, share: Share) -> torch.Tensor | None:
        """A share: a whole gradient as it is, else one range of memory, in the order of the gradient's place."""
        gradient = self._given[share.parameter]
        if gradient is None:
            return None
        if share.whole:
            return _dense(gradient)
        flat = self._flat.get(share.parameter)
        if flat is None:
            flat = self._flat[share.parameter] = self._flattened(gradient, self._strides[share.parameter])
        return flat[share.low : share.high]

    @staticmethod
    def _flattened(gradient: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        gradient = _dense(gradient)
        if gradient.stride() != strides:
            gradient = torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype).copy_(gradient)
        return gradient.as_strided((gradient.numel(),), (1,))

    def copy(self, shares: Sequence[Share], slots: Sequence[torch.Tensor], factor: float) -> None:
        """Write shares, times `factor`, to `slots` of their forms."""
        for slot, share in zip(slots, shares, strict=True):
            gradient = self.of(share)
            if gradient is None:
                slot.zero_()
            elif factor == 1.0:
                slot.copy_(gradient)
            else:
                torch.mul(gradient, constant(factor, slot.dtype), out=slot)


class Posting:
    """Posts whole pieces."""

    def __init__(self, store: SharedGradients, contributions: Contributions) -> None:
        self._from = contributions
        self._shares: list[list[Share]] = []
        self._slots: list[list[list[torch.Tensor]]] = [[], []]
        for piece in store.pieces:
            found = [(share, part) for part in piece for share in contributions.shares_in(*part[:3])]
            found.sort(key=lambda each: each[0].parameter)
            self._shares.append([share for share, _ in found])
            for turn in (0, 1):
                flat = {part: store.slot(turn, part) for part in piece}
                self._slots[turn].append([slot_of(contributions, flat[part], part, share) for share, part in found])

    def post(self, piece: int, turn: int, factor: float) -> None:
        """See SharedGradients.post."""
        made = self._from.made
        with without_grad():
            if made and len(self._shares) == 1 and factor == 1.0 and copy_all(self._slots[turn][piece], made):
                return
            self._from.copy(self._shares[piece], self._slots[turn][piece], factor)


_NOTHING = nullcontext()


def without_grad() -> AbstractContextManager[None]:
    """torch.no_grad() where it makes a difference: not at the end of most backwards, and it is not cheap."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> bool:
    """Copy all at once; False if torch cannot: sparse ones or conjugate or negated views are among them."""
    try:
        torch._foreach_copy_(targets, sources)
    except RuntimeError:
        return False
    return True


def slot_of(contributions: Contributions, flat: torch.Tensor, part: Part, share: Share) -> torch.Tensor:
    """Where a share lies in `flat`, the memory of the part of a piece that it lies in."""
    start = contributions.start_of(share) - part.start
    return contributions.shape(flat[start : start + share.high - share.low], share)


@torch.no_grad()
def copy(gradient: torch.Tensor, place: torch.Tensor) -> None:
    """Copy a gradient, which may be sparse, to its place."""
    place.copy_(_dense(gradient))


@torch.no_grad()
def add(gradient: torch.Tensor, place: torch.Tensor) -> None:
    """Add a gradient, which may be sparse, to its place."""
    place.add_(_dense(gradient))


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
