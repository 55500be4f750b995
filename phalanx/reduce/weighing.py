"""The autograd side of weigh(): the loss keeps its value, its gradient gets its weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def weigh(loss: torch.Tensor, n: float, counted: Callable[[float], float]) -> torch.Tensor:
    """Return `loss` with the same value; in its backward `counted(n)` gives the factor for the gradient.

    With n = 0 nothing flows back into the graph, because 0 x NaN is NaN; the result still has a backward.
    """
    if not torch.is_grad_enabled():
        return loss
    anchor = torch.zeros((), dtype=loss.dtype, device=loss.device, requires_grad=True)
    weighed: torch.Tensor = _Weighed.apply(loss, anchor, n, counted)  # type: ignore[no-untyped-call]
    return weighed


class _Weighed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, anchor: torch.Tensor, n: float, counted: Any) -> torch.Tensor:
        ctx.n, ctx.counted = n, counted
        return loss.detach().clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        factor = ctx.counted(ctx.n)
        if not factor:
            return None, None, None, None
        return (gradient if factor == 1.0 else gradient * factor), None, None, None
