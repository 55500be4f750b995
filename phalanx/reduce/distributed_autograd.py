"""Gradients under torch.distributed.autograd, which accumulates them in a context and leaves p.grad alone.

Its engine runs none of the hooks that come after an accumulation. It runs those of the node that would have
accumulated, in a thread of its own, where nothing tells the context. So the contexts that are alive are compared
before the first accumulation and at the end.
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
from phalanx.reduce.watch import thawed, weakly

_is_in_use: Callable[[], bool] = getattr(torch.distributed.rpc, "_is_current_rpc_agent_set", lambda: False)

_PROBED = 256
"""How many of this worker's contexts are looked for, from the newest one on."""
_REMEMBERED = 8
_OF_WORKER = (1 << 48) - 1  # the low bits of a context's number; above them is that of the worker that made it

Leaves = Sequence[torch.nn.Parameter]
Held = dict[torch.Tensor, tuple[torch.Tensor, int]]
"""The gradients in a context by leaf, with their versions."""


class Contexts:
    """Finds the context that a backward of some parameters accumulates in.

    `begins()` is called at the first sign of a backward, with a context or without.
    """

    def __init__(self, begins: Callable[[], None]) -> None:
        self._begins = begins
        self._leaves: tuple[Leaves, Leaves] = ((), ())
        self._nodes: list[Node] = []  # kept, or their hooks would go with the first graph
        self._handles: list[RemovableHandle] = []
        self._entered: list[int] = []  # by the latest forwards: other workers may have made these
        self._own: list[int] = []  # of this worker, alive when it was looked for them
        self._looked_at = -1  # the newest that was looked at
        self._before: dict[int, Held] | None = None  # what live contexts held when this backward began

    def watch(self, parameters: Leaves, frozen: Leaves) -> None:
        """Watch these leaves, where remote procedure calls are in use, instead of the present ones."""
        if not _is_in_use():
            self._leaves = ((), ())
            return
        self._leaves = (parameters, frozen)
        for handle in self._handles:
            handle.remove()
        reached = weakly(self._node_reached)  # the garbage collector does not see what nodes hold
        self._nodes = [_accumulating(leaf) for leaf in (*parameters, *frozen)]
        self._handles = [node.register_prehook(reached) for node in self._nodes]

    def forward(self, parameters: Leaves, frozen: Callable[[], Leaves]) -> None:
        """A forward begins."""
        if not _is_in_use():
            return
        if parameters is not self._leaves[0]:
            self.watch(parameters, frozen())
        entered = current_context()
        if entered is not None and entered not in self._entered:
            self._entered = [*self._entered, entered][-_REMEMBERED:]

    def _node_reached(self, _: Sequence[torch.Tensor]) -> None:
        if self._before is None:
            self._before = {context: _held(context) for context in self._alive()}
            self._begins()

    def _alive(self) -> list[int]:
        """The contexts that are alive here. Numbers are not used twice: what was dead once stays dead."""
        if not _count():
            return []
        newest = _newest()
        first = max(self._looked_at + 1, newest - _PROBED, newest & ~_OF_WORKER)
        self._own = [context for context in (*self._own, *range(first, newest + 1)) if _is_alive(context)]
        self._looked_at = newest
        self._entered = [context for context in self._entered if context in self._own or _is_alive(context)]
        return list(dict.fromkeys((*self._own, *self._entered)))

    def forget(self) -> None:
        """The backward has raised."""
        self._before = None

    def gradients(self, accumulated: bool, rank: int) -> dict[int, torch.Tensor] | None:
        """The gradients of the watched leaves in the context of the backward that has just ended, by id of the leaf.

        None if it was one without a context: it has reached no parameter, or has `accumulated` all that it reached.
        """
        before, self._before = self._before, None
        if before is None:
            return None
        ours = {id(leaf) for leaves in self._leaves for leaf in leaves}
        changed = []
        for context, held in before.items():
            now = {leaf: there for leaf, there in _held(context).items() if id(leaf) in ours}
            if not all(_same(held.get(leaf), there) for leaf, there in now.items()):
                changed.append({id(leaf): gradient for leaf, (gradient, _) in now.items()})
        if not changed and (accumulated or not _count()):
            return None
        if len(changed) != 1:
            raise MisuseError(
                "a backward of torch.distributed.autograd in a context that is not found here"
                if not changed else "backwards of torch.distributed.autograd in several contexts at once",
                "the forward inside of the context too, and one backward of a wrapped model at a time",
                rank,
            )  # fmt: skip
        return changed[0]


def _accumulating(leaf: torch.nn.Parameter) -> Node:
    """The node that accumulates the gradient of `leaf`, which may be frozen."""
    with thawed(leaf):
        return get_gradient_edge(leaf).node


def _count() -> int:
    """How many contexts are alive here, of whatever worker."""
    return int(torch.distributed.autograd._get_debug_info()["num_autograd_contexts"])


def _is_alive(context: int) -> bool:
    try:
        torch.distributed.autograd._is_valid_context(context)
    except RuntimeError:
        return False
    return True


def _newest() -> int:
    """The number of the newest context that this worker has made; it may be one made to learn it."""
    try:
        made: int = torch.distributed.autograd._new_context()._context_id()
    except RuntimeError:  # this thread is in one
        current: int = torch.distributed.autograd._current_context()._context_id()
        return current
    torch.distributed.autograd._release_context(made)
    return made


def _held(context: int) -> Held:
    try:
        found = torch.distributed.autograd.get_gradients(context)
    except RuntimeError:  # released meanwhile, by another thread
        return {}
    return {leaf: (gradient, gradient._version) for leaf, gradient in found.items()}


def _same(before: tuple[torch.Tensor, int] | None, now: tuple[torch.Tensor, int]) -> bool:
    return before is not None and before[0] is now[0] and before[1] == now[1]


def current_context() -> int | None:
    """The number of the context that this thread is in; None if it is in none."""
    if not _is_in_use():
        return None
    try:
        return int(torch.distributed.autograd._current_context()._context_id())
    except RuntimeError:
        return None


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
