"""Where the gradients of one model are: their places in gradient memory, and what p.grad shows.

A place is staged where the ranks share memory (see transport/shared_gradients.py), and else at home. Before
backward every parameter without a gradient whose place is at home is lent it, zeroed, so that autograd
accumulates straight into it. A gradient whose place is staged is made by autograd, posted when it is time, and
replaced by the place with the result. A gradient that lives elsewhere (the user's own tensor, a sparse one,
one with a graph) is copied in before a reduction and gets the result copied out. A place is recognised by its
data pointer, never by identity. A place whose gradient somebody keeps when it is about to be written to again is
left to them with all memory around it, and from then on that parameter's gradients stay where autograd makes them.

A parameter whose gradient is held back (see DistributedDataParallel.sync_policy) shows no gradient between
steps, while what it has accumulated stays in its place. The place is not lent: what backward makes meanwhile is the
user's to keep or to drop, and is added to the place when the next synchronisation begins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter, eq, is_
from sys import getrefcount

import torch

from phalanx.group.process_group import PhalanxProcessGroup
from phalanx.reduce.forms import Forms, pointer, shows
from phalanx.reduce.halves import Halves
from phalanx.reduce.holders import OURS_ALONE, Holders, are_ours_alone
from phalanx.reduce.memory import Memory, form_of, shaped
from phalanx.reduce.plan import NOWHERE, Plan
from phalanx.reduce.posting import Contributions, Posting, add, copy, copy_all

# One pass of map() over hundreds of parameters costs a fraction of a loop's.
_gradient, _requires_grad, _version = attrgetter("grad"), attrgetter("requires_grad"), attrgetter("_version")
_data_pointer = torch.Tensor.data_ptr
_NONES = repeat(None)
_NOBODY: frozenset[int] = frozenset()
_NO_VIEW = torch.empty(0)
"""Stands among the views for a parameter that has no place."""
_RENEWALS = 3
"""How often memory is left to who keeps one gradient of it; then all gradients are taken for ones that are kept."""


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
        self._forms = list(map(form_of, parameters))
        self.views = [
            _NO_VIEW if place is NOWHERE else self._new_view(index) for index, place in enumerate(plan.places)
        ]
        self.placed = [index for index, view in enumerate(self.views) if view is not _NO_VIEW]
        self.staged = [index for index in self.placed if plan.places[index][0] in self.memory.staged]
        self._at_home = [index for index in self.placed if plan.places[index][0] not in self.memory.staged]
        self._posting = self._new_posting()
        self.held: set[int] = set()
        self.hidden = False  # whether some parameter showed no gradient at the last settle()
        self._view_forms = Forms(self.views)
        self._pointers = self._view_forms.pointers
        self._shows_place = partial(shows, parameters, self._pointers)
        self._holders_at_home = Holders(self.views, self._at_home, self._shows_place) if self._at_home else None
        self._holders_staged = Holders(self.views, self.staged, self._shows_place) if self.staged else None
        self._kept: set[int] = set()  # parameters whose gradients users keep past the next step
        self._renewals = 0
        self._lent: Sequence[int] = []
        self._lent_views: Sequence[torch.Tensor] = []
        self._versions: list[int] = []
        self._made: Collection[int] = _NOBODY  # staged ones without a gradient when this backward began
        self._given: list[torch.Tensor | None] = []  # what the parameters showed at the last settle()
        self._all_made: list[torch.Tensor] = []  # the same, if all of it was staged and made by this backward
        self._posted = self._brought = False
        if older is not None:
            self._move_in(older)

    def _new_posting(self) -> Contributions | None:
        store = self.memory.shared
        if store is None:
            return None
        places = [self.plan.places[index] for index in self.staged]
        starts = [(self.memory.staged[region], start) for region, start in places]
        forms = self._forms
        contributions = Contributions(self.staged, starts, self.views, lambda flat, i: shaped(flat, forms[i]))
        store.post = Posting(store, contributions).post
        if store.has_halves:
            store.halves = Halves(store, contributions)
        return contributions

    def _new_view(self, index: int) -> torch.Tensor:
        region, start = self.plan.places[index]
        return self.memory.view(region, start, self._forms[index])

    def _regain(self) -> None:
        """Make places anew that somebody has changed: p.grad.data = ..., p.grad.t_(). That is a gradient of theirs."""
        if self._view_forms.are_all_unchanged():
            return
        for holders in (self._holders_staged, self._holders_at_home):
            indices = holders.indices if holders is not None else ()
            lost = [index for index in indices if self._view_forms.is_changed(index)]
            if holders is None or not lost:
                continue
            left = holders.are_left(lost, self._shows_view)
            for index in lost:
                self.views[index] = self._new_view(index)
                holders.count_anew(index)
            if not left:
                self._leave(holders, lost)

    def _shows_view(self, index: int) -> bool:
        return self._params[index].grad is self.views[index]

    def _leave_kept(self, holders: Holders | None) -> None:
        """Let gradients that the user has kept from an earlier step keep their values."""
        if holders is not None and (kept := holders.kept()):
            self._leave(holders, kept)

    def _leave(self, holders: Holders, kept: Sequence[int]) -> None:
        """Leave all of this memory to who keeps some of it, and make new one."""
        self._renewals += 1
        self._kept.update(kept if self._renewals <= _RENEWALS else self.placed)
        self.memory.renew(staged=holders is self._holders_staged)
        for index in holders.indices:
            self._move(index)
        holders.count_from_now()

    def _move(self, index: int) -> None:
        before, now, parameter = self.views[index], self._new_view(index), self._params[index]
        self.views[index] = now
        self._view_forms.note(index)
        if index in self.held:
            now.copy_(before)
            if parameter.grad is before:
                parameter.grad = now

    def _move_in(self, older: Places) -> None:
        before = {id(view): view for view in older.views if view is not _NO_VIEW}
        held = {id(older._params[index]): older.views[index] for index in older.held}
        for index in self.placed:
            parameter, view = self._params[index], self.views[index]
            gradient = parameter.grad
            if id(parameter) in held:
                view.copy_(held[id(parameter)])
                self.held.add(index)
            elif gradient is not None and id(gradient) in before:
                view.copy_(gradient)
                parameter.grad = view

    # -- around a backward ---------------------------------------------------------------------------

    def lend(self) -> Sequence[int]:
        """Give every parameter without a gradient its place at home, zeroed; not where something is held back.

        Returns the parameters that had dropped their gradients.
        """
        if self._at_home:  # the others are looked at when they settle
            self._regain()
            self._leave_kept(self._holders_at_home)
        params, views = self._params, self.views
        empty = all(map(is_, map(_gradient, params), _NONES))
        if empty and not self.held and len(self.placed) == len(params):
            self._made = _NOBODY if torch.is_grad_enabled() else self.staged  # enabled by create_graph
            if not self._at_home:
                return self.placed
            if not self.staged and not self._kept and all(map(_requires_grad, params)):
                for flat in self.memory.at_home:
                    flat.zero_()
                self._begin_loan(self.placed, params, views)
                return self.placed
        return self._lend_some()

    def _lend_some(self) -> Sequence[int]:
        params, views = self._params, self.views
        empty = [i for i in self.placed if params[i].grad is None and params[i].requires_grad]
        if self.staged:
            self._made = _NOBODY if torch.is_grad_enabled() else {i for i in empty if i not in self.held}
        dropped = [i for i in empty if i not in self.held]
        unlent = self._kept.union(self.staged)
        lent = [i for i in dropped if i not in unlent]
        if lent:
            torch._foreach_zero_([views[i] for i in lent])
        self._begin_loan(lent, [params[i] for i in lent], [views[i] for i in lent])
        return dropped

    def _begin_loan(
        self, lent: Sequence[int], params: Sequence[torch.nn.Parameter], views: Sequence[torch.Tensor]
    ) -> None:
        for parameter, view in zip(params, views, strict=True):
            parameter.grad = view
        self._lent, self._lent_views = lent, views
        self._versions = list(map(_version, views))

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
        self._made, self._given, self._all_made = _NOBODY, [], []

    def take_back(self, kept: Collection[int]) -> None:
        """Take lent places away again from the parameters not in `kept`; the loan is over."""
        for index in self._lent if len(kept) < len(self._params) else ():
            if index not in kept and self._params[index].grad is self.views[index]:
                self._params[index].grad = None
        self.keep_all()

    # -- around a reduction --------------------------------------------------------------------------

    def settle(self, produced: set[int], local: Collection[int]) -> Sequence[int]:
        """Have every contribution in its place, or ready to be posted; return the parameters to hand_out() to.

        Those are the ones whose gradient lives elsewhere. Removes from `produced` those whose gradient the
        user has dropped. What is held back stays as it is for parameters in `local`.
        """
        self._regain()
        self._leave_kept(self._holders_staged)
        given = list(map(_gradient, self._params))
        self._given, self._brought = given, False
        self._all_made = given if len(self._made) == len(given) and not any(map(is_, given, _NONES)) else []
        self._set_aside(False)
        if self._all_made:
            self.hidden = False
            return self.placed
        try:
            pointers = list(map(_data_pointer, given))
        except (TypeError, RuntimeError):  # one of them is None, or sparse and has no data pointer
            pointers = list(map(pointer, given))
        self._part_with_other_strides(pointers)
        self.hidden = 0 in pointers
        if pointers == self._pointers:
            self._set_aside(True)
            return ()
        return self._settle_each(pointers, produced, local)

    def _part_with_other_strides(self, pointers: list[int]) -> None:
        """Give a gradient of other strides in the memory of its place (p.grad = p.grad.t()) memory of its own."""
        for index, gradient in enumerate(self._given):
            view = self.views[index]
            if gradient is view or gradient is None or pointers[index] != self._pointers[index] or view is _NO_VIEW:
                continue
            if gradient.stride() != view.stride():
                own = self._params[index].grad = self._given[index] = gradient.detach().clone()
                pointers[index] = own.data_ptr()

    def _settle_each(self, pointers: Sequence[int], produced: set[int], local: Collection[int]) -> list[int]:
        foreign, staged = [], set(self.staged)
        for index, at in enumerate(pointers):
            view, gradient = self.views[index], self._params[index].grad
            if index in self.held and gradient is not None and at != self._pointers[index]:
                if index not in local:
                    add(gradient, view)
                    self._params[index].grad = self._given[index] = view
                    self._set_aside(True)
            elif gradient is None:
                if index in self.held:
                    self._given[index] = view
                    self._set_aside(True)
                    continue
                produced.discard(index)
                if view is not _NO_VIEW and index not in staged:
                    view.zero_()
            elif view is not _NO_VIEW and at != self._pointers[index]:
                if index not in staged:
                    copy(gradient, view)
                foreign.append(index)
            elif view is not _NO_VIEW:
                self._set_aside(True)
        return foreign

    def _set_aside(self, aside: bool) -> None:
        """Say whether contributions are where results would go."""
        if self.memory.shared is not None:
            self.memory.shared.aside = aside

    def post(self, step: int, at_home: bool = False) -> None:
        """Post the staged contributions for a reduction that begins with fence `step`; or put them `at_home`.

        Whoever is alone, or hands gradients to a communication hook, wants them at home.
        """
        if self._posting is None or self.memory.shared is None:
            return
        self._posted = True
        if not at_home:
            self._posting.begin(self._given, self._all_made)
            self.memory.shared.begin(step & 1)
        elif not self._brought:  # once for all rounds: what earlier ones have handed out is there
            self._brought = True
            if not self._all_made or not copy_all(self.views, self._all_made):
                for index in self.staged:
                    self._bring_home(index)

    def _bring_home(self, index: int) -> None:
        given, view = self._given[index], self.views[index]
        if given is None:
            view.zero_()
        elif given is not view:
            copy(given, view)

    def foreign_among(self, indices: Iterable[int]) -> list[int]:
        """Those of `indices` that have a gradient which does not live in its place."""
        return [i for i in indices if self._params[i].grad is not None and not self._shows_place(i)]

    def show(self, used: Iterable[int]) -> None:
        """Have every parameter in `used` that shows no gradient show its place; one without elements, an empty one."""
        for index in used:
            parameter, view = self._params[index], self.views[index]
            if parameter.grad is None and (view is not _NO_VIEW or not parameter.numel()):
                parameter.grad = view if parameter.numel() else torch.empty_like(parameter)

    def are_shown(self, indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> bool:
        """Whether these gradients are the places of these parameters, as they were made."""
        return self._view_forms.are_all_unchanged() and all(map(is_, gradients, map(self.views.__getitem__, indices)))

    def shown(self) -> list[int]:
        """The parameters that show a dense gradient."""
        return [i for i, p in enumerate(self._params) if p.grad is not None and p.grad.layout is torch.strided]

    def shown_or_room(self, indices: Iterable[int], shown: bool) -> dict[int, torch.Tensor]:
        """The dense gradients that these parameters show; if they are not `shown` here, room for them."""
        own = {index: self._params[index].grad if shown else None for index in indices}
        return {i: torch.empty_like(self._params[i]) if grad is None else grad for i, grad in own.items()}

    def show_only(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Have exactly these parameters show a dense gradient, of these values; what shows them already stays."""
        for index in set(self.shown()) - gradients.keys():
            self._params[index].grad = None
        for index, gradient in gradients.items():
            shown = self._params[index].grad
            if shown is None or shown.layout is not torch.strided or not torch.equal(shown, gradient):
                self._params[index].grad = gradient

    def hand_out(self, used: Sequence[int], foreign: Sequence[int]) -> None:
        """Give results to gradients that live elsewhere; what autograd has made, the place itself replaces.

        What somebody has got hold of meanwhile (a hook) is not replaced, but written to.
        """
        posted, self._posted = self._posted, False
        if self._posting is not None:
            self._posting.end()
        if not foreign or not (posted or self._at_home):
            return
        params, views = self._params, self.views
        all_alone = self._all_made and not self._kept and are_ours_alone(self._all_made)
        if all_alone and posted and len(used) == len(params):
            for parameter, view in zip(params, views, strict=True):
                parameter.grad = view
            return
        self._all_made = []  # from now on only of those that later rounds hand out
        unposted = _NOBODY if posted else set(self.staged)
        wanted = set(used)
        for index in foreign:
            gradient, view = params[index].grad, views[index]
            if index not in wanted or index in unposted or gradient is None or view is _NO_VIEW:
                continue
            self._given[index : index + 1] = [None]
            ours = index in self._made and index not in self._kept and getrefcount(gradient) <= OURS_ALONE
            if ours or gradient.layout is not torch.strided:
                params[index].grad = view
            else:
                gradient.data.copy_(view)

    def held_among(self, parameters: Sequence[torch.nn.Parameter]) -> set[int]:
        """The numbers of those of `parameters` of which something is held back."""
        held = {id(self._params[index]) for index in self.held}
        return {index for index, parameter in enumerate(parameters) if id(parameter) in held} if held else set()

    def hold_back(self, indices: Iterable[int]) -> None:
        """Keep what these parameters have accumulated in their places, and show no gradient."""
        for index in indices:
            view = self.views[index]
            gradient = self._params[index].grad
            if view is _NO_VIEW or gradient is None:
                continue
            if pointer(gradient) != self._pointers[index]:
                copy(gradient, view)
            self._params[index].grad = None
            self.held.add(index)
