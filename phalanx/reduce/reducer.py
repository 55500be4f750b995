"""The reducer: watches gradients appear, and makes them the mean over all ranks when backward ends.

One backward, seen from here:

    begin     the first sign of it (an output of the wrapped model, or a parameter's gradient): every
              parameter without a gradient is given its zeroed place in shared memory, so that autograd
              accumulates straight into it
    fired     a hook notes each parameter whose gradient has been accumulated
    ended     the outermost backward is over: synchronise, or keep the gradients local (no_sync)
    flush     tickets with the used-parameter bitmap; what some rank used is reduced; commit; parameters
              that nobody used get back the gradient they had

Buckets are launched at the end of backward, never earlier: the shared-memory transport runs in this
thread, and a rank that waited for a bucket in the middle of its backward could hold up a collective of
another rank's backward (SyncBatchNorm) that it only reaches afterwards.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch.utils.hooks import RemovableHandle

from phalanx.errors import InternalError, MisuseError, RankMismatchError
from phalanx.group import ticket
from phalanx.group.group import Group
from phalanx.group.process_group import PhalanxProcessGroup
from phalanx.group.ticket import Operation, State, Ticket
from phalanx.reduce import backward, sparse
from phalanx.reduce.bucket import HookRunner
from phalanx.reduce.memory import Memory
from phalanx.reduce.model import compare_models, entries_of
from phalanx.reduce.plan import Plan, fingerprint, make_plan
from phalanx.reduce.statistics import Statistics
from phalanx.reduce.weights import Weights, scales

_construction = itertools.count()


class Reducer:
    """Synchronises the gradients of `named` parameters (all of which require one) over `group`.

    `sparse_names` are parameters that receive sparse gradients; `caps` are bucket sizes in bytes.
    `stale` says that it must be built before the next flush.
    `wants_sync()` says, when a backward ends, whether it is to be synchronised.
    """

    def __init__(
        self,
        group: PhalanxProcessGroup,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        sparse_names: frozenset[str],
        caps: Sequence[int],
        wants_sync: Callable[[], bool],
    ) -> None:
        self.order = next(_construction)
        _reducers.add(self)
        self.group, self.caps = group, tuple(caps)
        self.weights = Weights()
        self.divisor: int | None = None
        self.comm_hook: HookRunner | None = None
        self.after_flush: list[Callable[[], None]] = []
        self.lend_places = True  # whether autograd accumulates straight into gradient memory
        self.before_end: Callable[[], None] = _nothing
        self.on_build: Callable[[], None] = _nothing
        self.statistics = Statistics()
        self._wants_sync, self._sparse_names = wants_sync, sparse_names
        self._named: list[tuple[str, torch.nn.Parameter]] = []
        self._handles: list[RemovableHandle] = []
        self._fired: list[int] = []
        self._task: int | None = None
        self._tasks: set[int] = set()
        self._preset: list[int] = []
        self._versions: list[int] = []
        self._forwards = {True: 0, False: 0}
        self._produced: set[int] = set()
        self._views: list[torch.Tensor | None] = []
        self.stale = True
        self.plan: Plan | None = None
        self._number = -1
        self.adopt(named)

    # -- parameters ----------------------------------------------------------------------------------

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters, in the order of the plan."""
        return [parameter for _, parameter in self._named]

    @property
    def names(self) -> list[str]:
        """Their names."""
        return [name for name, _ in self._named]

    def adopt(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        """Hook these parameters instead of the present ones; their memory is made at the next flush."""
        pending = {self._named[index][0] for index in self._produced}
        self.detach()
        self._named = list(named)
        self._params = [parameter for _, parameter in named]
        self._produced = {index for index, (name, _) in enumerate(named) if name in pending}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))
            for index, parameter in enumerate(self._params)
        ]
        self.stale = True

    def detach(self) -> None:
        """Remove the hooks; no gradient is synchronised after that."""
        self.forget_backward()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def build(self) -> None:
        """Make the plan and the memory. A collective: every rank, with the same parameters."""
        entries = entries_of(self._named, self._sparse_names)
        self._number = compare_models(self.group, entries, fingerprint(entries, self.caps), self._number)
        older = {id(view): view for view in self._views if view is not None}
        self.plan = make_plan(entries, self.caps)
        self.memory = Memory(self.group, self.plan)
        self._views = [
            None if place is None else self.memory.view(place[0], place[1], parameter)
            for place, parameter in zip(self.plan.places, self._params, strict=True)
        ]
        self._placed = [index for index, view in enumerate(self._views) if view is not None]
        self._pointers = [0 if view is None else view.data_ptr() for view in self._views]
        self._tag = (self.plan.fingerprint + 2 * self._number * 0x9E3779B97F4A7C15) % (1 << 63) & ~1
        self._register()
        self._full = len(self._params)
        self._all_bits = _bits(range(self._full), self._full)
        self._move_in(set(older))
        self.stale = False
        self.on_build()

    def _move_in(self, older: set[int]) -> None:
        """Bring gradients from the memory of an older plan to their new places."""
        for index in self._placed:
            gradient, view = self._params[index].grad, self._views[index]
            if id(gradient) in older and view is not None:
                view.copy_(gradient)
                self._params[index].grad = view

    # -- during backward -----------------------------------------------------------------------------

    def _hook(self, index: int) -> Callable[[torch.Tensor], None]:
        # Weakly: autograd keeps hooks where the garbage collector cannot see them, so that a cycle through one
        # would keep a dropped wrapper, its model and its shared memory for good.
        fired, task_now, me = self._fired, backward.current_task, weakref.ref(self)

        def fire(_: torch.Tensor) -> None:
            reducer = me()
            if reducer is None:
                return
            fired.append(index)
            if task_now() != reducer._task:
                reducer._arm()

        return fire

    def output_reached(self, synced: bool) -> None:
        """An output of a forward (built with or without no_sync) has got its gradient."""
        self._forwards[synced] += 1
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
            self._begin()

    def _begin(self) -> None:
        """Give every parameter without a gradient its zeroed place."""
        if self.stale or not self.lend_places:
            return
        params, views = self._params, self._views
        empty = [i for i in self._placed if params[i].grad is None and params[i].requires_grad]
        if len(empty) == len(self._placed):
            for flat in self.memory.own:
                flat.zero_()
        elif empty:
            torch._foreach_zero_([views[i] for i in empty])
        for i in empty:
            params[i].grad = views[i]
        self._preset = empty
        self._versions = [views[i]._version for i in empty]

    def forget_backward(self) -> None:
        """Clean up after a backward that never ended (it raised). Called at every forward."""
        if self._tasks:
            backward.forget(self)
            self._restore(set(self._fired))
            self.weights.clear()
            self._end_of_task()

    def _end_of_task(self) -> None:
        self._fired.clear()
        self._tasks.clear()
        self._task = None
        self._preset, self._versions = [], []
        self._forwards = {True: 0, False: 0}

    def _restore(self, kept: set[int]) -> None:
        """Take the zeroed places away again from parameters not in `kept`."""
        for index in self._preset:
            if index not in kept and self._params[index].grad is self._views[index]:
                self._params[index].grad = None

    def backward_ended(self) -> None:
        """See backward.Listener."""
        self.before_end()
        fired = set(self._fired)
        untouched = {
            index
            for index, version in zip(self._preset, self._versions, strict=True)
            if self._views[index]._version == version
        }
        fired -= untouched  # a hook also runs when the gradient turned out undefined
        reached = sum(self._forwards.values()) > 0
        local = reached and not self._forwards[True]
        try:
            self._close_weights(bool(fired))
            if not fired and not (reached and self._is_accumulating()):
                self._restore(set())
            elif local or not self._wants_sync():
                self._restore(fired)
                self._produced |= fired
            else:
                self.flush(fired)
        finally:
            self._end_of_task()

    def _close_weights(self, produced: bool) -> None:
        try:
            self.weights.backward_ended(produced)
        except ValueError as error:
            self.weights.clear()
            raise MisuseError(
                str(error), "call ddp.weigh(loss, n) on the loss of every backward, or on none", self.group.core.rank
            ) from None

    def _is_accumulating(self) -> bool:
        """Whether this is a backward() into parameters, and not autograd.grad() or backward(inputs=...)."""
        for parameter in self._params:
            if parameter.requires_grad:
                with torch.enable_grad():
                    node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
                try:
                    return torch._C._will_engine_execute_node(node)
                except RuntimeError:  # asked for as an output of autograd.grad
                    return False
        return False

    # -- synchronising -------------------------------------------------------------------------------

    def flush(self, fired: set[int]) -> None:
        """Synchronise everything produced since the last time. A collective: every rank of the group."""
        started = time.perf_counter()
        if self.stale:
            self.build()
        self._produced |= fired
        foreign = self._settle()
        with self.group.core.collective(self._ticket().encode()) as fence:
            got = fence()
            used, factors = self._agreed(got)
            self._reduce(used, factors, fence)
        self._complete(used, factors, foreign, started)

    def _reduce(self, used: list[int], factors: list[float], fence: Callable[[], object]) -> None:
        if self.comm_hook is None and (self.group.core.size > 1 or factors != [1.0]):
            spans = self.plan.whole() if len(used) == self._full else self.plan.spans(used)
            self.memory.reduce(spans, factors, fence)

    def _complete(self, used: list[int], factors: list[float], foreign: list[int], started: float) -> None:
        """What needs no common fence: communication hooks, sparse gradients, handing the results out."""
        if self.comm_hook is not None:
            self.comm_hook.run(self.plan, self.memory, self._params, self._views, used, factors)
        for index in used:
            if self.plan.entries[index].sparse:
                sparse.reduce(self.group, self._params[index], factors)
        self._hand_back(used, foreign)
        self._produced.clear()
        self.weights.clear()
        self.statistics.flushed(started, used, self.plan)
        for call in self.after_flush:
            call()

    def _ticket(self, state: State = State.ACTIVE, followed: int = 0) -> Ticket:
        pending = self._produced
        bits = self._all_bits if len(pending) == self._full else _bits(pending, self._full)
        weights = self.weights
        total = weights.total if weights.weighed else 1.0
        if state is State.ACTIVE:
            operation, count = Operation.GRADIENTS, sum(region.count for region in self.plan.regions)
        else:
            operation, count, bits = Operation.FOLLOW, followed, bits if pending else b""
        return Ticket(
            operation, 0, 0, count, -1, self.tag, state, weights.weighed, weights.unit, total, bits
        )  # fmt: skip

    @property
    def tag(self) -> int:
        """What tells this reducer's flushes from all others; changes with the communication hook."""
        return self._tag ^ (1 if self.comm_hook is not None else 0)

    # -- following -----------------------------------------------------------------------------------

    def following_ticket(self, state: State, followed: int) -> Ticket:
        """The ticket of this rank while it follows; gradients not synchronised yet go with it."""
        if self.stale:
            raise InternalError("a rank cannot follow before its reducer is built")
        self._settle()
        return self._ticket(state, followed)

    def follow(self, got: list[bytes], fence: Callable[[], object]) -> None:
        """Take part in a flush of the other ranks, whose tickets are `got`."""
        started = time.perf_counter()
        fence()  # where those in the flush have exchanged tickets
        used, factors = self._agreed(got)
        foreign = [
            index for index in used
            if self._params[index].grad is not None and _pointer(self._params[index].grad) != self._pointers[index]
        ]  # fmt: skip
        self._reduce(used, factors, fence)
        for index in used:
            if self._params[index].grad is None and self._views[index] is not None:
                self._params[index].grad = self._views[index]
        self._complete(used, factors, foreign, started)

    def _register(self) -> None:
        """Have the group hand flushes with our tag to us, for as long as we live."""
        me = weakref.ref(self)

        def handle(got: list[bytes], fence: Callable[[], object]) -> None:
            reducer = me()
            if reducer is None:
                raise InternalError("a flush of a wrapped model that this rank has dropped")
            reducer.follow(got, fence)

        handlers = self.group.core.handlers
        for tag in (self._tag, self._tag ^ 1):
            handlers[(int(Operation.GRADIENTS), tag)] = handle
            weakref.finalize(self, handlers.pop, (int(Operation.GRADIENTS), tag), None)

    def _settle(self) -> list[int]:
        """Have every contribution in its place; return the parameters whose gradient lives elsewhere."""
        foreign: list[int] = []
        try:
            pointers = [0 if (grad := p.grad) is None else grad.data_ptr() for p in self._params]
        except RuntimeError:  # one of them is sparse and has no data pointer
            pointers = [_pointer(parameter.grad) for parameter in self._params]
        if pointers == self._pointers:
            return foreign
        for index, pointer in enumerate(pointers):
            view, gradient = self._views[index], self._params[index].grad
            if gradient is None:
                self._produced.discard(index)
                if view is not None:
                    view.zero_()
            elif view is not None and pointer != self._pointers[index]:
                with torch.no_grad():
                    view.copy_(gradient if gradient.layout is torch.strided else gradient.to_dense())
                foreign.append(index)
        return foreign

    def _agreed(self, wires: list[bytes]) -> tuple[list[int], list[float]]:
        """What the tickets of all ranks say: the parameters used somewhere, and each rank's factor."""
        tickets = [self._as_contribution(ticket.decode(wire)) for wire in wires]
        bits = 0
        for t in tickets:
            bits |= int.from_bytes(t.bitmap, "little")
        self.statistics.used_by(tickets, self._full)
        used = range(self._full) if bits == (1 << self._full) - 1 else _members(bits, self._full)
        try:
            return list(used), scales(tickets, self.divisor)
        except ValueError as error:
            calls = {
                r: "a weighed backward" if t.weighed else "a backward without weigh"
                for r, t in enumerate(tickets) if t.state is State.ACTIVE
            }  # fmt: skip
            raise RankMismatchError(
                calls, self.group.core.rank,
                "Instead: call ddp.weigh(loss, n) on every rank, with n = 0 where a rank has nothing.",
            ) from error  # fmt: skip

    def _as_contribution(self, t: Ticket) -> Ticket:
        """Read a follower's ticket: gradients of this model that it has left count, others do not."""
        if t.state is State.ACTIVE:
            return t
        if t.bitmap and t.tag == self.tag:
            return replace(t, state=State.ACTIVE)
        return replace(t, bitmap=b"", weighed=False)

    def _hand_back(self, used: list[int], foreign: list[int]) -> None:
        """Let every p.grad show the result, and those of unused parameters what they showed before."""
        if len(used) != self._full:
            self._restore(set(used))
            for index in used:
                if self._params[index].grad is None and self._views[index] is not None:
                    self._params[index].grad = self._views[index]
        if not foreign:
            return
        wanted = set(used)
        for index in foreign:
            gradient, view = self._params[index].grad, self._views[index]
            if index not in wanted or gradient is None or view is None:
                continue
            if gradient.layout is not torch.strided:
                self._params[index].grad = view
            else:
                gradient.data.copy_(view)

    def check_idle(self, call: str) -> None:
        """Raise MisuseError if `call` comes while a backward is running."""
        if self._tasks and backward.current_task() != -1:
            raise MisuseError(f"{call} inside a backward", "call it before or after", self.group.core.rank)

    @property
    def pending(self) -> list[str]:
        """Names of parameters whose gradients have not been synchronised since they were produced."""
        return [self._named[index][0] for index in sorted(self._produced)]

    @property
    def has_pending(self) -> bool:
        """Whether gradients have been produced since the last synchronisation."""
        return bool(self._produced)


