"""What a wrapped model is watched for while it trains, and its check on demand.

A Guard hears from the reducer when a backward begins, when it has kept its gradients local, and when they are
synchronised. From that it tells what is wrong about a model that runs: replicas that drift apart (drift.py),
gradients that were clipped before their synchronisation, and optimizers that step too early. Optimizers are seen
by torch's own hook before every step; nothing of torch's is replaced.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from phalanx import misuse
from phalanx.errors import MisuseError
from phalanx.parallel.data_parallel import DataParallel
from phalanx.parallel.drift import Drift
from phalanx.parallel.seeds import compare_seeds
from phalanx.parallel.structure import Structure
from phalanx.parallel.wrapped import Wrapped
from phalanx.reduce.backward import current_task
from phalanx.reduce.monitor import Monitor
from phalanx.reduce.reducer import Reducer
from phalanx.reduce.roster import reducers
from phalanx.reduce.schedule import NEVER

_LOOKED_AT = 8
"""How many gradients are looked at for changes: whatever clips, clips all."""

_ACCUMULATING = (
    "with ddp.accumulate(every=k) as syncs:\n             loss(...).backward()\n         if syncs:\n"
    "             phalanx.clip_grad_norm_(...); optimizer.step(); optimizer.zero_grad()"
)


class Guard(Monitor):
    """Watches one wrapped model on one of several ranks."""

    def __init__(self, model: Wrapped) -> None:
        self.drift = Drift(model)
        self._model = weakref.ref(model)
        self._core = model._group.core
        self._before_sync = False  # a backward has begun that has neither been synchronised nor kept local
        self._kept: list[tuple[str, nn.Parameter, int]] = []  # whose gradients are local, and these gradients' versions
        self._warned: set[str] = set()
        self._seeds_compared = self._begun = False
        # Whether the wrapper has had a forward: since a backward ended, since an optimizer stepped. A forward only ever
        # writes to them, or torch.compile would make a variant of it for each value.
        self.forward_since_backward = self.forward_since_step = False
        self._looked_at: Structure | None = None
        self._stepped_unseen: list[tuple[str, nn.Parameter]] = []
        _watch(self)

    def _reducer(self) -> Reducer | None:
        model = self._model()
        return None if model is None else model._reducer

    # -- see Monitor ---------------------------------------------------------------------------------

    def begins(self) -> None:
        """See Monitor."""
        self._before_sync = True
        self._see_conversions()
        if self._kept or not self._begun:
            reducer = self._reducer()
            if reducer is not None:
                if not self._begun:
                    self._look_for_another_wrapper(reducer)
                self._look_for_changes(reducer)

    def kept_local(self) -> None:
        """See Monitor."""
        self._before_sync = False
        reducer = self._reducer()
        if reducer is not None and self._core.size > 1:
            few = [reducer.named[index] for index in islice(_pending(reducer), _LOOKED_AT)]
            self._kept = [(name, p, p.grad._version) for name, p in few if p.grad is not None]

    def flushing(self) -> int:
        """See Monitor."""
        self._before_sync = False
        self.heard = ()
        return self.drift.digest()

    def flushed(self) -> None:
        """A flush is over, on every rank."""
        self.drift.compare(self.heard)
        if not self._seeds_compared:
            self._seeds_compared = True
            compare_seeds(self._core)
        self._kept = []
        reducer = self._reducer()
        if reducer is not None and reducer.produced:
            self.kept_local()

    # -- what has changed without a forward of the wrapper, which looks ------------------------------

    def unwatched(self) -> Sequence[torch.Tensor]:
        """See Watch; a backward has ended."""
        model = self._model()
        if model is None:
            return ()
        if self._looked_at is not model._structure or model._structure.has_grown():  # by what a forward has made
            self._looked_at, self.forward_since_backward = model._structure, False
        unseen = [] if self.forward_since_backward else self._unseen(model)
        self.forward_since_backward = False
        return [parameter for _, parameter in unseen if parameter.grad is not None]

    def _see_conversions(self) -> None:
        """Have places made for parameters of another dtype or memory format."""
        model = self._model()
        if model is None or self.forward_since_backward or not self._has_changed(model):
            return
        if model._low is None and model._structure.is_converted():
            model._reducer.stale = True
            model._remember_structure()

    def _unseen(self, model: Wrapped) -> list[tuple[str, nn.Parameter]]:
        """Parameters without a hook."""
        return list(model._structure.unhooked(model._trainable())) if self._has_changed(model) else []

    def _has_changed(self, model: Wrapped) -> bool:
        structure = model._structure
        return not structure.is_as_before(unconverted=model._low is None) and not structure.is_borrowed()

    # -- what can be wrong ---------------------------------------------------------------------------

    def _look_for_another_wrapper(self, reducer: Reducer) -> None:
        self._begun = True
        mine = {id(parameter): name for name, parameter in reducer.named}
        for other in list(reducers):
            if other.watch.order < reducer.watch.order:
                shared = [mine[id(parameter)] for parameter in other.parameters if id(parameter) in mine]
                if shared:
                    warn_wrapped_twice(shared, self._core.rank)
                    return

    def _look_for_changes(self, reducer: Reducer) -> None:
        """Find local gradients that somebody has written to since their backward ended."""
        kept, self._kept = self._kept, []
        begun = set(map(id, reducer.watch.noted))
        changed = []
        for name, parameter, version in kept:
            grad = parameter.grad
            written = grad is not None and grad._version != version and id(parameter) not in begun
            if grad is not None and written and grad.any():  # zeroing drops them, which is right
                changed.append(name)
        if changed and "clip-before-sync" not in self._warned:
            self._warned.add("clip-before-sync")
            misuse.warn(
                "clip-before-sync",
                f"gradients that are not synchronised yet have been changed ({_named(changed)}), as by clip_grad_norm_ "
                "or GradScaler.unscale_ after a micro-batch: each rank has scaled its own part by its own norm",
                f"clip and unscale after the backward that synchronises:\n         {_ACCUMULATING}", self._core.rank,
            )  # fmt: skip

    def is_suspicious(self) -> bool:
        """Whether an optimizer that steps now may step on gradients that are not synchronised."""
        model = self._model()
        if model is None:
            return False
        reducer = model._reducer
        self._stepped_unseen = [] if self.forward_since_step else self._unseen(model)
        self.forward_since_step = False
        return bool(self._stepped_unseen or reducer.produced) or (self._before_sync and reducer.watch.running)

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """Look at an optimizer that is about to step; it may be that of another model."""
        reducer = self._reducer()
        if reducer is None or self._core.size == 1:
            return
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        kind, running = type(optimizer).__name__, self._before_sync and reducer.watch.running
        if running and current_task() != -1 and not stepped.isdisjoint(map(id, reducer.parameters)):
            misuse.refuse(
                "step-in-backward", f"{kind}.step() while backward is running: gradients are synchronised when it ends",
                "step after backward(); or torch.distributed.optim._apply_optimizer_in_backward(...), whose optimizers "
                "step as soon as gradients are synchronised", self._core.rank,
            )  # fmt: skip
        early = dict(self._stepped_unseen)
        early.update(reducer.named[index] for index in sorted(_pending(reducer)))
        if running:  # it has raised, or goes on in another thread
            begun = set(map(id, reducer.watch.noted))
            early.update((name, parameter) for name, parameter in reducer.named if id(parameter) in begun)
        early = {name: p for name, p in early.items() if p.grad is not None and id(p) in stepped}
        is_told = "unsynchronised-step" in self._warned
        if not is_told:
            early = {name: p for name, p in early.items() if p.grad is not None and p.grad.any()}  # not zeroed ones
        self.drift.apart.update(map(id, early.values()))
        if early and not is_told:
            self._warned.add("unsynchronised-step")
            misuse.warn(
                "unsynchronised-step",
                f"{kind}.step() on gradients that are not synchronised ({_named(list(early))}): every rank steps its "
                "replica by its own gradient, and the replicas become different models. They are not compared any more",
                "step after the backward that synchronises, which is one outside of no_sync(), and of which the "
                f"forward was that of the wrapped model if it has changed:\n         {_ACCUMULATING}", self._core.rank,
            )  # fmt: skip


class Guarded(Wrapped):
    """Mixed into DistributedDataParallel."""

    drift_check: bool = True
    """Whether replicas are compared in every step. Set it to the same value on every rank."""

    _guard: Guard | None = None

    def _start_guard(self) -> None:
        self._guard = None
        if self._group.core.size > 1:
            self._guard = self._reducer.monitor = Guard(self)
            self._reducer.watch.unwatched = self._guard.unwatched

    def check_replicas(self, buffers: bool = False) -> None:
        """Compare the parameters of all ranks, bit by bit; raise ReplicaDriftError on every rank if they differ.

        Collective: every rank, outside of backward. With `buffers`, all buffers too whose policy is not "local":
        by default they are rank 0's from one training forward's beginning to that of its end only. Parameters
        that are ignored or kept local are left out. Reads all of the model once, at about 2 GB/s.
        """
        self._reducer.watch.check_idle("check_replicas()", self._group.core.rank)
        if self._guard is not None:
            self._guard.drift.check(buffers)


def check_inside(module: nn.Module, rank: int) -> None:
    """Warn if a module that is about to be wrapped has a wrapped one in it; refuse one that splits batches itself."""
    for name, child in module.named_modules():
        if isinstance(child, DataParallel) and len(child.device_ids) > 1:
            raise MisuseError(
                f"a DataParallel inside of a DistributedDataParallel ({name or 'its module'}): each splits the batch",
                "DistributedDataParallel(module) with one rank for each device, without DataParallel", rank,
            )  # fmt: skip
        if isinstance(child, TorchDDP):
            warn_wrapped_twice([f"{name}.{each}".lstrip(".") for each, _ in child.named_parameters()], rank)
            return


def warn_wrapped_twice(names: list[str], rank: int) -> None:
    """Warn that these parameters belong to two wrapped models."""
    misuse.warn(
        "wrapped-twice",
        f"parameters that belong to two wrapped models ({_named(names)}): each synchronises them, which doubles the "
        "cost, and no_sync() of one does not hold for the other",
        "wrap once, the outermost module; `del ddp` before wrapping its module again", rank,
    )  # fmt: skip


def _pending(reducer: Reducer) -> Iterable[int]:
    """The parameters that show a gradient which is not synchronised and is going to be."""
    local = frozenset().union(*(p.members for p in reducer.schedule.policies if p.every == NEVER))
    for index in reducer.produced:
        gradient = reducer.parameters[index].grad
        if gradient is not None and not gradient.is_sparse and index not in local:
            yield index


def _named(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


_guards: list[weakref.ref[Guard]] = []
_hooks: list[RemovableHandle] = []


def _watch(guard: Guard) -> None:
    """Have optimizers looked at, from the first guard on: torch does not allow to stop while another thread steps."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
    _guards.append(weakref.ref(guard, _guards.remove))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for ref in _guards:
        guard = ref()
        if guard is not None and guard.is_suspicious():
            guard.optimizer_steps(optimizer)
