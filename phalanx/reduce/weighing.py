"""The autograd side of weigh(): the loss keeps its value, its gradient gets its weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from phalanx.errors import MisuseError
from phalanx.reduce.weights import Weights


def weigh(loss: torch.Tensor, n: float, counted: Callable[[float], float]) -> torch.Tensor:
    """Return `loss` with the same value; in its backward `counted(n)` gives the factor for the gradient.

    With n = 0 nothing flows back into the graph, because 0 x NaN is NaN; the result still has a backward.
    """
    if not torch.is_grad_enabled():
        return loss
    anchor = torch.zeros((), dtype=loss.dtype, device=loss.device, requires_grad=True)
    weighed: torch.Tensor = _Weighed.apply(loss, anchor, n, counted)  # type: ignore[no-untyped-call]
    return weighed


def close_backward(weights: Weights, produced: bool, rank: int) -> None:
    """Close a backward; MisuseError if it was not weighed while others since the last step were."""
    try:
        weights.backward_ended(produced)
    except ValueError as error:
        weights.clear()
        instead = "call ddp.weigh(loss, n) on the loss of every backward, or on none"
        raise MisuseError(str(error), instead, rank) from None


def refuse_pattern(weights: Weights, rank: int) -> NoReturn:
    """Raise MisuseError for a weighed backward that synchronises some layers: the others would owe its items."""
    weights.clear()
    raise MisuseError(
        "weigh() with no_sync(pattern), which keeps some layers local while the others are synchronised",
        "sync_policy(pattern, every=k), which counts the items of its layers apart", rank,
    )  # fmt: skip


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
