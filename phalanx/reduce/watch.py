"""Watching one backward: which parameters got a gradient, and when the outermost backward has ended.

A hook on every parameter notes what was accumulated, so gradients are seen however the forward was reached.
Outputs of the wrapped model announce a backward earlier, before any of its parameters.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from phalanx.errors import MisuseError
from phalanx.reduce import backward
from phalanx.reduce.threads import refuse_second_thread

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


class _Noted(list[torch.Tensor]):
    """The parameters whose hook has run in this backward; this list itself is the hook of each.

    A hook in Python costs several times what autograd needs for a small gradient, and a model has hundreds.
    So only the first of a backward is one: it arms, and makes the list a _Noting, whose call is the
    list's own append. The class says which of the two it is, never a flag beside it.
    """

    __slots__ = ("__weakref__", "arm")
    arm: Callable[[], None]


class _Waiting(_Noted):
    """Nothing is armed: the next hook to run has to."""

    __slots__ = ()

    def __call__(self, parameter: torch.Tensor) -> None:
        self.append(parameter)
        self.arm()


class _Noting(_Noted):
    """The end of this backward will be known."""

    __slots__ = ()
    __call__ = list.append


class _Dropped(_Noted):
    """The watch is gone, and with it the wrapped model; parameters may live on, with their hooks."""

    __slots__ = ()

    def __call__(self, parameter: torch.Tensor) -> None:
        pass


def _drop(noted: _Noted) -> None:
    # Autograd keeps hooks where the garbage collector cannot see them: what a raised backward has noted
    # would keep a dropped model for good.
    noted.clear()
    noted.__class__ = _Dropped


class Watch:
    """The hooks on some parameters.

    `begins()` is called at the first sign of a backward, `ended(fired, forwards)` when the outermost one has
    ended: the numbers of the parameters whose hook has run, and what was given to output_reached(). What
    `ended` raises comes out of backward(). `others()` is called before, if a parameter has got a gradient that was
    frozen, or is among the `unwatched()`, which have no hook: it puts the watch on that one too.
    """

    def __init__(
        self,
        begins: Callable[[], None],
        ended: Callable[[frozenset[int], list[Local]], None],
        others: Callable[[], None],
    ) -> None:
        self.order = next(_construction)
        self._begins, self._ended, self._others = begins, ended, others
        self.unwatched: Callable[[], Sequence[torch.Tensor]] = tuple
        self._numbers: dict[int, int] = {}
        self._handles: list[RemovableHandle] = []
        self._noted: _Waiting | _Noting | _Dropped = _Waiting()
        self._noted.arm = weakly(self._arm)
        self._forwards: list[Local] = []
        self._announcer: tuple[Local, Callable[[torch.Tensor], None] | None] = (frozenset(), None)
        self._root: Any = None
        self._running, self._thread = False, 0
        self._usual: tuple[list[int], frozenset[int]] = ([], frozenset())
        weakref.finalize(self, _drop, self._noted)

    def put_on(self, parameters: Sequence[torch.nn.Parameter], frozen: Sequence[torch.nn.Parameter] = ()) -> None:
        """Hook these parameters instead of the present ones; those that are frozen only to be told of others."""
        self.take_off()
        self._numbers = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._usual = ([], frozenset())
        self._handles = [hook_on(parameter, self._noted) for parameter in (*parameters, *frozen)]

    def take_off(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def numbers_of(self, parameters: Iterable[torch.Tensor]) -> list[int]:
        """The numbers of those of `parameters` that are watched."""
        numbers = self._numbers
        return [numbers[id(parameter)] for parameter in parameters if id(parameter) in numbers]

    def announcer(self, local: Local) -> Callable[[torch.Tensor], None]:
        """A hook for the outputs of a forward that ran with the parameters in `local` kept local."""
        kept, hook = self._announcer
        if kept is not local or hook is None:
            # Weakly: the engine keeps the graph of a backward that raised, and with it what the graph holds.
            me = weakref.ref(self)

            def hook(_: torch.Tensor) -> None:
                watch = me()
                if watch is not None:
                    watch.output_reached(local)

            self._announcer = (local, hook)
        return hook

    def output_reached(self, local: Local) -> None:
        """An output has got its gradient; its forward ran with the parameters in `local` kept local."""
        if not self._forwards or self._forwards[-1] is not local:
            self._forwards.append(local)
            self._root = self._root or torch._C._current_autograd_node()
        if self._noted.__class__ is _Waiting:
            self._arm()
        elif self._thread != get_ident():
            refuse_second_thread(self._thread, "backward")

    def leaf_reached(self) -> None:
        """A parameter is reached, in a backward that may accumulate elsewhere and so run no hook of it."""
        if self._noted.__class__ is _Waiting:
            self._arm()

    def _arm(self) -> None:
        if backward.current_task() == -1:
            return
        backward.arm(self)
        self._noted.__class__ = _Noting
        if not self._running:
            self._running, self._thread = True, get_ident()
            self._begins()

    @property
    def running(self) -> bool:
        """Whether a backward has begun and not ended (it may have raised)."""
        return self._running

    def check_idle(self, call: str, rank: int) -> None:
        """Raise MisuseError if `call` comes while a backward is running."""
        if self._running:
            raise MisuseError(f"{call} inside a backward", "call it before or after", rank)

    @property
    def noted(self) -> list[torch.Tensor]:
        """The parameters whose hook has run in this backward so far."""
        return self._noted

    @property
    def forwards(self) -> Sequence[Local]:
        """What was given to output_reached() in this backward so far."""
        return self._forwards

    @property
    def order_of_ids(self) -> list[int]:
        """The ids of the parameters whose hook ran in the last backward, in order; the same list while that stays."""
        return self._usual[0]

    def _fired(self) -> frozenset[int]:
        noted = list(map(id, self._noted))
        if noted != self._usual[0]:
            self.take_in(noted)
            self._usual = (noted, frozenset(self._numbers[each] for each in noted if each in self._numbers))
        return self._usual[1]

    def take_in(self, ids: Iterable[int]) -> None:
        """Have others() take in parameters with these ids, if some are frozen; forwards are numbered anew."""
        if self._numbers.keys() >= set(ids):
            return
        before = {number: parameter for parameter, number in self._numbers.items()}
        self._others()
        now = self._numbers
        everything = frozenset(now.values())
        self._forwards[:] = [
            everything if len(local) == len(before) else frozenset(now[before[i]] for i in local if before[i] in now)
            for local in self._forwards
        ]

    def abandon(self) -> frozenset[int]:
        """Forget a backward that never ended, because it raised; return what had fired."""
        if self._thread != get_ident():
            refuse_second_thread(self._thread, "forward")
        backward.forget(self)
        fired = self._fired()
        self._clear()
        return fired

    def backward_ended(self) -> None:
        """See backward.Listener."""
        try:
            self._noted.extend(self.unwatched())
            self._ended(self._fired(), self._forwards)
        finally:
            self._clear()

    def disarmed(self) -> None:
        """See backward.Listener: the next hook, of an outer backward or of a retried one, arms anew."""
        self._noted.__class__ = _Waiting

    def _clear(self) -> None:
        self._noted.clear()
        self._noted.__class__ = _Waiting
        self._forwards = []
        self._running = False
        self._root = None

    def is_accumulating(self) -> bool:
        """Whether this is a backward() into all leaves, and not autograd.grad() or backward(inputs=...).

        For a backward in which an output was reached and no parameter: this rank may use only frozen ones.
        """
        return self._root is not None and all(map(_is_executed, _leaves(self._root)))


def hook_on_output(output: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Call `hook` with the gradient of `output` when it arrives; what output.register_hook(hook) does.

    But for the handle, which nobody needs here and which costs most of it: this is done in every forward.
    """
    if type(output) is not torch.Tensor or output._backward_hooks is not None or torch.compiler.is_compiling():
        output.register_hook(hook)
        return
    # register_hook() adds the user's own to the same dict; its numbers count from 0.
    output._backward_hooks = OrderedDict(((-1, hook),))
    output.grad_fn._register_hook_dict(output)  # type: ignore[union-attr]


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


def hook_on(parameter: torch.nn.Parameter, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Register `hook`, on a frozen parameter too, and where swap_tensors has cut hooks off from their tensor."""
    hooks = parameter._post_accumulate_grad_hooks
    if hooks is not None:
        parameter._post_accumulate_grad_hooks = hooks
    with thawed(parameter):
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    return handle


@contextmanager
def thawed(parameter: torch.nn.Parameter) -> Iterator[None]:
    """Have `parameter`, which may be frozen, require a gradient meanwhile: only such have hooks and a node."""
    frozen = not parameter.requires_grad
    if frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        if frozen:
            parameter.requires_grad_(False)
