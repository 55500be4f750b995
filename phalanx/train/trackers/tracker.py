"""One interface to experiment trackers: what all ranks measure, averaged, written by rank 0, always finished.

`log` is one exchange of small records (see exchange.py and averaging.py), after which rank 0 hands the means to
its writers. The other ranks have no writers, import no tracker's library and open no file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from phalanx.errors import MisuseError
from phalanx.group import world
from phalanx.train.exchange import from_rank_zero, tell_all
from phalanx.train.trackers import averaging
from phalanx.train.trackers.finishing import Finishable, exits
from phalanx.train.trackers.writer import Ending, Run, Writer

Kind = str | Callable[[Run], Writer]

_HOMES = {"csv": "csv_file", "tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
_LIBRARIES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
_LOG = "tracker.log()"


def tracker(
    *kinds: Kind,
    dir: str | os.PathLike[str],
    config: Mapping[str, Any] | None = None,
    purge_step: int | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Tracker:
    """Open a tracker: "csv", "tensorboard", "wandb", "mlflow", or several of them at once.

        tracker = phalanx.tracker("csv", "tensorboard", dir="runs/digits", config={"lr": 0.1})
        tracker.log({"loss": loss, "accuracy": right / len(batch)}, step, n=len(batch))
        tracker.finish()

    Only rank 0 makes `dir` (its own counts) and opens anything; it is finished by `finish`, `phalanx.shutdown`,
    the end of a `with` block, and every exit that lets Python run: the end of the script, an uncaught
    exception, sys.exit, SIGTERM (where the program has no handler of its own). `config` is recorded with the
    run. `purge_step` is for a run resumed in the same `dir`: what csv and TensorBoard have at this step and
    later is dropped. `options["wandb"]` are keyword arguments of wandb.init, `options["tensorboard"]` of
    SummaryWriter, `options["mlflow"]` may be tracking_uri, experiment, run_name, tags. A kind may also be a
    function that makes a writer, an object with `write(values, step)` and `close(ending)`.

    Collective: every rank, same order. Raises MisuseError for an unknown kind or a library that is not
    installed; what rank 0 raises is PeerFailedError on the others.
    """
    unknown = [kind for kind in (*kinds, *(options or {})) if not callable(kind) and kind not in _HOMES]
    if unknown or not kinds:
        raise MisuseError(
            f"phalanx.tracker of kind {unknown[0]!r}" if unknown else "phalanx.tracker() without a kind",
            f'phalanx.tracker("csv", dir=...), or of {", ".join(map(repr, list(_HOMES)[1:]))}',
            world.rank(),
        )
    run = Run(Path(dir), dict(config or {}), purge_step)
    made = Tracker(run.folder)

    def open_writers() -> str:
        run.folder.mkdir(parents=True, exist_ok=True)
        exits.add(made)  # before the first is open: the next may take its time, and be interrupted
        try:
            for kind in kinds:
                made.add(_writer(kind, run, (options or {}).get(str(kind), {})))
        except BaseException:
            made.finish(Ending.FAILED.value)
            raise
        return str(run.folder)

    made.dir = Path(from_rank_zero(f"phalanx.tracker({', '.join(map(_name, kinds))})", open_writers))
    return made


class Tracker(Finishable):
    """Logs the metrics of a run; made by `phalanx.tracker`. `dir` is rank 0's folder, on every rank."""

    def __init__(self, dir: Path) -> None:
        super().__init__()
        self.dir = dir
        self.group = dist.group.WORLD if dist.is_initialized() else None
        self._writers: list[Writer] = []
        self._ending: Ending | None = None

    def add(self, writer: Writer) -> None:
        """Write to `writer` too, and close it in the end. For rank 0 only."""
        self._writers.append(writer)

    def log(
        self, values: Mapping[str, Any], step: int, n: float | Mapping[str, float] = 1, average: bool = True
    ) -> dict[str, float]:
        """Write the means of `values` over all ranks, and return them on every rank.

        Collective: every rank calls it equally often, with the same step. Keys may differ between ranks, and
        `values` may be empty: each key's mean is over the ranks that gave it. Values are numbers, or tensors of
        one element. `n` is the number of items behind this rank's values, or behind each by its key; a rank
        with 0 contributes nothing, whatever its values. A rank that has left join() takes no part.

        With average=False it is not collective: rank 0's values are written as they are, and it does nothing
        on the other ranks but return theirs. That is the form for code that only rank 0 runs.

        Raises MisuseError, on every rank, if one rank's values cannot be logged, RankMismatchError for
        different steps, PeerLostError and PeerFailedError as every collective.
        """
        if self._ending is not None:
            raise MisuseError(
                "tracker.log(...) after the tracker was finished", "finish() after the last log", world.rank()
            )
        report = averaging.report(values, step, n)
        if average:
            records = tell_all(_LOG, report.record())
            reports = [None if record is None else averaging.Report(**record) for record in records]
        else:
            reports = [report]
        means = averaging.mean(reports, world.rank())
        with self.uninterrupted():
            for writer in self._writers:
                writer.write(means, report.step)
        return means

    def finish(self, ending: str = "finished") -> None:
        """Write how the run has ended ("finished", "failed", "killed") and close everything. Not collective.

        Does nothing on ranks other than 0 and for a tracker that is finished. If one of several writers fails
        to close, its error is raised when the others are closed.
        """
        given = Ending(ending)
        if self._ending is not None:
            return
        errors = []
        with self.uninterrupted():
            self._ending = given
            for writer in self._writers:
                try:
                    writer.close(given)
                except Exception as error:
                    errors.append(error)
            exits.remove(self)
        if errors:
            raise errors[0]

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, SystemExit):
            self.finish()
        else:
            self.finish("killed" if issubclass(kind, KeyboardInterrupt) else "failed")


def _writer(kind: Kind, run: Run, options: Mapping[str, Any]) -> Writer:
    if callable(kind):
        return kind(run)
    try:
        module = import_module(f"phalanx.train.trackers.{_HOMES[kind]}")
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        raise MisuseError(
            f"phalanx.tracker({kind!r}) needs {_LIBRARIES.get(kind, kind)}, which cannot be imported here "
            f"({error}{f', missing: {missing}' if missing else ''})",
            f"pip install 'phalanx-ddp[{kind}]'",
            world.rank(),
        ) from error
    writer: Writer = module.make(Run(run.folder, run.config, run.purge_step, options))
    return writer


def _name(kind: Kind) -> str:
    return repr(kind) if isinstance(kind, str) else "a writer"
