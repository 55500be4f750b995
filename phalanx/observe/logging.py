"""A logger that says which rank is speaking, and lets rank 0 do most of the talking.

Everything is added to Python's own logger of that name, by one filter and one handler, so that a program's
own `logging` set-up stays in charge: the filter marks records wherever they go, and the handler writes only
as long as the program has set up none itself. What rank this is, is looked up at each record, so that a
logger made before `phalanx.init()` speaks correctly after it.
"""

from __future__ import annotations

import logging
import sys

from phalanx.group import world

_DEFAULT_LEVEL = logging.INFO
_OTHERS_LEVEL = logging.WARNING


class _RankFilter(logging.Filter):
    """Put the rank before each message; hold back what ranks other than 0 say below a warning."""

    every_rank = False  # a level was asked for, and holds on all ranks

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger = logger

    def filter(self, record: logging.LogRecord) -> bool:
        """Decide on a record and mark it."""
        if world.world_size() == 1:
            return True
        rank = world.rank()
        by_default = not self.every_rank and self._logger.level == _DEFAULT_LEVEL
        if rank != 0 and by_default and record.levelno < _OTHERS_LEVEL:
            return False
        record.msg = f"[rank {rank}] {record.msg}"
        return True


class _LastResort(logging.StreamHandler):  # type: ignore[type-arg]  # takes none at run time before 3.11
    """Write to standard error, as long as no other handler would get the record."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, unless a handler of the program's or a nearer one of ours does."""
        handlers = _handlers(logging.getLogger(record.name))
        ours = [handler for handler in handlers if isinstance(handler, _LastResort)]
        if len(ours) == len(handlers) and ours[0] is self:
            self.setStream(sys.stderr)  # which may have been replaced since, by a notebook or a test
            super().emit(record)


def get_logger(name: str = "phalanx", level: int | None = None) -> logging.Logger:
    """Return Python's logger `name`, with `[rank r]` before each message if there are several ranks.

    By default rank 0 logs from INFO on and the others from WARNING on; `level`, or a level that the program
    sets on the logger other than INFO, holds on every rank. Records go to the handlers that the program has
    set up, or else to standard error. May be called at any time and any number of times.
    """
    logger = logging.getLogger(name)
    mark = next((f for f in logger.filters if isinstance(f, _RankFilter)), None)
    if mark is None:
        mark = _RankFilter(logger)
        logger.addFilter(mark)
        logger.addHandler(_LastResort())
    if level is not None:
        logger.setLevel(level)
        mark.every_rank = True
    elif logger.level == logging.NOTSET:
        logger.setLevel(_DEFAULT_LEVEL)
    return logger


def _handlers(logger: logging.Logger) -> list[logging.Handler]:
    """Return all handlers that a record of `logger` reaches, the nearest first."""
    found: list[logging.Handler] = []
    current: logging.Logger | None = logger
    while current is not None:
        found += current.handlers
        current = current.parent if current.propagate else None
    return found
