"""Files that several processes share: one folder per run, and locks that hold across unrelated launches.

A lock is the kernel's own (`flock`, through the filelock library): when its holder ends, however it ends, it is
free. The lock file itself stays behind, and means nothing without a living holder.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from phalanx.errors import MisuseError
from phalanx.group import world
from phalanx.train.exchange import from_rank_zero

_SAY_AFTER = 10.0  # seconds of waiting for a lock
_LOOK_EVERY = 0.05
_log = logging.getLogger("phalanx")


class _Held(threading.local):
    def __init__(self) -> None:
        self.paths: set[Path] = set()


_held = _Held()


@contextmanager
def file_lock(path: str | os.PathLike[str], timeout: float | None = None) -> Iterator[None]:
    """Let one process at a time into the block, among all that lock the same path.

        with phalanx.file_lock("data/digits"):
            if not Path("data/digits").exists():
                prepare("data/digits")

    `path` is what is to be protected and need not exist; the lock is the file `path` + ".lock" beside it, in a
    folder that is made if need be. It holds between threads, ranks, launches and, on file systems with locks,
    hosts. A process that dies loses it at once. `timeout` is in seconds, and None waits for ever, saying so.

    Not collective. Raises TimeoutError, which says who holds the lock, and MisuseError where the same thread
    holds it already.
    """
    lock_file = Path(f"{Path(path)}.lock").absolute()
    if lock_file in _held.paths:
        raise MisuseError(
            f"phalanx.file_lock({str(path)!r}) inside itself would wait for itself for ever",
            "one block around both",
            world.rank(),
        )
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(lock_file)
    _acquire(lock, lock_file, timeout)
    _held.paths.add(lock_file)
    try:
        yield
    finally:
        _held.paths.discard(lock_file)
        lock.release()


def _acquire(lock: FileLock, lock_file: Path, timeout: float | None) -> None:
    try:
        lock.acquire(timeout=_SAY_AFTER if timeout is None else timeout, poll_interval=_LOOK_EVERY)
    except Timeout:
        holder = _holder(lock_file)
        if timeout is not None:
            raise TimeoutError(
                f"phalanx.file_lock(..., timeout={timeout:g}): {lock_file} is held by {holder}"
            ) from None
        _log.warning("waiting for the lock %s, which is held by %s", lock_file, holder)
        lock.acquire(timeout=-1, poll_interval=_LOOK_EVERY)


def _holder(lock_file: Path) -> str:
    """Say who holds the lock, as the kernel tells it; another host's or container's process stays unknown."""
    with suppress(OSError):
        status = lock_file.stat()
        place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if "FLOCK" in words and place in words and "->" not in words:
                return f"process {words[words.index(place) - 1]} of this host"
    return "a process that is not known here"


def run_folder(root: str | os.PathLike[str] = "runs", name: str | None = None, resume: bool = False) -> Path:
    """Make a new folder for this run and return its absolute path, the same on every rank.

    It is `root`/`name`, or `name`-2, `name`-3 and so on where that is taken; without a name the date and time.
    Two launches in the same instant get two folders. With resume=True it is the newest folder of that name, if
    there is one: the one with the highest number.

    Collective: every rank, same order. Only rank 0's arguments count and only rank 0 touches the disk; if it
    cannot, the others raise PeerFailedError.
    """
    if resume and name is None:
        raise MisuseError("phalanx.run_folder(resume=True) without a name", 'name="digits"', world.rank())

    def make() -> str:
        where = Path(root).absolute()
        where.mkdir(parents=True, exist_ok=True)
        wanted = datetime.now().strftime("%Y-%m-%d_%H-%M-%S") if name is None else name
        if os.sep in wanted or wanted in ("", ".", ".."):
            raise MisuseError(f"phalanx.run_folder(name={name!r}), which is no name of a folder", 'name="digits"', 0)
        newest = _newest(where, wanted) if resume else None
        return str(newest or _new(where, wanted))

    return Path(from_rank_zero("phalanx.run_folder()", make))


def _new(where: Path, name: str) -> Path:
    """Make a folder that was not there; mkdir fails for all but one of those who try the same name."""
    folder, number = where / name, 1
    while True:
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1
            folder = where / f"{name}-{number}"


def _newest(where: Path, name: str) -> Path | None:
    pattern = re.compile(re.escape(name) + r"(?:-(\d+))?")
    found = [(match, path) for path in where.iterdir() if (match := pattern.fullmatch(path.name)) and path.is_dir()]
    return max((int(match[1] or 1), path) for match, path in found)[1] if found else None
