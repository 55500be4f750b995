"""An error that another rank had: recorded as such, and passed over when the launcher says who failed first."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from phalanx.checkpoint import CheckpointError
from phalanx.errors import MisuseError, PeerLostError, RankMismatchError
from phalanx.launch import bootstrap
from phalanx.launch.verdict import Ending, Record, first_failure, left_early


def recorded(folder: Path, error: BaseException) -> Record:
    bootstrap._write(str(folder), 1, error, 1, os.getpid())
    record = Record.read(bootstrap.record_path(str(folder), 1))
    assert record is not None
    return record


def ending(rank: int, time: float, blames: int | None = None) -> Ending:
    return Ending(rank, 10 + rank, 1, 9.0, record=Record(time, "E", "bad", "", blames, code=1))


@pytest.mark.parametrize(
    ("error", "blames", "names"),
    [
        (PeerLostError(2, 1, "step"), 2, [2]),
        (CheckpointError("no space", rank=1, peer=0), 0, []),
        (MisuseError("no step", rank=1, peer=0), 0, []),
        (CheckpointError("no space", rank=0), None, []),
        (RankMismatchError({0: "a", 1: "b"}, 1), None, [0, 1]),
        (ValueError("bad"), None, []),
    ],
)
def test_whom_an_error_came_from_is_recorded(
    tmp_path: Path, error: Exception, blames: int | None, names: list[int]
) -> None:
    wrapper = RuntimeError("the training failed")
    wrapper.__cause__ = error
    for each in (error, wrapper, pickle.loads(pickle.dumps(error))):
        record = recorded(tmp_path, each)
        assert (record.blames, list(record.names)) == (blames, names)


def test_who_was_told_of_an_error_has_not_failed_first() -> None:
    told, own = ending(1, 1.0, blames=0), ending(0, 1.5)
    assert first_failure([own, told]) is own


def test_who_has_caught_its_error_and_ended_well_has_not_left_early() -> None:
    told, caught = ending(1, 1.0, blames=0), Ending(0, 10, 0, ended=1.1)
    assert first_failure([caught, told]) is told
    assert left_early([caught, told]) == []


def test_of_ranks_that_blame_each_other_the_earliest_failed_first() -> None:
    """Rank 0 has caught its error, and failed when rank 1, which was told of it, had failed."""
    told, lost = ending(1, 1.0, blames=0), ending(0, 1.5, blames=1)
    assert first_failure([lost, told]) is told
    assert first_failure([lost, told, ending(2, 0.5, blames=0)]) is told
