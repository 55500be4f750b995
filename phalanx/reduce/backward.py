"""Knowing when the outermost backward ends.

The autograd engine runs a callback when a graph task ends, but a backward inside a backward (reentrant
checkpointing, custom functions) is a graph task of its own. So a callback that finds itself inside an
outer node puts a hook on that node and arms again from there, until it runs in the outermost task. A
task is known by its number, never by a flag: a backward that raises drops its callbacks without a word.

All that was armed in one task ends in one callback, in order of construction, so that every rank
synchronises its wrapped models in the same order.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Protocol

import torch
from torch.autograd import Variable

current_task = torch._C._current_graph_task_id
"""The number of the graph task that this thread runs; -1 outside of backward."""


class Listener(Protocol):
    """Somebody who wants to know when the outermost backward has ended."""

    order: int
    """Its place among all listeners of the process, by construction."""

    def backward_ended(self) -> None:
        """Called once, in the thread of the backward; what it raises comes out of backward()."""


_armed: dict[int, dict[int, weakref.ref[Listener]]] = {}
"""By task, then by order. Weakly: what a backward that raised has armed is in here until somebody forgets it."""


def arm(listener: Listener) -> int:
    """Have `listener` told when the outermost backward around this call ends; return this task's number."""
    task = current_task()
    waiting = _armed.get(task)
    if waiting is None:
        waiting = _armed[task] = {}
        Variable._execution_engine.queue_callback(partial(_ended, task))  # type: ignore[attr-defined]
    waiting[listener.order] = weakref.ref(listener, partial(_drop, task, listener.order))
    return task


def forget(listener: Listener) -> None:
    """Drop what `listener` has armed: its backward raised, so that it will never end.

    Every task is looked at, since those of outer nodes are not known to the listener.
    """
    for task, waiting in list(_armed.items()):
        known = waiting.get(listener.order)
        if known is not None and known() is listener:
            _drop(task, listener.order)


def _drop(task: int, order: int, _: object = None) -> None:
    waiting = _armed.get(task, {})
    waiting.pop(order, None)
    if not waiting:
        _armed.pop(task, None)


def _ended(task: int) -> None:
    waiting = _armed.pop(task, {})
    outer = torch._C._current_autograd_node()
    if outer is None:
        for order in sorted(waiting):
            listener = waiting[order]()
            if listener is not None:
                listener.backward_ended()
        return
    handle = outer.register_hook(lambda *_: _outer_node_done(waiting, handle))


def _outer_node_done(
    waiting: dict[int, weakref.ref[Listener]], handle: torch.utils.hooks.RemovableHandle
) -> None:
    handle.remove()
    for known in waiting.values():
        listener = known()
        if listener is not None:
            arm(listener)
