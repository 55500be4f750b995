"""Saving: every rank says what it has, rank 0 writes, and all go on when it is on the disk, or at once.

    1  rank 0 takes what it writes (a copy, if asynchronous), every rank its random state and metric
    2  one exchange: steps, arguments and metrics are compared, random states brought to rank 0
    3  rank 0 writes in a thread; the others wait in exchanges, or, if asynchronous, in the next call

An error in 1 or 3 is raised on every rank. A rank that dies before 2 leaves nothing behind; later, the
checkpoint has all it needs and is written to its end.
"""

from __future__ import annotations

import atexit
import os
import sys
import uuid
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

import torch.distributed as dist
from torch import nn

from phalanx.checkpoint import folder as disk
from phalanx.checkpoint import random_state, tree
from phalanx.checkpoint.agreement import Job, Ranks
from phalanx.checkpoint.content import Content, Pool, gather_shards, state_of
from phalanx.checkpoint.manifest import Manifest
from phalanx.errors import MisuseError
from phalanx.group import world
from phalanx.train import seed

_CALL = "checkpoint.save"
_MODES = ("min", "max")


class Handle:
    """A save that may still be going on."""

    def __init__(self, step: int, job: Job | None) -> None:
        self.step, self._job = step, job
        self._path: Path | None = None
        self._failed = False

    def wait(self) -> Path:
        """Return the checkpoint's folder once it is on the disk. Collective: every rank.

        Raises CheckpointError on every rank if it could not be written.
        """
        if self._path is None:
            if self._failed:
                raise MisuseError(f"wait() on the save of step {self.step}, whose error has been raised before")
            self._failed = True
            _forget(self)
            self._path = Path(Ranks.here(f"wait() for {_CALL}(step={self.step})").attend(self._job).decode())
            self._failed = False
        return self._path

    def finish(self) -> None:
        """Wait for the disk only, on rank 0, and raise what went wrong there. Not collective: for the end."""
        _forget(self)
        if self._job is not None:
            self._job.result()


@dataclass(frozen=True)
class Order:
    """The arguments of one save, checked."""

    folder: Path
    step: int
    keep: int | None
    metric: float | None
    mode: str | None

    def __post_init__(self) -> None:
        if isinstance(self.step, bool) or not isinstance(self.step, int) or self.step < 0:
            raise MisuseError(f"{_CALL}(step={self.step!r}): not the number of steps done", f"{_CALL}(..., step=120)")
        if self.keep is not None and (not isinstance(self.keep, int) or self.keep < 1):
            raise MisuseError(f"{_CALL}(keep={self.keep!r}): the last {self.keep!r} checkpoints", "keep=1 or more")
        if self.metric is not None and self.mode not in _MODES:
            raise MisuseError(
                f"{_CALL}(metric=..., mode={self.mode!r}): is less better, or more?", 'mode="min" or mode="max"'
            )
        if self.metric is None and self.mode is not None:
            raise MisuseError(f"{_CALL}(mode={self.mode!r}) without a metric", "metric=loss, mode='min'")


_pending: weakref.WeakKeyDictionary[Any, Handle] = weakref.WeakKeyDictionary()
_runs: dict[str, str] = {}  # the run that this process continues, by folder
_pool = Pool()


@overload
def save(directory: str | os.PathLike[str], *, step: int, asynchronous: Literal[True], **keywords: Any) -> Handle: ...
@overload
def save(directory: str | os.PathLike[str], *, step: int, **keywords: Any) -> Path: ...
def save(  # type: ignore[misc]  # the keywords of both are those below
    directory: str | os.PathLike[str],
    *,
    step: int,
    model: nn.Module | Mapping[str, nn.Module] | None = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scaler: Any = None,
    sampler: Any = None,
    extra: Any = None,
    keep: int | None = None,
    metric: float | None = None,
    mode: str | None = None,
    asynchronous: bool = False,
) -> Path | Handle:
    """Save a checkpoint into `directory`, which is made if need be, and return the checkpoint's own folder.

    Collective: every rank, with the same `step` and arguments. Rank 0 writes, the others wait. The model is
    rank 0's, unwrapped, as are optimizer, scheduler, scaler and `extra` (numbers, text, tensors, arrays,
    nested); random states, and the sampler's state where it differs, are those of each rank. Each may be a
    list or dict of several, `model` a dict by name. What is not synchronised yet in `p.grad` is not saved.

    `keep` is the number of newest checkpoints of this run to keep, besides the best by `metric`: its mean
    over the ranks, each counting as one; `mode` is "min" or "max".

    With `asynchronous=True` returns a Handle as soon as rank 0 has copied what it writes, to memory that it
    keeps for the next save. The next save or load waits for it, and raises its error; so do `Handle.wait`,
    `phalanx.shutdown` and the end of the program.

    Raises on every rank, with nothing half written: CheckpointError if the disk does not take it, MisuseError
    for data that could not be read back or ranks that differ in their arguments.
    """
    ranks = Ranks.here(_CALL)
    finish_pending()
    parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    parts = {name: part for name, part in parts.items() if part is not None}
    gather_shards(optimizer)
    content: list[Content] = []
    orders: list[Order] = []

    def prepare() -> bytes:
        orders.append(Order(Path(directory), step, keep, _number(metric), mode))
        if ranks.rank == 0:
            _prepare_folder(orders[0])
            content.append(Content(model, parts, extra))
            if asynchronous:
                content[0].freeze(_pool)
        given = [name for name, part in [("model", model), *parts.items(), ("sampler", sampler)] if part is not None]
        return tree.pack(_own(orders[0], given, sampler), _CALL)

    everyone = [tree.unpack(answer) for answer in ranks.gather(prepare)]
    _compare(everyone, ranks.rank)
    job = _job(orders[0], content[0], everyone) if ranks.rank == 0 else None
    handle = Handle(step, job)
    if not asynchronous:
        return handle.wait()
    _remember(handle)
    return handle


