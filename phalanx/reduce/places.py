"""Where the gradients of one model are: their places in gradient memory, and what p.grad shows.

Before backward every parameter without a gradient is lent its zeroed place, so that autograd accumulates
straight into it. A gradient that lives elsewhere (the user's own tensor, a sparse one, one with a graph)
is copied in before a reduction and gets the result copied out. A place is recognised by its data
pointer, never by identity.

A parameter whose gradient is held back (see DistributedDataParallel.sync_policy) shows no gradient between
steps, while what it has accumulated stays in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import attrgetter, eq, is_
from sys import getrefcount

import torch

from phalanx.group.process_group import PhalanxProcessGroup
from phalanx.reduce.memory import Memory
from phalanx.reduce.plan import Plan

# One pass of map() over hundreds of parameters costs a fraction of a loop's.
_gradient, _requires_grad, _version = attrgetter("grad"), attrgetter("requires_grad"), attrgetter("_version")
_NONES = repeat(None)
_ONLY_HERE = 1  # holders of a storage that only a local variable still names


class Places:
    """The places of `parameters` by `plan`. Making them is a collective.

    `older` are the places that gradients may still be in; they move.
    """

    def __init__(
        self,
        group: PhalanxProcessGroup,
        plan: Plan,
        parameters: Sequence[torch.nn.Parameter],
        older: Places | None,
    ) -> None:
        self.plan, self._params = plan, parameters
        self.memory = Memory(group, plan)
        self.views: list[torch.Tensor | None] = [
            None if place is None else self.memory.view(place[0], place[1], parameter)
            for place, parameter in zip(plan.places, parameters, strict=True)
        ]
        self.placed = [index for index, view in enumerate(self.views) if view is not None]
        self.held: set[int] = set()
        self.hidden = False  # whether some parameter showed no gradient at the last settle()
        self._pointers = [0 if view is None else view.data_ptr() for view in self.views]
        self._storages: list[int] = []  # of the placed parameters, whose users can be counted
        self._unused: list[tuple[int, int]] = []
        self._count_from_now()
        self._lent: list[int] = []
        self._lent_views: list[torch.Tensor | None] = []
        self._versions: list[int] = []
        if older is not None:
            self._move_in(older)

    def _move_in(self, older: Places) -> None:
        before = {id(view): view for view in older.views if view is not None}
        held = {id(older._params[index]): older.views[index] for index in older.held}
        for index in self.placed:
            parameter, view = self._params[index], self.views[index]
            if id(parameter.grad) in before:
                view.copy_(parameter.grad)
                parameter.grad = view
            elif id(parameter) in held and parameter.grad is None:
                view.copy_(held[id(parameter)])
                self.held.add(index)

    # -- gradients that the user keeps ---------------------------------------------------------------

    def _count_from_now(self) -> None:
        """Note how many hold each place while nobody but us does."""
        views = [self.views[index] for index in self.placed]
        self._storages = [view.untyped_storage()._cdata for view in views]
        del views
        self._unused = self._holders()

    def _holders(self) -> list[tuple[int, int]]:
        views = self.views if len(self.placed) == len(self.views) else [self.views[index] for index in self.placed]
        return list(zip(map(getrefcount, views), map(torch._C._storage_Use_Count, self._storages), strict=True))

    def _leave_kept(self) -> None:
        """Let gradients that the user has kept from an earlier step keep their values, away from their places."""
        holders = self._holders()
        if holders == self._unused:
            return
        kept = [i for i, now, unused in zip(self.placed, holders, self._unused, strict=True) if now > unused]
        for index in kept:
            view, parameter = self.views[index], self._params[index]
            if parameter.grad is not None:
                continue
            storage = view.untyped_storage()
            view.data = view.clone()  # whoever holds this very tensor
            region, start = self.plan.places[index]
            alone = self.memory.has_own_storage(region)  # else its users cannot be told from its neighbours
            if alone and torch._C._storage_Use_Count(storage._cdata) > _ONLY_HERE:
                storage.share_memory_()  # whoever holds another tensor on its memory: moves them all
            self.views[index] = self.memory.view(region, start, parameter)
        if kept:
            self._count_from_now()

    # -- around a backward ---------------------------------------------------------------------------

    def lend(self) -> Sequence[int]:
        """Give every parameter without a gradient its place, zeroed unless it is held back there.

        Returns the parameters whose places have been zeroed.
        """
        self._leave_kept()
        params, views = self._params, self.views
        usual = not self.held and len(self.placed) == len(params)
        if usual and all(map(is_, map(_gradient, params), _NONES)) and all(map(_requires_grad, params)):
            for flat in self.memory.own:
                flat.zero_()
            self._lent = emptied = self.placed
            lent_views = views
        else:
            self._lent = [i for i in self.placed if params[i].grad is None and params[i].requires_grad]
            emptied = [i for i in self._lent if i not in self.held]
            if emptied:
                torch._foreach_zero_([views[i] for i in emptied])
            params, lent_views = [params[i] for i in self._lent], [views[i] for i in self._lent]
        for parameter, view in zip(params, lent_views, strict=True):
            parameter.grad = view
        self._lent_views = lent_views
        self._versions = list(map(_version, lent_views))
        return emptied

    def untouched(self) -> set[int]:
        """The parameters whose lent place nobody has written to, though their hook may have run.

        With create_graph, autograd leaves the place alone and puts a gradient of its own beside it.
        """
        now = list(map(_version, self._lent_views))
        if not any(map(eq, self._versions, now)):
            return set()
        return {
            index
            for index, before, after in zip(self._lent, self._versions, now, strict=True)
            if before == after and self._params[index].grad is self.views[index]
        }

    def keep_all(self) -> None:
        """End the loan with every place in use."""
        self._lent, self._lent_views, self._versions = [], [], []

    def take_back(self, kept: set[int]) -> None:
        """Take lent places away again from the parameters not in `kept`; the loan is over."""
        for index in self._lent if len(kept) < len(self._params) else ():
            if index not in kept and self._params[index].grad is self.views[index]:
                self._params[index].grad = None
        self._lent, self._lent_views, self._versions = [], [], []

    # -- around a reduction --------------------------------------------------------------------------

    def settle(self, produced: set[int]) -> list[int]:
        """Have every contribution in its place; return the parameters whose gradient lives elsewhere.

        Removes from `produced` those whose gradient the user has dropped.
        """
        foreign: list[int] = []
        try:
            pointers = list(map(torch.Tensor.data_ptr, map(_gradient, self._params)))
        except (TypeError, RuntimeError):  # one of them is None, or sparse and has no data pointer
            pointers = [pointer(parameter.grad) for parameter in self._params]
        self.hidden = 0 in pointers
        if pointers == self._pointers:
            return foreign
        for index, at in enumerate(pointers):
            view, gradient = self.views[index], self._params[index].grad
            if gradient is None:
                if index not in self.held:
                    produced.discard(index)
                    if view is not None:
                        view.zero_()
            elif view is not None and at != self._pointers[index]:
                if gradient is view:  # p.grad.data has been replaced
                    region, start = self.plan.places[index]
                    view = self.views[index] = self.memory.view(region, start, self._params[index])
                with torch.no_grad():
                    view.copy_(gradient if gradient.layout is torch.strided else gradient.to_dense())
                foreign.append(index)
        return foreign

    def foreign_among(self, indices: Iterable[int]) -> list[int]:
        """Those of `indices` that have a gradient which does not live in its place."""
        found = []
        for index in indices:
            gradient = self._params[index].grad
            if gradient is not None and pointer(gradient) != self._pointers[index]:
                found.append(index)
        return found

    def show(self, used: Iterable[int]) -> None:
        """Have every parameter in `used` that shows no gradient show its place."""
        for index in used:
            if self._params[index].grad is None and self.views[index] is not None:
                self._params[index].grad = self.views[index]

    def hand_out(self, used: Sequence[int], foreign: Sequence[int]) -> None:
        """Copy results out to gradients that live elsewhere."""
        if not foreign:
            return
        wanted = set(used)
        for index in foreign:
            gradient, view = self._params[index].grad, self.views[index]
            if index not in wanted or gradient is None or view is None:
                continue
            if gradient.layout is not torch.strided:
                self._params[index].grad = view
            else:
                gradient.data.copy_(view)

    def hold_back(self, indices: Iterable[int]) -> None:
        """Keep what these parameters have accumulated in their places, and show no gradient."""
        for index in indices:
            view = self.views[index]
            gradient = self._params[index].grad
            if view is None or gradient is None:
                continue
            if pointer(gradient) != self._pointers[index]:
                with torch.no_grad():
                    view.copy_(gradient if gradient.layout is torch.strided else gradient.to_dense())
            self._params[index].grad = None
            self.held.add(index)


def pointer(gradient: torch.Tensor | None) -> int:
    """The data pointer of a gradient; 0 for none, -1 for a sparse one."""
    if gradient is None:
        return 0
    return gradient.data_ptr() if gradient.layout is torch.strided else -1
