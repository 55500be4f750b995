"""A folder of checkpoints on disk: write one whole or not at all, read one and know that it is whole.

    FOLDER/step-000000120/manifest.json           and the files that it names
    FOLDER/.step-000000120-PID.tmp/               being written, or left by a process that was killed

A checkpoint is written under a temporary name in the same folder; its files and then the temporary folder
are flushed to the disk (fsync), it is renamed, and FOLDER is flushed. So at any moment, also after a loss of
power, what has a `step-` name is whole. Removing goes the other way: renamed first, then deleted.

One process writes at a time: it holds a POSIX lock on `.lock`, which the kernel takes back when the process
ends. Who holds it may delete what others have left. Where a file system has no locks, nothing is deleted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from phalanx.checkpoint.failure import CheckpointError
from phalanx.checkpoint.manifest import NAME, File, Manifest

Pieces = Callable[[], Iterable["bytes | memoryview"]]
"""Yields the bytes of a file, once."""

_SLICE = 8 << 20
_LOCK_SECONDS = 60.0
_LOCK_LOOK = 0.05
_NAMED = re.compile(r"step-(\d+)(?:\.(\d+))?")
_LEFT_OVER = re.compile(r"\.(?:step|gone)-.*\.tmp")
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True)
class Entry:
    """A checkpoint that was found; `fault` says what is wrong with it, and is empty if nothing is known to be."""

    path: Path
    manifest: Manifest | None
    fault: str = ""


def entries(folder: Path) -> list[Entry]:
    """Return the checkpoints of a folder, the last saved first; those without a good manifest come first of all.

    Files are looked at by name and size only; `read` looks at every byte.
    """
    try:
        paths = [path for path in folder.iterdir() if _NAMED.fullmatch(path.name)]
    except FileNotFoundError:
        return []
    found = [look_at(path) for path in paths]
    return sorted(found, key=_order, reverse=True)


def read(entry: Entry, name: str) -> torch.Tensor:
    """Return the bytes of one file of a checkpoint as a tensor. Raises ValueError, in words, if it is damaged."""
    if entry.manifest is None:
        raise ValueError(f"{entry.path} has no good manifest")
    expected = entry.manifest.files[name]
    flat = read_file(entry.path / name, expected.size)
    if flat.numel() != expected.size:
        raise ValueError(f"{name} has {flat.numel()} bytes and should have {expected.size}")
    if hashlib.sha256(flat.numpy()).hexdigest() != expected.sha256:
        raise ValueError(f"{name} does not have its checksum")
    return flat


def read_file(path: Path, most: int) -> torch.Tensor:
    """Return the first `most` bytes of a file as a tensor, fewer if there are not so many."""
    flat = torch.empty(most, dtype=torch.uint8)
    view, at = memoryview(flat.numpy()), 0
    with open(path, "rb", buffering=0) as file:
        while at < most and (count := file.readinto(view[at : at + _SLICE])):
            at += count
    return flat[:at]


def step_of(path: Path) -> int | None:
    """The step that a checkpoint's name says, or None."""
    match = _NAMED.fullmatch(path.name)
    return None if match is None else int(match.group(1))


def prepare(folder: Path) -> None:
    """Make the folder if need be, and see that something can be made in it. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".step-probe-{os.getpid()}.tmp"
    probe.mkdir()
    probe.rmdir()


def write(folder: Path, draft: Manifest, files: Mapping[str, Pieces], keep: int | None) -> Path:
    """Write one checkpoint, and when it is there remove those that `keep` leaves no room for.

    `draft` is without serial and files. Raises CheckpointError, and leaves the folder as it was.
    """
    try:
        with _alone(folder) as locked:
            if locked:
                _remove_left_overs(folder)
            known = entries(folder)
            path = _write(folder, replace(draft, serial=1 + max(map(_serial, known), default=0)), files)
            if keep is not None:
                _prune(folder, keep)
            return path
    except OSError as error:
        raise failure(folder, draft.step, error) from error


def failure(folder: Path, step: int, error: OSError) -> CheckpointError:
    """Say what a disk's error means for a save."""
    newest = next((entry for entry in entries_or_none(folder) if not entry.fault), None)
    state = f"the one before, {newest.path}, is untouched" if newest else f"{folder} has no other"
    return CheckpointError(
        f"the checkpoint of step {step} could not be written to {folder}: {error.strerror or error} "
        f"({errno.errorcode.get(error.errno or 0, 'no code')}); {state}",
        "make room or choose another folder, and save again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "",
    )


