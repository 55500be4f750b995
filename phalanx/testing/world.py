"""Run a function on N ranks, over threads or over processes, and get each rank's result or all the errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from phalanx.errors import MisuseError
from phalanx.testing.outcome import Outcome, values
from phalanx.testing.process_world import run_processes
from phalanx.testing.settings import Settings
from phalanx.testing.thread_world import run_threads

_WORLDS = {"threads": run_threads, "processes": run_processes}


def run(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    over: str = "threads",
    timeout: float = 30,
    backend: str | None = "phalanx",
    raises: bool = True,
    group_timeout: float | None = None,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `fn(rank, *args)` on `n` ranks of a new torch.distributed world; return their values by rank.

    `over="threads"` starts in a millisecond and shares all that threads share (the default random generator:
    see `seeded` and `generator`). `over="processes"` runs real processes, which may be killed; `fn`, `args`
    and the results are pickled, functions without an importable name included. A script that calls it needs
    `if __name__ == "__main__":`, as with multiprocessing.

    The default process group is there when `fn` begins, made by `init_process_group(backend)` with a
    timeout of `group_timeout` (a little more than `timeout`), and is closed when `fn` has returned; with
    `backend=None` that is left to `fn`. Processes also find a launcher's variables in their environment,
    and those of `env`.

    If ranks fail, raises one `WorldError`, whose text has each one's traceback, the first in time on top. The
    ranks that are left get a few seconds to notice. A rank that runs after `timeout` seconds has failed, and
    the text shows where it hangs. With `raises=False`, returns every rank's `Outcome` instead, and the ranks
    that are left have until `timeout` to end.
    """
    if over not in _WORLDS:
        raise MisuseError(f"phalanx.testing.run over {over!r}", 'over="threads" or over="processes"')
    grace = min(_GRACE, timeout) if raises else timeout
    settings = Settings(n, backend, timeout, grace, group_timeout, dict(env or {}))
    outcomes: list[Outcome] = _WORLDS[over](fn, args, settings)
    return values(outcomes) if raises else outcomes


_GRACE = 5.0
"""Seconds that ranks get to notice that another one has failed."""
