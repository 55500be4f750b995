"""Gradients under torch.distributed.autograd, which accumulates them in a context and leaves p.grad alone.

Its engine runs none of the hooks that come after an accumulation. It runs those of the node that would have
accumulated, in a thread of its own, which does not tell the context; the thread of the forward does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import torch
import torch.distributed.rpc
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from phalanx.errors import MisuseError
from phalanx.reduce.watch import weakly

_is_in_use: Callable[[], bool] = getattr(torch.distributed.rpc, "_is_current_rpc_agent_set", lambda: False)


class Contexts:
    """Finds the context that a backward of some parameters accumulates in.

    `begins()` is called at the first sign of a backward, with a context or without.
    """

    def __init__(self, begins: Callable[[], None]) -> None:
        self._begins = begins
        self._parameters: Sequence[torch.nn.Parameter] = ()
        self._nodes: list[Node] = []  # kept, or their hooks would go with the first graph
        self._handles: list[RemovableHandle] = []
        self._reached = False
        self._entered: int | None = None

    def forward(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """A forward with `parameters` begins."""
        if not _is_in_use():
            return
        if parameters is not self._parameters:
            self._parameters = parameters
            for handle in self._handles:
                handle.remove()
            reached = weakly(self._node_reached)  # the garbage collector does not see what nodes hold
            self._nodes = [get_gradient_edge(p).node for p in parameters if p.requires_grad]
            self._handles = [node.register_prehook(reached) for node in self._nodes]
        try:
            self._entered = torch.distributed.autograd._current_context()._context_id()
        except RuntimeError:
            self._entered = None

    def _node_reached(self, _: Sequence[torch.Tensor]) -> None:
        if not self._reached:
            self._reached = True
            self._begins()

    def forget(self) -> None:
        """The backward has raised."""
        self._reached = False

    def gradients(self, accumulated: bool, rank: int) -> dict[int, torch.Tensor] | None:
        """The gradients in the context of the backward that has just ended, by id of their tensor.

        None if it was one without a context: one that has `accumulated`, or that has reached no parameter.
        """
        reached, self._reached = self._reached, False
        if accumulated or not reached:
            return None
        try:
            found = torch.distributed.autograd.get_gradients(-1 if self._entered is None else self._entered)
        except RuntimeError:  # no such context
            raise MisuseError(
                "a backward of torch.distributed.autograd whose forward has run outside of its context",
                "`with dist_autograd.context() as context_id:` around the forward too",
                rank,
            ) from None
        return {id(leaf): gradient for leaf, gradient in found.items()}


def refuse_with_contexts(call: str, rank: int) -> NoReturn:
    """Raise MisuseError for a call whose ledgers outlive a context."""
    raise MisuseError(
        f"{call} with torch.distributed.autograd, whose contexts end with their step",
        "loss.backward(), or a loss weighted by hand with no policy",
        rank,
    )


@contextmanager
def shown(
    named: Sequence[tuple[str, torch.nn.Parameter]], gradients: dict[int, torch.Tensor], rank: int
) -> Iterator[None]:
    """Have parameters show the gradients of a context; what they show at the end is written there.

    What they showed before, they show again afterwards. Nothing can be added to a context from here: MisuseError
    for a parameter that has a gradient in the contexts of other ranks only.
    """
    # A gradient that has been synchronised is in its place, which the next synchronisation writes to.
    before = [None if p.grad is None else p.grad.clone() for _, p in named]
    for _, parameter in named:
        parameter.grad = gradients.get(id(parameter))
    try:
        yield
        for name, parameter in named:
            _write_back(name, parameter.grad, gradients.get(id(parameter)), rank)
    finally:
        for (_, parameter), gradient in zip(named, before, strict=True):
            parameter.grad = gradient


@torch.no_grad()
def _write_back(name: str, result: torch.Tensor | None, gradient: torch.Tensor | None, rank: int) -> None:
    if result is None or result is gradient:
        return
    if gradient is None:
        raise MisuseError(
            f"a backward of torch.distributed.autograd that does not use parameter {name!r} on this rank, and does "
            "on another",
            "use it on every rank, if need be multiplied by zero: a gradient of others cannot be added to a context",
            rank,
        )
    gradient.copy_(result if gradient.layout is result.layout else result.to_sparse())
