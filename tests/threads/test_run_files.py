"""Run folders that all ranks agree on, and locks between threads."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import phalanx
from phalanx.errors import MisuseError, PeerFailedError
from phalanx.testing import WorldError, run
from phalanx.train import files


def test_all_ranks_get_the_folder_that_rank_zero_made(tmp_path: Path) -> None:
    def program(rank: int) -> list[Path]:
        root = tmp_path / f"of rank {rank}"
        return [phalanx.run_folder(root, "digits"), phalanx.run_folder(root, "digits"), phalanx.run_folder(root)]

    first, *others = run(3, program)
    assert others == [first, first]
    assert [path.parent for path in first] == [tmp_path / "of rank 0"] * 3
    assert [path.name for path in first[:2]] == ["digits", "digits-2"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", first[2].name)
    assert all(path.is_dir() for path in first)
    assert [path.name for path in tmp_path.iterdir()] == ["of rank 0"]


def test_launches_in_the_same_instant_get_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        together = threading.Barrier(8)
        made = list(pool.map(lambda _: [together.wait(), files._new(tmp_path, "digits")][1], range(8)))
    assert sorted(path.name for path in made) == ["digits", *(f"digits-{i}" for i in range(2, 9))]


def test_a_resumed_run_finds_the_newest_of_its_name(tmp_path: Path) -> None:
    for name in ("digits", "digits-2", "digits-10", "digits-x", "other", "other-99"):
        (tmp_path / name).mkdir()
    (tmp_path / "digits-11").write_text("no folder")
    assert phalanx.run_folder(tmp_path, "digits", resume=True) == tmp_path / "digits-10"
    assert phalanx.run_folder(tmp_path, "new", resume=True) == tmp_path / "new"
    assert phalanx.run_folder(tmp_path, "new", resume=True) == tmp_path / "new"
    with pytest.raises(MisuseError, match="without a name"):
        phalanx.run_folder(tmp_path, resume=True)


@pytest.mark.parametrize("name", ["a/b", "..", ""])
def test_names_that_are_no_folders(name: str, tmp_path: Path) -> None:
    with pytest.raises(MisuseError, match="no name of a folder"):
        phalanx.run_folder(tmp_path, name)


def test_the_others_are_told_that_rank_zero_cannot_make_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WorldError) as failed:
        run(2, lambda rank: phalanx.run_folder(tmp_path / "file", "digits"))
    errors = failed.value.errors
    assert isinstance(errors[0], OSError)
    assert isinstance(errors[1], PeerFailedError) and errors[1].call == "phalanx.run_folder()"


def test_a_lock_lets_one_thread_in_at_a_time(tmp_path: Path) -> None:
    inside: list[int] = []
    most: list[int] = []

    def work(number: int) -> None:
        for _ in range(3):
            with phalanx.file_lock(tmp_path / "deep" / "data"):
                inside.append(number)
                time.sleep(0.005)
                most.append(len(inside))
                inside.remove(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 12
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["data.lock"]


def test_a_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError), phalanx.file_lock(tmp_path / "data"):
        raise ValueError
    with phalanx.file_lock(tmp_path / "data", timeout=0):
        pass


def test_a_lock_inside_itself_is_refused_and_another_is_not(tmp_path: Path) -> None:
    with phalanx.file_lock(tmp_path / "data"):
        with phalanx.file_lock(tmp_path / "other"):
            pass
        with pytest.raises(MisuseError, match="inside itself"), phalanx.file_lock(tmp_path / "data"):
            pass
