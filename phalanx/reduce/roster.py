"""All reducers of this process, for what is not the business of one of them alone."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from phalanx.group.group import Group
from phalanx.group.ticket import Ticket

reducers: weakref.WeakSet[Any] = weakref.WeakSet()
"""Those whose models live."""


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
