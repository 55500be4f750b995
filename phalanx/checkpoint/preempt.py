"""SIGTERM as a question that all ranks answer alike: may training go on?

A scheduler, or a person, ends a run with SIGTERM and, a little later, SIGKILL; `phalanx run` passes the first
on to every rank and gives `--grace` seconds. Signals do not arrive at the same step everywhere, so a rank
that stopped by itself would leave the others waiting. The handler only takes note; the loop asks.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from phalanx.errors import MisuseError
from phalanx.group import world
from phalanx.parallel.agree import stop_if


class Stop:
    """Whether to stop. True on all ranks as soon as it is on one, and from then on."""

    def __init__(self) -> None:
        self._asked = self._agreed = False

    def __bool__(self) -> bool:
        """Ask all ranks. Collective: every rank, equally often."""
        self._agreed = self._agreed or stop_if(self._asked)
        return self._agreed

    def request(self) -> None:
        """Ask for the end from here, as a signal does. Not collective."""
        self._asked = True

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        # Nothing but a note, however often: schedulers signal ranks and launcher, which passes it on again.
        self._asked = True


@contextmanager
def preemption(signals: Sequence[int] = (signal.SIGTERM,)) -> Iterator[Stop]:
    """Turn signals that end a run into an answer for the training loop.

        with phalanx.checkpoint.preemption() as stop:
            for step, batch in enumerate(loader, start=1):
                ...
                if stop:
                    phalanx.checkpoint.save("runs/a", step=step, model=ddp, optimizer=optimizer)
                    break

    `if stop:` is collective, and costs one small exchange. Give `phalanx run --grace` more seconds than a step
    and a save take. After the block the signals mean again what they did before. Pass SIGUSR1 too where the
    scheduler warns with it. Main thread only: Python delivers signals nowhere else, so MisuseError there.
    """
    if threading.current_thread() is not threading.main_thread():
        raise MisuseError(
            "checkpoint.preemption() outside of the main thread, where Python delivers no signals",
            "the training loop in the main thread", world.rank(),
        )  # fmt: skip
    stop = Stop()
    before = {signum: signal.signal(signum, stop._on_signal) for signum in signals}
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
