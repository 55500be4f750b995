"""Watching one backward: which parameters got a gradient, and when the outermost backward has ended.

A hook on every parameter notes what was accumulated, so gradients are seen however the forward was reached.
Outputs of the wrapped model announce a backward earlier, before any of its parameters.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from phalanx.reduce import backward

_construction = itertools.count()

Local = frozenset[int]
"""Which parameters stay local, by number."""


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Call a bound method as long as its object lives, without keeping it alive.

    What a wrapped model owns must not own it: a cycle would leave a dropped wrapper at work until the garbage
    collector comes by, at another time on every rank.
    """
    ref = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        living = ref()
        return None if living is None else living(*arguments)

    return call


class Watch:
    """The hooks on some parameters.

    `begins()` is called at the first sign of a backward, `ended(fired, forwards)` when the outermost one has
    ended: the numbers of the parameters whose hook has run, and what was given to output_reached(). What
    `ended` raises comes out of backward().
    """

    def __init__(self, begins: Callable[[], None], ended: Callable[[set[int], list[Local]], None]) -> None:
        self.order = next(_construction)
        self._begins, self._ended = begins, ended
        self._params: Sequence[torch.nn.Parameter] = ()
        self._handles: list[RemovableHandle] = []
        self._fired: list[int] = []
        self._forwards: list[Local] = []
        self._root: Any = None
        self._task: int | None = None
        self._tasks: set[int] = set()

    def put_on(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Hook these parameters instead of the present ones."""
        self.take_off()
        self._params = parameters
        self._handles = [_hook_on(parameter, self._hook(index)) for index, parameter in enumerate(parameters)]

    def take_off(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        # Weakly: autograd keeps hooks where the garbage collector cannot see them, so that a cycle through one
        # would keep a dropped wrapper, its model and its shared memory for good.
        fired, task_now, me = self._fired, backward.current_task, weakref.ref(self)

        def fire(_: torch.Tensor) -> None:
            watch = me()
            if watch is None:
                return
            fired.append(index)
            if task_now() != watch._task:
                watch._arm()

        return fire

    def output_reached(self, local: Local) -> None:
        """An output has got its gradient; its forward ran with the parameters in `local` kept local."""
        if not self._forwards or self._forwards[-1] is not local:
            self._forwards.append(local)
            self._root = self._root or torch._C._current_autograd_node()
        if backward.current_task() != self._task:
            self._arm()

    def _arm(self) -> None:
        task = backward.current_task()
        if task == -1:
            return
        begins = not self._tasks
        if task not in self._tasks:
            backward.arm(self)
            self._tasks.add(task)
        self._task = task
        if begins:
            self._begins()

    @property
    def running(self) -> bool:
        """Whether a backward has begun and not ended (it may have raised)."""
        return bool(self._tasks)

    def abandon(self) -> set[int]:
        """Forget a backward that never ended, because it raised; return what had fired."""
        backward.forget(self)
        fired = set(self._fired)
        self._clear()
        return fired

    def backward_ended(self) -> None:
        """See backward.Listener."""
        fired, forwards = set(self._fired), list(self._forwards)
        try:
            self._ended(fired, forwards)
        finally:
            self._clear()

    def _clear(self) -> None:
        self._fired.clear()
        self._forwards.clear()
        self._tasks.clear()
        self._task = self._root = None

    def is_accumulating(self) -> bool:
        """Whether this is a backward() into all leaves, and not autograd.grad() or backward(inputs=...).

        For a backward in which an output was reached and no parameter: this rank may use only frozen ones.
        """
        return self._root is not None and all(map(_is_executed, _leaves(self._root)))


def _leaves(root: Any) -> Iterator[Any]:
    """The nodes below `root` that accumulate into a leaf."""
    waiting, seen = [root], {root}
    while waiting:
        node = waiting.pop()
        if node.name().endswith("AccumulateGrad"):
            yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def _is_executed(leaf: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # asked for as an output of autograd.grad
        return False


def _hook_on(parameter: torch.nn.Parameter, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Register `hook`, on a frozen parameter too, and where swap_tensors has cut hooks off from their tensor."""
    hooks = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
    if hooks is not None:
        parameter._post_accumulate_grad_hooks = hooks  # type: ignore[attr-defined]
    frozen = not parameter.requires_grad
    if frozen:
        parameter.requires_grad_(True)
    handle = parameter.register_post_accumulate_grad_hook(hook)
    if frozen:
        parameter.requires_grad_(False)
    return handle
