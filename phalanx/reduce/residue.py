"""What earlier backwards have left in the gradients, where the next one is weighed.

A synchronised gradient that is still there when a round begins is accumulated onto, as in torch. In a weighed
round it would be scaled with what is new, unless the round is one micro-batch long: the factors of the
ranks then add up to one. So it is looked for, and a longer round on top of it is refused.

Gradients that somebody zeroes within a round take their items with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import nsmallest

import torch

from phalanx.reduce.weights import Weights

_LOOKED_AT = 8
"""How many gradients of an earlier step are looked for, the smallest: whatever zeroes, zeroes all."""


class Residue:
    """Looks for gradients of an earlier step, or of an earlier backward, among those of `parameters`."""

    def __init__(self) -> None:
        self._found = False
        self._left: list[torch.Tensor] = []
        self._flushes = 0

    def check(self, parameters: Sequence[torch.Tensor], weights: Weights) -> None:
        """Look, when a weighed backward begins; raises ValueError where the round cannot be weighed exactly."""
        if weights.is_in_backward:
            return
        if not weights.weighed:
            self._found = _is_any(nsmallest(_LOOKED_AT, _gradients(parameters), key=torch.Tensor.numel))
        # With a common unit gradients are sums until they are synchronised, in the first micro-batch already.
        if self._found and (weights.weighed or weights.common_unit):
            raise ValueError("weigh() on top of the gradients of an earlier step, which it would scale too")

    def left(self, parameters: Sequence[torch.Tensor], weights: Weights) -> None:
        """Remember what a backward leaves to be accumulated onto, if it was weighed.

        Gradients that are zero by themselves could not be told from zeroed ones later: they are taken to stay.
        """
        if weights.weighed:
            self._flushes = weights.flushes
            left = sorted(parameters, key=torch.Tensor.numel)
            self._left = left if _is_any(_gradients(left)) else []

    def is_dropped(self, weights: Weights) -> bool:
        """Whether the user has dropped all that the backwards of this round have left. Says so once."""
        if not (weights.weighed and self._left and self._flushes == weights.flushes) or weights.is_in_backward:
            return False
        if _is_any(_gradients(self._left)):
            return False
        self._left, self._found = [], False
        return True


def _gradients(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    return (g for p in parameters if (g := p.grad) is not None and g.layout is torch.strided and g.numel())


def _is_any(gradients: Iterable[torch.Tensor]) -> bool:
    """Whether one of them is not zero; usually the first is not."""
    return any(bool(gradient.any()) for gradient in gradients)
