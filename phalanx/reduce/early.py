"""Sums of gradients that are begun while backward runs, where they travel over a wire.

A rank begins the sum of a bucket when backward has produced all of it and goes on to the next parameter, so that all
hooks have run; in the order of the buckets, over a group that nothing else uses. It does so once there has been a
synchronisation of all gradients, on every rank, without weights; that this one is too is known only when backward has
ended. Then the tickets tell how many sums each rank has begun, and whether its gradients are still what they were. If
all have begun the same, of all gradients, the sums are results. Otherwise those who have begun fewer take part in the
others' with zeros, and all is added up as if nothing had been begun; then nothing is begun for a while.

The gradients themselves are not touched before the last fence. What is written to a gradient whose sum has been begun
is noticed by its version; not so what a hook of another parameter writes through .data or numpy.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from phalanx.group.factory import gloo_beside
from phalanx.group.process_group import PhalanxProcessGroup
from phalanx.group.ticket import Operation, extra, plain
from phalanx.reduce.places import Places
from phalanx.reduce.plan import Bucket
from phalanx.reduce.watch import Watch, hook_on, weakly
from phalanx.transport.backend import Backend, wide_dtype
from phalanx.transport.protocol import Fence
from phalanx.transport.reductions import scale_into

_LONGEST_PAUSE = 256  # synchronisations
_COUNT = struct.Struct("<H")


def made_for(
    group: PhalanxProcessGroup,
    places: Places,
    parameters: Sequence[torch.nn.Parameter],
    watch: Watch,
    may_begin: Callable[[], bool],
    before: Late,
) -> Late:
    """Make what begins sums for these places; nothing where ranks share memory, or use more than the CPU. Collective.

    `before` is that of the places before: what it has begun is finished for nothing.
    """
    backend, core = None, group.core
    if isinstance(before, Early):
        backend = before.backend
        with core.collective(plain(Operation.WRAP, 0, 0, 0, -1) + _COUNT.pack(before.begun()[0])) as fence:
            before.agree(max(_COUNT.unpack(extra(wire))[0] for wire in fence()), False)
            before.reduce(0.0, fence)
    on_cpu = all(torch.device(region.device).type == "cpu" for region in places.plan.regions)
    over_wire = isinstance(group.transport, Backend) and not group.shares_memory
    if core.size == 1 or not over_wire or not on_cpu or not places.plan.buckets:
        return Late()
    if backend is None:
        backend = gloo_beside(core, group.get_group_store())
        weakref.finalize(watch, _close, backend, os.getpid()).atexit = False
    return Early(backend, places, parameters, watch, may_begin)


def _close(backend: Backend, owner: int) -> None:
    if os.getpid() == owner:
        backend.close()
    else:
        backend.keep()  # closing would wait for threads that a fork has not copied


class Late:
    """Nothing is begun before backward has ended."""

    def backward_begins(self) -> None:
        """Note that what has been begun until now is of an earlier backward."""

    def backward_ended(self) -> tuple[int, bool]:
        """Begin what is complete now; return begun()."""
        return self.begun()

    def learn(self) -> None:
        """Note at which parameters buckets were complete in this backward, which has produced all gradients."""

    def begun(self) -> tuple[int, bool]:
        """How many sums this rank has begun, and whether they are of the gradients that it has now."""
        return 0, False

    def agree(self, most: int, alike: bool) -> None:
        """Hear the largest number of sums that a rank has begun; they are results if all ranks are `alike`."""

    def reduce(self, factor: float, fence: Fence) -> bool:
        """Finish what some rank has begun. If that gives results, make these, times `factor`, the gradients.

        Returns whether it has, and has added up all other gradients too. Every rank calls it.
        """
        return False


class Early(Late):
    """The sums of one reducer's buckets over `backend`; `may_begin()` says whether this backward may begin any."""

    def __init__(
        self,
        backend: Backend,
        places: Places,
        parameters: Sequence[torch.nn.Parameter],
        watch: Watch,
        may_begin: Callable[[], bool],
    ) -> None:
        self.backend = backend
        self._places, self._parameters, self._watch, self._may_begin = places, parameters, watch, may_begin
        self._buckets = places.plan.buckets
        self._members = [frozenset(id(parameters[index]) for index in bucket.members) for bucket in self._buckets]
        self._hook = weakly(self._begin_all_but)
        self._handles: list[RemovableHandle] = []
        self._hooked: set[int] = set()
        self._learned_from: Sequence[int] = ()
        self._begun: list[tuple[torch.Tensor, Any]] = []
        self._versions: list[list[int]] = []
        self._left = False  # whether what has been begun is of a backward before the present one
        self._pause = self._waits = 0
        self.agree(0, False)
        weakref.finalize(self, _remove, self._handles).atexit = False

    # -- in backward ---------------------------------------------------------------------------------

    def backward_begins(self) -> None:
        """See Late."""
        self._left = bool(self._begun)

    def learn(self) -> None:
        """See Late."""
        order = self._watch.order_of_ids
        if order is self._learned_from:
            return
        self._learned_from = order
        when = {each: place for place, each in enumerate(order)}
        following = {max(when.get(each, -1) for each in ids) + 1 for ids in self._members}
        hooked = {order[place] for place in following if place < len(order)}
        if hooked != self._hooked:
            _remove(self._handles)
            self._hooked = hooked
            self._handles += [hook_on(p, self._hook) for p in self._parameters if id(p) in hooked]

    def backward_ended(self) -> tuple[int, bool]:
        """See Late."""
        self._begin_all_but(None)
        return self.begun()

    def _begin_all_but(self, parameter: torch.Tensor | None) -> None:
        """Begin the buckets that are complete without this one, some of whose hooks may be still to run."""
        if not self._learned_from or self._left or self._waits or not self._may_begin():
            return
        produced = set(map(id, self._watch.noted)) - {id(parameter)}
        while len(self._begun) < len(self._buckets) and self._members[len(self._begun)] <= produced:
            bucket = self._buckets[len(self._begun)]
            if not self._is_in_place(bucket):
                return
            self._versions.append(self._versions_of(bucket))
            self._begin(bucket, self._flat(bucket))

    def _begin(self, bucket: Bucket, given: torch.Tensor) -> None:
        total = given.to(wide_dtype(given.dtype), copy=True)
        self._begun.append((total, self.backend.begin(total)))

    def _flat(self, bucket: Bucket) -> torch.Tensor:
        return self._places.memory.own[bucket.region][bucket.start : bucket.stop]

    def _is_in_place(self, bucket: Bucket) -> bool:
        views = self._places.views
        return all(self._parameters[index].grad is views[index] for index in bucket.members)

    def _versions_of(self, bucket: Bucket) -> list[int]:
        return [self._places.views[index]._version for index in bucket.members]

    # -- when it has ended ---------------------------------------------------------------------------

    def begun(self) -> tuple[int, bool]:
        """See Late."""
        begun = self._buckets[: len(self._begun)]
        intact = not self._left and all(map(self._is_in_place, begun))
        return len(begun), intact and list(map(self._versions_of, begun)) == self._versions

    def agree(self, most: int, alike: bool) -> None:
        """See Late."""
        self._most, self._alike = most, alike

    def reduce(self, factor: float, fence: Fence) -> bool:
        """See Late."""
        totals = self._finish(fence)
        if not totals:
            return False
        plan, memory = self._places.plan, self._places.memory
        rest = plan.spans(index for bucket in self._buckets[len(totals) :] for index in bucket.members)
        if rest:
            memory.reduce(rest, [factor] * self.backend.size, fence)
        else:
            fence()
        for bucket, total in zip(self._buckets, totals, strict=False):
            scale_into(total, factor, self._flat(bucket))
        return True

    def _finish(self, fence: Fence) -> list[torch.Tensor]:
        """Finish what some rank has begun; return the totals of the first buckets, if they are results."""
        most, alike = self._most, self._alike
        for bucket in self._buckets[len(self._begun) : most]:
            self._begin(bucket, torch.zeros_like(self._flat(bucket)))
        for _, work in self._begun:
            self.backend.finish(work, fence)
        totals = [total for total, _ in self._begun] if alike else []
        self._begun, self._versions, self._left = [], [], False
        self.agree(0, False)
        if most:
            self._pause = self._waits = 0 if alike else min(2 * self._pause + 1, _LONGEST_PAUSE)
        else:
            self._waits = max(self._waits - 1, 0)
        return totals


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
