"""Sums that begin while backward still runs, where gradients travel over a wire.

A transport that waits on a wire can do so while backward computes. But what the ranks bring to a flush is known when
its tickets are there, at the end of backward. So the usual case is taken for granted: that every rank uses every
parameter, once, and weighs nothing. In the order of the plan each unit of neighbouring gradients is copied and handed
to a channel of this reducer's own as soon as backward is done with it; what is left when backward has ended, then.
The tickets tell whether the usual case has come:

    it has      the sums count, once all are here and every rank has said so (the commit)
    it has not  they are thrown away, and the flush reduces what it should: no contribution has been touched

Every rank begins all units in one order in every flush of a model, whether they count or not, so the channel needs no
tickets. What has been begun in a backward that raised stays begun, and is thrown away with the next flush. A rank
whose gradients have changed since they were begun says in its ticket that its sums do not count.

All ranks see the same tickets, so they agree without asking on when to begin ahead: after a flush that was the usual
one; and the oftener that was in vain, the more such flushes in a row it takes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from phalanx.group import factory
from phalanx.group.process_group import PhalanxProcessGroup
from phalanx.reduce.places import Places
from phalanx.reduce.plan import NOWHERE, Plan
from phalanx.reduce.watch import Watch, weakly
from phalanx.transport.backend import Backend, wide_dtype
from phalanx.transport.protocol import Fence
from phalanx.transport.reductions import scale_into

UNIT_BYTES = 4 << 20
_MOST_PATIENCE = 1024


class Unit(NamedTuple):
    """Elements `start` to `stop` of a region, which the gradients of `members` fill."""

    region: int
    start: int
    stop: int
    members: tuple[int, ...]


class _Begun(NamedTuple):
    total: torch.Tensor
    work: Any
    versions: list[int]


class Ahead:
    """The sums that one reducer begins ahead of its tickets; does nothing where the transport does not overlap."""

    def __init__(self, group: PhalanxProcessGroup) -> None:
        self._group = group
        self._channel: Backend | None = None
        self._places: Places | None = None
        self._parameters: Sequence[torch.nn.Parameter] = ()
        self._units: list[Unit] = []
        self._numbers: dict[int, int] = {}  # of units, by the parameters' ids
        self._waiting: list[set[int]] = []
        self._last: torch.Tensor | None = None
        self._begun: list[_Begun] = []
        self._tell = weakly(self._reached)
        self._streak, self._patience = 0, 1
        self.is_on = False
        self.intact = True
        """Whether what this rank has begun is what it brings to the flush."""
        self.early = 0
        """How many sums were begun before the end of the backward that was synchronised last."""

    def build(self, places: Places, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Begin with other places. Collective; every rank has called finish() for the sums that it had begun."""
        for each in self._begun:
            with contextlib.suppress(RuntimeError):  # a rank is gone, as the next collective says
                each.work.wait()
        self._begun, self.intact, self.is_on, self._streak = [], True, False, 0
        self._places, self._parameters = places, parameters
        overlaps = isinstance(self._group.transport, Backend) and self._group.core.size > 1
        on_cpu = all(region.device == "cpu" for region in places.plan.regions)
        dense = not any(entry.sparse for entry in places.plan.entries)
        self._units = units_of(places.plan, UNIT_BYTES) if overlaps and on_cpu and dense else []
        self._numbers = {id(parameters[i]): number for number, unit in enumerate(self._units) for i in unit.members}

    # -- during backward -----------------------------------------------------------------------------

    def begins(self, watch: Watch) -> None:
        """A backward begins that will be synchronised, seen by `watch`."""
        self._last = None
        if self._begun:
            self.intact = False  # begun in a backward that raised
            return
        self._waiting = [{id(self._parameters[i]) for i in unit.members} for unit in self._units]
        watch.tell(self._tell)

    def _reached(self, parameter: torch.Tensor) -> None:
        # Hooks of the user's may change a gradient after this one: it is done when that of another parameter runs.
        last, self._last = self._last, parameter
        number = self._numbers.get(id(last), -1)
        if number < 0:
            return
        waiting = self._waiting[number]
        waiting.discard(id(last))
        if not waiting and number == len(self._begun):
            self._begin_what_is_done()

    def _begin_what_is_done(self) -> None:
        while len(self._begun) < len(self._units) and not self._waiting[len(self._begun)]:
            unit = self._units[len(self._begun)]
            if not self._is_at_home(unit):
                self._waiting[len(self._begun)].add(-1)  # its gradients are brought there when backward has ended
                return
            self._begin(unit)

    def _is_at_home(self, unit: Unit) -> bool:
        views = self._places.views  # type: ignore[union-attr]
        return all(self._parameters[i].grad is views[i] for i in unit.members)

    def _begin(self, unit: Unit) -> None:
        places, channel = self._places, self._channel
        assert places is not None and channel is not None
        given = places.memory.own[unit.region][unit.start : unit.stop]
        total = given.to(wide_dtype(given.dtype), copy=True)
        versions = [places.views[i]._version for i in unit.members]
        self._begun.append(_Begun(total, channel.begin_sum(total), versions))

    # -- in a flush ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Begin what is left; all contributions are in their places. Every rank calls it in every flush."""
        if not self.is_on:
            return
        self.early = len(self._begun)
        for unit in self._units[self.early :]:
            self._begin(unit)
        views = self._places.views  # type: ignore[union-attr]
        for unit, begun in zip(self._units, self._begun[: self.early], strict=False):
            if [views[i]._version for i in unit.members] != begun.versions:
                self.intact = False

    def spoil(self) -> None:
        """Parameters are others now: what has been begun is not what the flush needs."""
        self.intact = self.intact and not self._begun

    def conclude(self, counts: bool, scale: float, fence: Fence) -> bool:
        """Wait for the sums that were begun. If they count, replace all gradients by sum x `scale` and return True.

        Comes after the tickets: on every rank, with the same arguments.
        """
        begun, self._begun = self._begun, []
        self.intact = True
        if self._channel is None or not begun:
            return False
        for each in begun:
            self._channel.finish(each.work, fence)
        if not counts:
            return False
        fence()
        own = self._places.memory.own  # type: ignore[union-attr]
        for unit, each in zip(self._units, begun, strict=True):
            scale_into(each.total, scale, own[unit.region][unit.start : unit.stop])
        return True

    def flushed(self, usual: bool) -> None:
        """A flush is over, and was the `usual` one or not. Collective: may make the channel."""
        if not self._units:
            return
        if not usual:
            self._patience = min(2 * self._patience, _MOST_PATIENCE) if self.is_on else self._patience
            self.is_on, self._streak = False, 0
            return
        self._streak += 1
        if not self.is_on and self._streak >= self._patience:
            if self._channel is None:
                core = self._group.core
                self._channel = factory.over_gloo(core, self._group.get_group_store(), f"channel {core.sequence}")
                weakref.finalize(self, self._channel.close).atexit = False
            self.is_on = True


def units_of(plan: Plan, room: int) -> list[Unit]:
    """Cut the gradients into units of at least `room` bytes, but for the last; in the order backward makes them."""
    ordered = sorted(
        (place[0], place[1], index) for index, place in enumerate(plan.places) if place is not NOWHERE
    )  # fmt: skip
    units: list[Unit] = []
    for region, start, index in ordered:
        stop = start + plan.entries[index].count
        last = units[-1] if units else None
        if last and last.region == region and (last.stop - last.start) * plan.entries[index].itemsize < room:
            units[-1] = Unit(region, last.start, stop, (*last.members, index))
        else:
            units.append(Unit(region, start, stop, (index,)))
    return sorted(units, key=lambda unit: -unit.members[0])
