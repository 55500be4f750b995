"""What earlier backwards have left in the gradients, where the next one is weighed.

A synchronised gradient that is still there when a round begins is accumulated onto, as in torch. In a weighed
round it would be scaled with what is new, unless the round is one micro-batch long: the factors of the
ranks then add up to one. So it is looked for, and a longer round on top of it is refused.

Gradients that somebody zeroes within a round take their items with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest

import torch

from phalanx.reduce.weights import Weights

_LOOKED_AT = 8
"""How many gradients are looked at, the smallest: whatever zeroes, zeroes all."""


class Residue:
    """Looks for gradients of an earlier step, or of an earlier backward, among those of `parameters`."""

    def __init__(self) -> None:
        self._found = False
        self._left: dict[int, int] = {}
        self._flushes = 0

    def check(self, parameters: Sequence[torch.Tensor], weights: Weights) -> None:
        """Look, when a weighed backward begins; raises ValueError where the round cannot be weighed exactly."""
        if weights.is_in_backward:
            return
        if weights.weighed and self._flushes == weights.flushes and self._is_zeroed(parameters):
            weights.clear()
        if not weights.weighed:
            self._found = any(bool(gradient.any()) for gradient in _smallest(parameters))
        # With a common unit gradients are sums until they are synchronised, in the first micro-batch already.
        if self._found and (weights.weighed or weights.common_unit):
            raise ValueError("weigh() on top of the gradients of an earlier step, which it would scale too")

    def left(self, parameters: Sequence[torch.Tensor], weights: Weights) -> None:
        """Remember what a backward leaves to be accumulated onto, if it was weighed."""
        if weights.weighed:
            self._flushes = weights.flushes
            self._left = {id(gradient): gradient._version for gradient in _smallest(parameters)}

    def _is_zeroed(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether somebody has written zeros over what the last backward has left, or has dropped it."""
        now = _smallest(parameters) if self._left else []
        written = [self._left.get(id(gradient), gradient._version) != gradient._version for gradient in now]
        return bool(self._left) and all(written) and not any(bool(gradient.any()) for gradient in now)


def _smallest(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    gradients = [g for p in parameters if (g := p.grad) is not None and g.layout is torch.strided and g.numel()]
    return nsmallest(_LOOKED_AT, gradients, key=torch.Tensor.numel)
