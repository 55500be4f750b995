"""Clipping gradients that lie in memory once for all ranks of a host.

Each rank takes the norms of some, hears those of the others, and scales its own part of what all of them read. So
clipping takes a rank a part of the time, and no rank writes to its gradients, which would end the sharing. Of several
hosts, the first takes the norms for all: other processors may come to other bits.
"""

from __future__ import annotations

import hashlib
import struct
import weakref
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from phalanx.reduce.places import Places
from phalanx.reduce.reducer import Reducer
from phalanx.reduce.roster import reducers
from phalanx.transport.pieces import Span
from phalanx.transport.shared_gradients import SharedGradients

_CALL = "phalanx.clip_grad_norm_()"
_HOW = struct.Struct("<ddB8s")
_TORCHS_MARGIN = 1e-6
"""What torch adds to the norm before it divides by it."""


@torch.no_grad()
def clip_together(
    parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor | None:
    """Clip the gradients of `parameters`, and return their norm, as torch.nn.utils.clip_grad_norm_ does.

    Norms are added up in the order of the model's parameters. Returns None where nothing has been done: gradients are
    not shared, some rank has written to its own, ranks clip different ones, or there is an error to raise. It is a
    collective if the last reduction was shared. Every rank comes to the same.
    """
    if max_norm == float("inf"):
        return None
    clipping = _clipping_of(parameters)
    return None if clipping is None else clipping.run(float(max_norm), float(norm_type), error_if_nonfinite)


def _clipping_of(parameters: Sequence[torch.Tensor]) -> _Clipping | None:
    """Of gradients in one region of one reducer that were shared in its last reduction. The same on every rank."""
    for reducer in sorted(reducers, key=lambda reducer: reducer.watch.order):
        store = None if reducer.stale else reducer.places.memory.shared
        if store is None or not store.shares or store.apart:
            continue
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        numbers, places = reducer.watch.numbers_of(trained), reducer.plan.places
        regions = {places[number][0] for number in numbers}
        if len(numbers) == len(trained) and len(regions) == 1 and regions <= reducer.places.memory.staged.keys():
            return _Clipping(reducer, store, numbers, [p for p in parameters if not p.requires_grad])
    return None


class _Division(NamedTuple):
    """Who does what of clipping some gradients: the same on every rank, in whatever order they are listed."""

    gradients: bytes
    """Which they are, and of which model, as a hash."""
    taken: list[int]
    """Which of the list have their norms taken by this rank, in the order of their parameters."""
    order: torch.Tensor
    """Where norms in the order of the parameters are, in those of all ranks one after the other."""
    spans: list[Span]


def _divided(reducer: Reducer, store: SharedGradients, numbers: Sequence[int]) -> _Division:
    plan, staged = reducer.plan, reducer.places.memory.staged
    listed = sorted(range(len(numbers)), key=numbers.__getitem__)
    in_order = array("Q", (reducer.tag, *sorted(numbers)))
    takers = []
    for number in in_order[1:]:
        region, start = plan.places[number]
        middle = start + plan.entries[number].count // 2
        takers.append(store.first_host[middle * len(store.first_host) // plan.regions[region].count])
    return _Division(
        hashlib.blake2b(in_order.tobytes(), digest_size=8).digest(),
        [place for place, taker in zip(listed, takers, strict=True) if taker == reducer.group.core.rank],
        torch.tensor(takers).argsort(stable=True).argsort(),
        [(staged[region], start, stop) for region, start, stop in plan.spans(numbers)],
    )


_divisions: weakref.WeakKeyDictionary[Places, dict[tuple[int, ...], _Division]] = weakref.WeakKeyDictionary()
_KEPT = 16  # divisions of one model


def _division_of(reducer: Reducer, store: SharedGradients, numbers: tuple[int, ...]) -> _Division:
    known = _divisions.setdefault(reducer.places, {})
    found = known.get(numbers)
    if found is None:
        if len(known) >= _KEPT:
            known.clear()
        found = known[numbers] = _divided(reducer, store, numbers)
    return found


class _Clipping:
    """One call: on the gradients with these numbers in their reducer. `others` are listed too, and should have none."""

    def __init__(
        self, reducer: Reducer, store: SharedGradients, numbers: Sequence[int], others: Sequence[torch.Tensor]
    ) -> None:
        self._group, self._store, self._others = reducer.group, store, others
        self._places = reducer.places
        gradients = [reducer.parameters[number].grad for number in numbers]
        self._numbers = [number for number, gradient in zip(numbers, gradients, strict=True) if gradient is not None]
        self._gradients = [gradient for gradient in gradients if gradient is not None]
        self._division = _division_of(reducer, store, tuple(self._numbers))

    def run(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor | None:
        """Clip; None, on every rank, if that cannot be done together."""
        self._group.drain()  # the user's asynchronous collectives come first, on every rank
        with self._group.core.lock, self._store.reducing:  # a process that is forked meanwhile must not stop sharing
            norms = self._norms(max_norm, norm_type, error_if_nonfinite)
            if norms is None:
                return None
            norm: torch.Tensor = torch.linalg.vector_norm(norms, norm_type)
            if error_if_nonfinite and not norm.isfinite():
                return None
            factor = max_norm / (norm + _TORCHS_MARGIN)
            if not factor >= 1.0:
                self._store.scale_common(self._division.spans, factor.clamp(max=1.0))
                self._group.core.fence()
                torch.autograd.graph.increment_version(self._gradients)
        return norm

    def _norms(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor | None:
        """The norms of all gradients; None if some rank's are not whole, or ranks differ in what to clip, or how.

        A rank says how it clips, which gradients it has, and the norms that it has taken.
        """
        said, taken = b"", []
        if self._gradients and self._is_whole():
            said = _HOW.pack(max_norm, norm_type, error_if_nonfinite, self._division.gradients)
            mine = [self._gradients[place] for place in self._division.taken]
            taken = torch.stack(torch._foreach_norm(mine, norm_type)).tolist() if mine else []
        answers = self._group.core.exchange(said + array("d", taken).tobytes(), _CALL)
        if not said or not all(answer.startswith(said) for answer in answers):
            return None
        heard = array("d", b"".join(answer[len(said) :] for answer in answers))
        return torch.tensor(heard, dtype=self._gradients[0].dtype)[self._division.order]

    def _is_whole(self) -> bool:
        """Whether what this rank shows is what all share, and nothing else."""
        return (
            self._store.shows_common
            and self._places.are_shown(self._numbers, self._gradients)
            and all(other.grad is None for other in self._others)
        )
