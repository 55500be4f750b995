"""Copying a rank's contributions into its slots, piece by piece, wherever the gradients are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from phalanx.transport.reductions import constant
from phalanx.transport.shared_gradients import SharedGradients


class _Part(NamedTuple):
    """Elements `low` to `high`, in memory order, of a parameter's gradient; `whole` if these are all."""

    parameter: int
    low: int
    high: int
    whole: bool


class Posting:
    """Posts the gradients of `indices`, whose places are at elements `starts` of regions of `store`.

    `views[i]` is the place of parameter i: its gradient's shape and strides. `shaped(flat, i)` gives a flat
    range of memory these.
    """

    def __init__(
        self,
        store: SharedGradients,
        indices: Sequence[int],
        starts: Sequence[tuple[int, int]],
        views: Sequence[torch.Tensor],
        shaped: Callable[[torch.Tensor, int], torch.Tensor],
    ) -> None:
        self._strides = {index: views[index].stride() for index in indices}
        self._given: Sequence[torch.Tensor | None] = ()
        self._made: list[torch.Tensor] = []
        self._flat: dict[int, torch.Tensor] = {}
        self._parts: list[list[_Part]] = []
        self._slots: list[list[list[torch.Tensor]]] = [[], []]
        counts = {index: views[index].numel() for index in indices}
        for piece in store.pieces:
            found: list[tuple[_Part, list[torch.Tensor]]] = []
            for each in piece:
                flat = [store.slot(turn, each) for turn in (0, 1)]
                for index, (region, start) in zip(indices, starts, strict=True):
                    low, high = max(each.start - start, 0), min(each.stop - start, counts[index])
                    if region != each.region or low > high or (low == high and counts[index]):
                        continue
                    part = _Part(index, low, high, high - low == counts[index])
                    slots = [slot[start + low - each.start : start + high - each.start] for slot in flat]
                    found.append((part, [shaped(slot, index) for slot in slots] if part.whole else slots))
            found.sort(key=lambda each: each[0].parameter)
            self._parts.append([part for part, _ in found])
            for turn in (0, 1):
                self._slots[turn].append([slots[turn] for _, slots in found])

    def begin(self, given: Sequence[torch.Tensor | None], made: list[torch.Tensor]) -> None:
        """Take what is posted next: a gradient or None by parameter; `made` has all, if autograd has just made all."""
        self._given, self._made = given, made
        self._flat.clear()

    def end(self) -> None:
        """Let go of the gradients."""
        self._given, self._made = (), []
        self._flat.clear()

    def post(self, piece: int, turn: int, factor: float) -> None:
        """See SharedGradients.post."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._post(piece, turn, factor)
        else:  # at the end of most backwards; no_grad() would take as long as to copy a small gradient
            self._post(piece, turn, factor)

    def _post(self, piece: int, turn: int, factor: float) -> None:
        slots, parts, made = self._slots[turn][piece], self._parts[piece], self._made
        if made and len(self._parts) == 1:
            torch._foreach_copy_(slots, made)
            return
        for slot, part in zip(slots, parts, strict=True):
            gradient = self._given[part.parameter]
            if gradient is None:
                slot.zero_()
                continue
            gradient = _dense(gradient) if part.whole else self._range(part, gradient)
            if factor == 1.0:
                slot.copy_(gradient)
            else:
                torch.mul(gradient, constant(factor, slot.dtype), out=slot)

    def _range(self, part: _Part, gradient: torch.Tensor) -> torch.Tensor:
        """A part of `gradient` as one range of memory, in the order of the gradient's place."""
        flat = self._flat.get(part.parameter)
        if flat is None:
            flat = self._flat[part.parameter] = self._flattened(gradient, self._strides[part.parameter])
        return flat[part.low : part.high]

    @staticmethod
    @torch.no_grad()
    def _flattened(gradient: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
        gradient = _dense(gradient)
        if gradient.stride() != strides:
            gradient = torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype).copy_(gradient)
        return gradient.as_strided((gradient.numel(),), (1,))


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