def pending_among(parameters: Iterable[torch.Tensor]) -> list[str]:
    """Names of those of `parameters` whose gradients some reducer has not synchronised yet."""
    wanted = {id(parameter) for parameter in parameters}
    return [
        reducer._named[index][0]
        for reducer in sorted(_reducers, key=lambda reducer: reducer.order)
        for index in sorted(reducer._produced)
        if id(reducer._params[index]) in wanted
    ]


def flush_leftovers(core: Group, tickets: Sequence[Ticket]) -> None:
    """Synchronise what followers have said in `tickets` that they have left. Every rank, same tickets."""
    for tag in sorted({t.tag for t in tickets if t.bitmap}):
        for reducer in list(_reducers):
            if reducer.group.core is core and reducer.tag == tag:
                reducer.flush(set())


_reducers: weakref.WeakSet[Reducer] = weakref.WeakSet()


def _nothing() -> None:
    pass


def _pointer(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return 0
    return gradient.data_ptr() if gradient.layout is torch.strided else -1


def _bits(members: Sequence[int] | set[int] | range, size: int) -> bytes:
    value = 0
    for index in members:
        value |= 1 << index
    return value.to_bytes(-(-size // 8), "little")


def _members(bits: int, size: int) -> list[int]:
    return [index for index in range(size) if bits >> index & 1]
