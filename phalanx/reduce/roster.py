"""All reducers of this process, for what is not the business of one of them alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from phalanx.errors import InternalError
from phalanx.group.group import Group
from phalanx.group.ticket import Operation, Ticket
from phalanx.transport.protocol import Fence

reducers: weakref.WeakSet[Any] = weakref.WeakSet()
"""Those whose models live."""


def serve_flushes(reducer: Any, tag: int) -> None:
    """Have the group of `reducer` hand it the flushes with its `tag`, for as long as it lives."""
    me = weakref.ref(reducer)

    def handle(got: list[bytes], fence: Fence) -> Callable[[], None]:
        reducer = me()
        if reducer is None:
            raise InternalError("a flush of a wrapped model that this rank has dropped")
        return reducer.follow(got, fence)  # type: ignore[no-any-return]

    handlers = reducer.group.core.handlers
    for each in (tag, tag ^ 1):  # with a communication hook
        handlers[(int(Operation.GRADIENTS), each)] = handle
        weakref.finalize(reducer, handlers.pop, (int(Operation.GRADIENTS), each), None)


def pending_among(parameters: Iterable[torch.Tensor]) -> list[str]:
    """Names of those of `parameters` whose gradients some reducer has not synchronised yet."""
    wanted = {id(parameter) for parameter in parameters}
    return [
        reducer.named[index][0]
        for reducer in sorted(reducers, key=lambda reducer: reducer.watch.order)
        for index in sorted(reducer.produced)
        if id(reducer.parameters[index]) in wanted
    ]


def flush_leftovers(core: Group, tickets: Sequence[Ticket]) -> None:
    """Synchronise what followers have said in `tickets` that they have left. Every rank, same tickets."""
    for tag in sorted({t.tag for t in tickets if t.bitmap}):
        for reducer in list(reducers):
            if reducer.group.core is core and reducer.tag == tag:
                reducer.flush((), said=tickets)
