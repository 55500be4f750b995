"""Are the replicas still equal? A check that is always on, and one on demand.

Replicas are equal when a step is synchronised: they began equal and have made the same steps on the same gradients.
So the tickets of that synchronisation, which every rank hands every other anyway, carry a digest of 16 bits:

    a piece   of the parameters' bytes, another one each time, so that all have been seen after 64 steps
    writes    how often parameters were written to in place since the step before, from torch's version counters.
              A load or a step on one rank only shows here at once, whichever piece comes next; it proves
              nothing by itself, and only asks for the proof

Equal tickets are equal digests: the usual case costs the hash, and no comparison. Where digests differ, every rank
sees it in the same tickets, and all compare the checksums of all parameters: these decide, and name what differs.
Which piece comes next follows from the number of the step, so that nothing is decided by a clock. Steps of small
models are so short that the digest alone would be seen in them: after the first 64, every fourth has one.

Not compared: parameters that DistributedDataParallel ignores or the user keeps local; anything while ranks follow
(they have run out of data, or skip); anything under a communication hook that keeps replicas apart. Buffers
neither: they are copied or averaged in every step, or differ because the user wants them to.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch

from phalanx.errors import RankMismatchError
from phalanx.misuse import silenced
from phalanx.parallel import replicas
from phalanx.parallel.pieces import Pieces, can_be_hashed
from phalanx.parallel.replicas import UNKNOWN, Comparison, Note
from phalanx.parallel.wrapped import Wrapped
from phalanx.reduce.schedule import NEVER

_OFF, _NOT_NOW = 0, 1  # what tickets carry in place of a digest
_TURNS = 64
_SMALL_BYTES, _EVERY_OF_SMALL = 1 << 20, 4
_MOST_COUNTERS = 64
_NEEDLESS_BY_WRITES, _NEEDLESS = 4, 16
_KEEP_REPLICAS_APART = ("post_localSGD_hook", "noop_hook")
_version = attrgetter("_version")


class Drift:
    """Compares the replicas of one wrapped model."""

    def __init__(self, model: Wrapped) -> None:
        self._model = weakref.ref(model)
        self.apart: set[int] = set()  # ids of parameters that the user keeps local, or has stepped while they were
        self._stopped = False
        self._needless = 0  # proofs in a row that have found nothing
        self._ahead = 0  # what this rank's count of steps lacks to be that of the others
        self._hook: Any = None
        # What is hashed, and what that follows from.
        self._of: Any = None
        self._policies: Any = None
        self._known_apart = 0
        self._kinds: list[Any] = []
        self._every = 1
        self._tensors: list[torch.Tensor] = []
        self._pieces = Pieces([], _TURNS)
        self._counters: Sequence[torch.Tensor] = ()
        # When it was last seen equal, in steps: everything, and each piece.
        self._base = UNKNOWN
        self._checked: list[int] = []
        # The present step.
        self._written: int | None = None
        self._step = self._turn = self._hash = self._digest = 0
        self._writes = UNKNOWN

    # -- in every step -------------------------------------------------------------------------------

    def digest(self) -> int:
        """What the tickets of the coming synchronisation say of this rank's model."""
        model = self._model()
        if model is None:
            return _OFF
        reducer = model._reducer
        self._step = step = reducer.statistics.flushes + 1
        turn = step + self._ahead
        if self._every > 1 and turn > _TURNS:
            if turn % self._every:
                self._digest = _NOT_NOW
                return _NOT_NOW
            turn //= self._every
        if (
            model._everything is not self._of
            or reducer.schedule.policies is not self._policies
            or reducer.comm_hook is not self._hook
            or len(self.apart) != self._known_apart
        ):
            self._follow(model)
        if self._stopped or not model.drift_check or "replica-drift" in silenced:
            self._digest = _OFF
            return _OFF
        before, self._written = self._written, sum(map(_version, self._counters))
        self._writes = writes = UNKNOWN if before is None else self._written - before
        if self._checked:
            self._turn = turn = turn % len(self._checked)
            self._hash = self._pieces.hash(turn)
        mixed = self._hash ^ (writes * 0x9E3779B1 & 0xFFFFFFFF)
        self._digest = digest = max((mixed ^ mixed >> 16) & 0xFFFF, _NOT_NOW + 1)
        return digest

    def compare(self, heard: Sequence[int]) -> None:
        """Compare the digests of all ranks after a synchronisation; none at all means equal. Every rank.

        Raises ReplicaDriftError on every rank if the replicas differ.
        """
        if not heard:
            if self._digest > _NOT_NOW:
                self._needless = 0
                if self._checked:
                    self._checked[self._turn] = self._step
            return
        model = self._model()
        if model is None:
            return
        if len(model._reducer.runners) < model._group.core.size:
            self._written = None  # those who have followed count from elsewhere
        elif len(set(heard)) == 1:
            self.compare(())
        elif _OFF in heard:
            self._refuse_different_switches(model, heard)
        else:
            self._prove(model, model._reducer.statistics.flushes)

    def _refuse_different_switches(self, model: Wrapped, heard: Sequence[int]) -> None:
        ways = ["without", "with"]
        calls = {rank: f"a step {ways[digest > 0]} the drift check" for rank, digest in enumerate(heard)}
        raise RankMismatchError(
            calls, model._group.core.rank,
            'Set ddp.drift_check, or call phalanx.silence("replica-drift"), on every rank alike.',
        )  # fmt: skip

    def _prove(self, model: Wrapped, step: int) -> None:
        """Compare everything, since digests differ: every rank has seen the same ones."""
        names, tensors, apart = self._everything(model)
        found = replicas.compare(
            model._group.core, names, tensors, apart, Note(step + self._ahead, self._hash, self._writes)
        )
        self._raise_if_different(model, names, tensors, found, step)
        self._needless += 1
        notes = found.notes.values()
        if len({note.step for note in notes}) > 1:
            self._ahead = max(note.step for note in notes) - step
        elif len(set(found.kept.values())) > 1:
            self.apart.update(id(tensors[index]) for index in found.apart)
        elif len({note.piece for note in notes}) > 1:
            self._pieces.leave_out(self._turn)  # of equal values in different strides
        elif self._needless >= _NEEDLESS_BY_WRITES:
            # Ranks that update different parameters by turns, and share them afterwards.
            self._counters, self._written = (), None
        self._stopped = self._stopped or self._needless >= _NEEDLESS
        self._seen_equal(step)

    def _raise_if_different(
        self, model: Wrapped, names: Sequence[str], tensors: Sequence[torch.Tensor], found: Comparison, step: int
    ) -> None:
        differing = found.differing
        if not differing:
            return
        tensor = tensors[differing[0]]
        pieces = next((of for mine, of in zip(self._tensors, self._pieces.of, strict=True) if mine is tensor), [])
        last_equal = min((self._checked[piece] for piece in pieces), default=self._base)
        raise replicas.error(model._group.core, names, tensors, found, last_equal, step)

    # -- on demand, and when everything has been made equal ------------------------------------------

    def check(self, with_buffers: bool) -> None:
        """Compare all parameters, and buffers if wanted. A collective; see Guarded.check_replicas()."""
        model = self._model()
        if model is None or model._group.core.size == 1:
            return
        self._follow(model)
        names, tensors, apart = self._everything(model)
        if with_buffers:
            local = set(map(id, model._buffers_with("local")))
            listed = [(n, b) for n, b in model.named_module_buffers.items() if id(b) not in local and can_be_hashed(b)]
            names, tensors = names + [name for name, _ in listed], tensors + [buffer for _, buffer in listed]
        step = model._reducer.statistics.flushes
        found = replicas.compare(model._group.core, names, tensors, apart, Note(step))
        self._raise_if_different(model, names, tensors, found, step)
        if not apart:
            self._seen_equal(step)

    def begin_anew(self) -> None:
        """The model has just been made equal on all ranks. Every rank."""
        model = self._model()
        if model is not None and model._group.core.size > 1:
            self.apart.clear()
            self._follow(model)
            self._seen_equal(model._reducer.statistics.flushes)
            self._written = sum(map(_version, self._counters))

    def _seen_equal(self, step: int) -> None:
        self._base, self._checked = step, [step] * len(self._pieces)

    # -- what is compared ----------------------------------------------------------------------------

    def _follow_hook(self, model: Wrapped) -> None:
        """Stop for good where a communication hook keeps the replicas apart."""
        self._hook = hook = model._reducer.comm_hook
        origins = (getattr(hook.hook, "__name__", ""), type(hook.state).__module__) if hook is not None else ()
        if not self._stopped and any(origin.endswith(_KEEP_REPLICAS_APART) for origin in origins):
            self._stopped = True
            if hook is not None and model._group.core.rank == 0:
                logging.getLogger("phalanx").warning(
                    "the communication hook %s keeps replicas apart: from now on they are not checked for drift; "
                    "call ddp.check_replicas() where they should be equal", hook.name
                )  # fmt: skip

    def _follow(self, model: Wrapped) -> None:
        """Follow the model, its hook and its policies to other parameters."""
        self._follow_hook(model)
        self._of, self._policies = model._everything, model._reducer.schedule.policies
        for policy in self._policies:
            if policy.every == NEVER:
                self.apart.update(id(model._reducer.parameters[index]) for index in policy.members)
        self._known_apart = len(self.apart)
        tensors = [each for each in self._of if id(each) not in self.apart and can_be_hashed(each)]
        kinds = [(id(each), each.dtype, each.shape) for each in tensors]
        if kinds == self._kinds:
            return
        self._kinds, self._tensors, self._written = kinds, tensors, None
        self._every = _EVERY_OF_SMALL if sum(each.nbytes for each in tensors) < _SMALL_BYTES else 1
        self._pieces = Pieces(tensors, _TURNS // self._every)
        self._checked = [self._base] * len(self._pieces)
        counting = [each for each in tensors if not each.is_inference()]
        step = -(-len(counting) // _MOST_COUNTERS) or 1
        self._counters = counting[::step] if self._needless < _NEEDLESS_BY_WRITES else ()

    def _everything(self, model: Wrapped) -> tuple[list[str], list[torch.Tensor], frozenset[int]]:
        """Names and tensors of all parameters that can be compared, and the numbers of those kept apart."""
        names = {id(each): name for name, each in model.module.named_parameters()}
        tensors = [each for each in self._of if can_be_hashed(each) and id(each) in names]
        apart = frozenset(index for index, each in enumerate(tensors) if id(each) in self.apart)
        return [names[id(each)] for each in tensors], tensors, apart
