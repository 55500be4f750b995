"""Locks of processes that die, and local rank 0 of each host first."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import phalanx
from phalanx.errors import CollectiveTimeoutError, MisuseError, PeerFailedError
from phalanx.testing import Ending, run
from phalanx.train import files


def wait_for(path: Path) -> None:
    until = time.monotonic() + 20
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"no {path}")
        time.sleep(0.01)


def test_a_lock_of_another_process_holds_and_its_death_frees_it(tmp_path: Path) -> None:
    def program(rank: int) -> list[str] | None:
        data = tmp_path / "data"
        if rank == 0:
            with phalanx.file_lock(data):
                (tmp_path / "held").write_text(str(os.getpid()))
                wait_for(tmp_path / "tried")
                if os.fork() == 0:  # a child that outlives its parent, as a DataLoader's worker may
                    wait_for(tmp_path / "got")
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGKILL)
        wait_for(tmp_path / "held")
        said = []
        try:
            with phalanx.file_lock(data, timeout=0.1):
                said.append("both are in")
        except TimeoutError as error:
            said.append(str(error))
        files._SAY_AFTER = 0.1
        logging.getLogger("phalanx").addFilter(lambda record: said.append(record.getMessage()) or False)
        (tmp_path / "tried").touch()
        with phalanx.file_lock(data):
            (tmp_path / "got").touch()
        return said

    killed, other = run(2, program, over="processes", backend=None, raises=False)
    assert killed.ending is Ending.KILLED
    holder = f"process {(tmp_path / 'held').read_text()} of this host"
    assert other.value[0] == f"phalanx.file_lock(..., timeout=0.1): {tmp_path / 'data.lock'} is held by {holder}"
    assert other.value[1:] in ([], [f"waiting for the lock {tmp_path / 'data.lock'}, which is held by {holder}"])


def on_host(rank: int, host: int, local_rank: int, local_size: int) -> None:
    """Be where a launcher would have put this rank, when all have met."""
    dist.barrier()
    os.environ.update(GROUP_RANK=str(host), LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(local_size))


def test_per_host_local_rank_zero_of_each_is_first(tmp_path: Path) -> None:
    """Five ranks, dealt out to two hosts in turn; host 1 must not wait for host 0, nor see its error."""

    def program(rank: int) -> tuple[list[str], str]:
        on_host(rank, rank % 2, rank // 2, 3 if rank % 2 == 0 else 2)
        disk = tmp_path / f"host {rank % 2}"
        with phalanx.rank_zero_first(per="host"):
            if rank < 2:
                disk.mkdir()
                time.sleep(0.2)
                (disk / "data").touch()
            found = [path.name for path in disk.iterdir()]
        if rank == 1:
            (tmp_path / "host 1 is through").touch()
        try:
            with phalanx.rank_zero_first(per="host"):
                if rank == 0:
                    wait_for(tmp_path / "host 1 is through")
                    raise OSError("no space left")
        except (OSError, PeerFailedError) as error:
            return found, f"{type(error).__name__} {getattr(error, 'peer', '')}"
        return found, ""

    results = run(5, program, over="processes", backend="gloo")
    assert [found for found, _ in results] == [["data"]] * 5
    assert [text for _, text in results] == ["OSError ", "", "PeerFailedError 0", "", "PeerFailedError 0"]


def test_per_host_the_error_names_the_first_of_the_host() -> None:
    def program(rank: int) -> str:
        on_host(rank, rank % 2, rank // 2, 2)
        try:
            with phalanx.rank_zero_first(per="host"):
                if rank < 2:
                    raise OSError("no space left")
        except PeerFailedError as error:
            return f"{error.peer} {error.call}"
        except OSError:
            return ""
        return "nothing was raised"

    assert run(4, program, over="processes", backend="gloo") == [
        "", "", '0 rank_zero_first(per="host")', '1 rank_zero_first(per="host")',
    ]  # fmt: skip


def test_per_host_without_a_launcher_is_the_world() -> None:
    def program(rank: int, order: list[int]) -> list[int]:
        with phalanx.rank_zero_first(per="host"):
            order.append(rank)
        return order

    assert run(3, program, [])[0][0] == 0


def test_there_is_no_other_company() -> None:
    with pytest.raises(MisuseError, match="per='node'"), phalanx.rank_zero_first(per="node"):
        pass


def test_a_first_of_the_host_that_never_comes_is_named() -> None:
    def program(rank: int) -> list[int] | None:
        on_host(rank, rank // 2, rank % 2, 2)
        if rank == 2:
            return None
        try:
            with phalanx.rank_zero_first(per="host"):
                return None
        except CollectiveTimeoutError as late:
            return late.missing

    assert run(4, program, over="processes", backend="gloo", group_timeout=2) == [None, None, None, [2]]
