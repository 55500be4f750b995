"""A rank of which two threads wait when another rank is killed: both hear of it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from phalanx.errors import PeerLostError
from phalanx.testing import Ending, Outcome, run


def two_wait(rank: int, folder: Path) -> float:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)
        (folder / "killed").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.barrier(group=groups[0], async_op=True)  # its thread reads from all links
    time.sleep(0.2)
    with pytest.raises(PeerLostError):
        dist.barrier(group=groups[1])
    with pytest.raises(PeerLostError):
        work.wait()
    return time.monotonic() - float((folder / "killed").read_text())


def test_the_thread_that_only_looks_on_is_told_too(tmp_path: Path) -> None:
    outcomes: list[Outcome] = run(2, two_wait, tmp_path, over="processes", raises=False)
    assert outcomes[1].ending is Ending.KILLED
    assert outcomes[0].value < 5, "seconds; without a word from the other thread it would be ten"
