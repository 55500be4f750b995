"""What one process with the whole batch would have: the truth that N ranks are compared with.

A step's batches are given rank by rank, and each rank's as a list of micro-batches: `batches[rank][i]`.
Two policies say how they are averaged. Without `items`, every rank counts as one, as in torch: the mean
over ranks of the sum over a rank's micro-batches. With `items`, which counts the items of a batch, every
item counts as one: the mean over all items, however they are split; the loss must then be a mean over its
batch's items.

Nothing here knows of ranks, groups or reducers: one copy of the model, plain autograd.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

Gradients = dict[str, Tensor | None]
Loss = Callable[[Module, Any], Tensor]
Batches = Sequence[Sequence[Any]]
Items = Callable[[Any], float]


def gradients(
    model: Module, loss: Loss, batches: Batches, items: Items | None = None, divisor: float | None = None
) -> Gradients:
    """Return the gradient of each parameter by name, None for one that no loss depends on.

    `loss(model, batch)` is one micro-batch's. `divisor` is what the sum is divided by, where it is neither
    the number of ranks nor that of items. The model is left as it is, buffers included.
    """
    model = copy.deepcopy(model)
    _accumulate(model, loss, batches, items, divisor)
    return gradients_of(model)


def parameters(
    model: Module,
    loss: Loss,
    steps: Iterable[Batches],
    optimizer: Callable[[Iterable[Tensor]], Optimizer],
    items: Items | None = None,
) -> dict[str, Tensor]:
    """Return each parameter by name after one optimizer step for each of `steps`; the model is left as it is.

    `optimizer` makes the optimizer from the parameters: `lambda p: torch.optim.SGD(p, lr=0.1)`.
    """
    model = copy.deepcopy(model)
    stepper = optimizer(model.parameters())
    for batches in steps:
        _accumulate(model, loss, batches, items, None)
        stepper.step()
    return parameters_of(model)


def gradients_of(model: Module) -> Gradients:
    """Return a copy of each parameter's gradient by name, without the `module.` of a wrapper."""
    return {_plain(name): None if p.grad is None else p.grad.detach().clone() for name, p in _named(model)}


def parameters_of(model: Module) -> dict[str, Tensor]:
    """Return a copy of each parameter by name, without the `module.` of a wrapper."""
    return {_plain(name): p.detach().clone() for name, p in _named(model)}


def assert_close(
    actual: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    rtol: float = 1e-5,
    atol: float = 1e-7,
) -> None:
    """Raise AssertionError that names the first parameter that differs, and by how much.

    An element is close within `atol + rtol * |expected|`; NaN is close to NaN. None is close to None only.
    """
    if extra := set(actual) ^ set(expected):
        raise AssertionError(f"parameters that only one side has: {', '.join(sorted(extra))}")
    for name, truth in expected.items():
        if difference := _difference(actual[name], truth, rtol, atol):
            raise AssertionError(f"{name}: {difference}")


def _accumulate(model: Module, loss: Loss, batches: Batches, items: Items | None, divisor: float | None) -> None:
    """Set each parameter's gradient to that of the averaged loss of all ranks."""
    weighed = [(batch, 1.0 if items is None else float(items(batch))) for rank in batches for batch in rank]
    if divisor is None:
        divisor = float(len(batches)) if items is None else sum(weight for _, weight in weighed)
    model.zero_grad(set_to_none=True)
    for batch, weight in weighed:
        if weight:  # A batch of no items has no mean: 0 x NaN is NaN.
            (loss(model, batch) * (weight / divisor)).backward()


def _difference(actual: Tensor | None, expected: Tensor | None, rtol: float, atol: float) -> str:
    if actual is None or expected is None:
        return "" if actual is expected else f"is {_say(actual)}, expected {_say(expected)}"
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return f"is {_say(actual)}, expected {_say(expected)}"
    actual, expected = (t.to_dense() if t.layout != torch.strided else t for t in (actual, expected))
    if torch.isclose(actual, expected, rtol, atol, equal_nan=True).all():
        return ""
    # In float64 the differences of two large or low-precision numbers are what they seem.
    wide = torch.complex128 if actual.is_complex() else torch.float64
    apart = (actual.to(wide) - expected.to(wide)).abs()
    where = tuple(int(i) for i in torch.unravel_index(apart.nan_to_num(torch.inf).argmax(), apart.shape))
    return (
        f"differs by {apart[where].item():.3g} at {list(where)}: is {actual[where].item():.7g}, "
        f"expected {expected[where].item():.7g} (rtol {rtol:g}, atol {atol:g})"
    )


def _say(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)}"


def _named(model: Module) -> list[tuple[str, Tensor]]:
    return list(model.named_parameters())


def _plain(name: str) -> str:
    return name.removeprefix("module.")
