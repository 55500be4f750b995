"""Knowing when the outermost backward ends.

The autograd engine runs a callback when a graph task ends, but a backward inside a backward (reentrant
checkpointing, custom functions) is a graph task of its own. So a callback that finds itself inside an
outer node puts a hook on that node and arms again from there, until it runs in the outermost task. A
backward that raises drops its callbacks without a word, but for the destructor of the callback.

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

    def disarmed(self) -> None:
        """Called when the task in which it was armed has raised, or has ended inside an outer one."""


_armed: dict[int, dict[int, weakref.ref[Listener]]] = {}
"""By task, then by order. Weakly: what a backward that raised has armed is in here until somebody forgets it."""


def arm(listener: Listener) -> int:
    """Have `listener` told when the outermost backward around this call ends; return this task's number."""
    task = current_task()
    waiting = _armed.get(task)
    if waiting is None:
        waiting = _armed[task] = {}
        Variable._execution_engine.queue_callback(_Ending(task))
    waiting[listener.order] = weakref.ref(listener, partial(_drop, task, listener.order))
    return task


class _Ending:
    """What the engine calls when a task ends, or drops when it raises."""

    __slots__ = ("_called", "_task")

    def __init__(self, task: int) -> None:
        self._task, self._called = task, False

    def __call__(self) -> None:
        self._called = True
        _ended(self._task)

    def __del__(self) -> None:
        if self._called:
            return
        for listener in _living(_armed.get(self._task, {})):
            listener.disarmed()


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


def _living(waiting: dict[int, weakref.ref[Listener]]) -> list[Listener]:
    return [listener for order in sorted(waiting) if (listener := waiting[order]()) is not None]


def _ended(task: int) -> None:
    waiting = _armed.pop(task, {})
    outer = torch._C._current_autograd_node()
    if outer is None:
        for order in sorted(waiting):
            listener = waiting[order]()
            if listener is not None:
                listener.backward_ended()
        return
    for listener in _living(waiting):
        listener.disarmed()  # the outer node may raise before it is done
    handle = outer.register_hook(lambda *_: _outer_node_done(waiting, handle))


def _outer_node_done(waiting: dict[int, weakref.ref[Listener]], handle: torch.utils.hooks.RemovableHandle) -> None:
    handle.remove()
    for listener in _living(waiting):
        arm(listener)