def finish_pending() -> None:
    """Wait for an asynchronous save that is under way. Collective; raises its error on every rank."""
    if (handle := _pending.get(_key())) is not None:
        handle.wait()


def continue_run(folder: Path, run: str) -> None:
    """Note that saves of this process into a folder continue a run that is there."""
    _runs[os.path.realpath(folder)] = run


def _number(metric: Any) -> float | None:
    return None if metric is None else float(metric)


def _own(order: Order, given: list[str], sampler: Any) -> dict[str, Any]:
    """What each rank says of itself."""
    return {
        "step": order.step, "given": given, "metric": order.metric, "mode": order.mode,
        "seed": seed.recorded(), "random": random_state.capture(),
        "sampler": None if sampler is None else state_of(sampler, "sampler"),
    }  # fmt: skip


def _compare(everyone: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Raise MisuseError, on every rank, if ranks have called with different arguments."""
    for what in ("step", "given", "mode"):
        told = [own[what] for own in everyone]
        other = next((peer for peer, value in enumerate(told) if value != told[0]), None)
        if other is not None:
            raise MisuseError(
                f"{_CALL} with {what}={told[0]!r} on rank 0 and {told[other]!r} on rank {other}; nothing was saved",
                "the same arguments on every rank", rank,
            )  # fmt: skip
    seeds = [own["seed"] for own in everyone]
    if rank != 0 or len(seeds) == 1 or seeds[0] is None:
        return
    if any(other is not None and other["value"] != seeds[0]["value"] for other in seeds):
        values = [None if other is None else other["value"] for other in seeds]
        warnings.warn(f"phalanx.seed had {values} on ranks 0, 1, ...: give all the same, streams part by themselves",
                      stacklevel=4)  # fmt: skip
    elif seeds[0]["per_rank"] and not seeds[0]["split"]:
        warnings.warn("no model has been wrapped since phalanx.seed(...), so that all ranks still draw the same "
                      "random numbers: call it before DistributedDataParallel(...)", stacklevel=4)  # fmt: skip


def _prepare_folder(order: Order) -> None:
    """See that the folder can be written to; begin a run of its own there, unless one is continued."""
    try:
        disk.prepare(order.folder)
    except OSError as error:
        raise disk.failure(order.folder, order.step, error) from error
    real = os.path.realpath(order.folder)
    if real in _runs:
        return
    _runs[real] = uuid.uuid4().hex[:12]
    others = disk.entries(order.folder)
    if others:
        warnings.warn(f"{order.folder} has checkpoints of another run, the last {others[0].path.name}, which this run "
                      "has not loaded: they are left alone, and those of this run count as newer",
                      stacklevel=5)  # fmt: skip


def _job(order: Order, content: Content, everyone: Sequence[Mapping[str, Any]]) -> Job:
    """Begin to write, on rank 0."""
    states = [own["sampler"] for own in everyone]
    alike = len({tree.pack(state, "sampler") for state in states}) == 1
    content.add("sampler", states[:1] if alike else states)
    content.add("random", [own["random"] for own in everyone])
    metrics = [own["metric"] for own in everyone]
    draft = Manifest(
        step=order.step,
        serial=0,
        run=_runs[os.path.realpath(order.folder)],
        world_size=len(everyone),
        holds=(*everyone[0]["given"], "extra", "random"),
        seed=everyone[0]["seed"],
        metric=None if order.mode is None else sum(metrics) / len(metrics),
        mode=order.mode,
    )
    folder, files = order.folder, content.files()
    return Job(lambda: str(disk.write(folder, draft, files, order.keep)).encode(), f"phalanx-save-{order.step}")


# -- saves under way -----------------------------------------------------------------------------------


class _Hooks:
    """Whether the hook at shutdown, which stays for good, is there."""

    registered = False


def _key() -> Any:
    return dist.group.WORLD if dist.is_initialized() else Pool


def _remember(handle: Handle) -> None:
    _pending[_key()] = handle
    if not _Hooks.registered:
        world.before_shutdown(_finish_all)
        _Hooks.registered = True
    atexit.unregister(_at_exit)  # so that it runs before the hooks of what a failure is told to
    atexit.register(_at_exit, os.getpid())


def _forget(handle: Handle) -> None:
    for key in [key for key, other in _pending.items() if other is handle]:
        del _pending[key]


def _finish_all() -> None:
    """Before the groups are closed: see every save to its end, and raise if one has failed."""
    if (handle := _pending.get(_key())) is not None:
        handle.finish()
    _pool.clear()


def _at_exit(owner: int) -> None:
    """At exit: a program whose last checkpoint is lost does not end with 0."""
    if os.getpid() != owner:
        return
    for handle in list(_pending.values()):
        try:
            handle.finish()
        except Exception as error:  # noqa: BLE001 (the end of the program: told as the interpreter tells)
            sys.excepthook(type(error), error, error.__traceback__)
            atexit._run_exitfuncs()  # the hooks that are left; this one is done
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
