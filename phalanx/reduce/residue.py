"""What an earlier step has left in the gradients, where the next one is weighed.

A synchronised gradient that is still there when a round begins is accumulated onto, as in torch. In a weighed
round it would be scaled with what is new, unless the round is one micro-batch long: the factors of the
ranks then add up to one. So it is looked for, and a longer round on top of it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest

import torch

from phalanx.reduce.weights import Weights

_LOOKED_AT = 8
"""How many gradients are looked at, the smallest: whatever zeroes, zeroes all."""


class Residue:
    """Looks for gradients of an earlier step among those of `parameters`."""

    def __init__(self) -> None:
        self._found = False

    def check(self, parameters: Sequence[torch.Tensor], weights: Weights) -> None:
        """Look, when a weighed backward begins; raises ValueError where the round cannot be weighed exactly."""
        if weights.is_in_backward:
            return
        if not weights.weighed:
            self._found = _is_any_nonzero(parameters)
        # With a common unit gradients are sums until they are synchronised, in the first micro-batch already.
        if self._found and (weights.weighed or weights.common_unit):
            raise ValueError("weigh() on top of the gradients of an earlier step, which it would scale too")


def _is_any_nonzero(parameters: Sequence[torch.Tensor]) -> bool:
    gradients = [g for p in parameters if (g := p.grad) is not None and g.layout is torch.strided and g.numel()]
    return any(bool(gradient.any()) for gradient in nsmallest(_LOOKED_AT, gradients, key=torch.Tensor.numel))