def entries_or_none(folder: Path) -> list[Entry]:
    """As `entries`, and none where the folder cannot be read."""
    try:
        return entries(folder)
    except OSError:
        return []


def best_of(found: Iterable[Entry], run: str | None = None) -> Entry | None:
    """Return the checkpoint with the best metric, by the mode of the one saved last; of one run, if given."""
    good = [(e, e.manifest) for e in found if e.manifest is not None]
    listed = [(e, manifest) for e, manifest in good if run is None or manifest.run == run]
    mode = next((manifest.mode for _, manifest in listed if manifest.mode is not None), None)
    best: tuple[Entry, Manifest] | None = None
    for entry, manifest in listed:
        if manifest.mode == mode and manifest.better_than(None if best is None else best[1]):
            best = entry, manifest
    return None if best is None else best[0]


def look_at(path: Path) -> Entry:
    """Look at one checkpoint: its manifest, and the sizes of its files."""
    try:
        manifest = Manifest.read((path / NAME).read_text(encoding="utf-8"))
        for name, file in manifest.files.items():
            size = (path / name).stat().st_size
            if size != file.size:
                return Entry(path, manifest, f"{name} has {size} bytes and should have {file.size}")
    except FileNotFoundError as error:
        return Entry(path, None, f"{Path(error.filename).name} is missing")
    except (OSError, ValueError) as error:
        return Entry(path, None, str(error))
    return Entry(path, manifest)


def _serial(entry: Entry) -> int:
    return 0 if entry.manifest is None else entry.manifest.serial


def _order(entry: Entry) -> tuple[bool, int, str]:
    return entry.manifest is None, _serial(entry), entry.path.name


def _write(folder: Path, draft: Manifest, files: Mapping[str, Pieces]) -> Path:
    temporary = folder / f".step-{draft.step:09d}-{os.getpid()}.tmp"
    try:
        temporary.mkdir()
        written = {name: _write_file(temporary / name, pieces()) for name, pieces in files.items()}
        text = replace(draft, files=written).text()
        _write_file(temporary / NAME, [text.encode()])
        _flush(temporary)
        path = _free_name(folder, draft.step)
        temporary.rename(path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _flush(folder)
    return path


def _write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> File:
    digest, size = hashlib.sha256(), 0
    with open(path, "xb", buffering=0) as file:
        for piece in pieces:
            view, at = memoryview(piece), 0
            while at < len(view):
                count = file.write(view[at : at + _SLICE])
                digest.update(view[at : at + count])
                at += count
            size += len(view)
        os.fsync(file.fileno())
    return File(size, digest.hexdigest())


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free_name(folder: Path, step: int) -> Path:
    """A step that is saved a second time gets a new name: there is no moment without the first."""
    path, again = folder / f"step-{step:09d}", 1
    while path.exists():
        again += 1
        path = folder / f"step-{step:09d}.{again}"
    return path


def _prune(folder: Path, keep: int) -> None:
    """Remove all but the last `keep` and the best of the run that was saved last."""
    known = [(entry, entry.manifest) for entry in entries(folder) if entry.manifest is not None]
    run = known[0][1].run
    best = best_of([entry for entry, _ in known], run)
    same = [entry for entry, manifest in known if manifest.run == run]
    for entry in same[keep:]:
        if best is None or entry.path != best.path:
            gone = folder / f".gone-{entry.path.name}-{os.getpid()}.tmp"
            try:
                entry.path.rename(gone)
                shutil.rmtree(gone)
            except OSError as error:
                warnings.warn(f"{entry.path} is not needed any more and cannot be removed: {error}", stacklevel=2)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Be the only process that writes to the folder; False where the file system cannot promise that."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR, 0o666)
    try:
        yield _lock(descriptor, folder)
    finally:
        os.close(descriptor)  # which gives the lock back


def _lock(descriptor: int, folder: Path) -> bool:
    until = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return False
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
        if time.monotonic() > until:
            raise CheckpointError(
                f"another process has been writing to {folder} for {_LOCK_SECONDS:.0f} s",
                "one folder for each run; see whether an older run is still alive",
            )
        time.sleep(_LOCK_LOOK)


def _remove_left_overs(folder: Path) -> None:
    for path in folder.iterdir():
        if _LEFT_OVER.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)
