"""What the tests of stuck ranks share: a place for reports, and ranks that wait until one is there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 20.0
"""How long a rank waits for a report before its test fails."""


class Reports(logging.Handler):
    """Collects what is logged to `phalanx`, with the thread that did."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.threads: list[str] = []
        self.levels: set[int] = set()
        self._news = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._news:
            self.texts.append(record.getMessage())
            self.threads.append(str(record.threadName))
            self.levels.add(record.levelno)
            self._news.notify_all()

    def wait_for(self, count: int = 1) -> None:
        """Be late until `count` reports have been made."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.texts) >= count, SECONDS), f"{len(self.texts)} reports"


@contextmanager
def reports() -> Iterator[Reports]:
    """Collect the reports that are made in the block."""
    handler, log = Reports(), logging.getLogger("phalanx")
    log.addHandler(handler)
    try:
        yield handler
    finally:
        log.removeHandler(handler)
