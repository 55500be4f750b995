"""What earlier backwards have left in the gradients, where the next one is weighed.

A synchronised gradient that is still there when a round begins is accumulated onto, as in torch. In a weighed
round it would be scaled with what is new, unless the round is one micro-batch long: the factors of the
ranks then add up to one. So it is looked for, and a longer round on top of it is refused.

Gradients that somebody zeroes within a round take their items with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from typing import NamedTuple

import torch

from phalanx.reduce.weights import Weights

_LOOKED_AT = 8
"""How many gradients are looked at, the smallest: whatever zeroes, zeroes all."""


class _Left(NamedTuple):
    """A gradient that a backward has left, and its version then."""

    parameter: torch.Tensor
    gradient: int
    version: int

    def is_dropped(self) -> bool:
        """Whether somebody has written zeros over it, has replaced it by zeros, or has removed it."""
        now = self.parameter.grad
        if now is None:
            return True
        return (id(now) != self.gradient or now._version != self.version) and not bool(now.any())


class Residue:
    """Looks for gradients of an earlier step, or of an earlier backward, among those of `parameters`."""

    def __init__(self) -> None:
        self._found = False
        self._left: list[_Left] = []
        self._flushes = 0

    def check(self, parameters: Sequence[torch.Tensor], weights: Weights) -> None:
        """Look, when a weighed backward begins; raises ValueError where the round cannot be weighed exactly."""
        if weights.is_in_backward:
            return
        if not weights.weighed:
            self._found = any(bool(gradient.any()) for _, gradient in _smallest(parameters))
        # With a common unit gradients are sums until they are synchronised, in the first micro-batch already.
        if self._found and (weights.weighed or weights.common_unit):
            raise ValueError("weigh() on top of the gradients of an earlier step, which it would scale too")

    def left(self, parameters: Sequence[torch.Tensor], weights: Weights) -> None:
        """Remember what a backward leaves to be accumulated onto, if it was weighed."""
        if weights.weighed:
            self._flushes = weights.flushes
            self._left = [_Left(p, id(gradient), gradient._version) for p, gradient in _smallest(parameters)]

    def is_dropped(self, weights: Weights) -> bool:
        """Whether the user has dropped all that the backwards of this round have left. Says so once."""
        if not (weights.weighed and self._left and self._flushes == weights.flushes) or weights.is_in_backward:
            return False
        if not all(each.is_dropped() for each in self._left):
            return False
        self._left, self._found = [], False
        return True


def _smallest(parameters: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The parameters of the smallest gradients, and these."""
    found = [(p, g) for p in parameters if (g := p.grad) is not None and g.layout is torch.strided and g.numel()]
    return nsmallest(_LOOKED_AT, found, key=lambda each: each[1].numel())
