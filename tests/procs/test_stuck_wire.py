"""A rank that is stopped while the data of a collective is on the wire of another backend; waits with a timeout."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import CollectiveTimeoutError, PeerFailedError
from phalanx.status.answer import Doing, Status
from phalanx.status.report import Report
from phalanx.testing import run


class LetsGo(logging.Handler):
    """Writes down what is reported, and lets the stopped rank go on."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.texts = folder, []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        os.kill(int((self.folder / "stopped").read_text()), signal.SIGCONT)


def reduce_over_gloo(rank: int, folder: Path) -> tuple[float, list[str]]:
    group = dist.new_group(pg_options="gloo")
    handler = LetsGo(folder)
    logging.getLogger("phalanx").addHandler(handler)
    tensor = torch.ones(5000)
    if rank == 1:
        inner = group.transport._group
        send = inner.allreduce

        class Stops:
            """Gloo's group; the rank is stopped when its data should go."""

            def __getattr__(self, name: str) -> object:
                return getattr(inner, name)

            def allreduce(self, *arguments: object) -> object:
                (folder / "stopped").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
                return send(*arguments)

        group.transport._group = Stops()
    dist.all_reduce(tensor, group=group)
    dist.barrier()
    return tensor[0].item(), handler.texts


def test_a_rank_stopped_while_data_is_on_the_wire_is_named(tmp_path: Path) -> None:
    values = run(3, reduce_over_gloo, tmp_path, over="processes", env={"PHALANX_SLOW_AFTER": "0.5"})
    assert [value for value, _ in values] == [3.0] * 3
    assert not values[1][1] and sum(bool(texts) for _, texts in values) == 1, "one rank reports"
    text = next(texts for _, texts in values if texts)[0]
    assert re.match(r"phalanx: rank 1 is late: rank [02] has waited .* in all_reduce\(5000 x float32, op=SUM\)", text)
    assert "with its data on the way over gloo" in text
    assert re.search(r"  rank 1  +is stopped by a signal", text)


def stopped_for_good(rank: int, folder: Path) -> tuple[float, str]:
    group = dist.new_group(pg_options="gloo", timeout=timedelta(seconds=2))
    dist.all_reduce(torch.ones(5000), group=group)
    if rank == 1:
        (folder / "stopped").write_text(str(os.getpid()))
        inner, group.transport._group = group.transport._group, None  # so that it goes no further than its tickets
        with contextlib.suppress(AttributeError):
            dist.all_reduce(torch.ones(5000), group=group)
        group.transport._group = inner
        os.kill(os.getpid(), signal.SIGSTOP)
        return 0.0, ""
    began = time.monotonic()
    with pytest.raises((CollectiveTimeoutError, PeerFailedError)) as caught:
        dist.all_reduce(torch.ones(5000), group=group)
    taken = time.monotonic() - began
    (folder / str(rank)).touch()
    if rank == 0:
        while not (folder / "2").exists():
            time.sleep(0.01)
        os.kill(int((folder / "stopped").read_text()), signal.SIGCONT)
    return taken, str(caught.value)


def test_a_rank_that_stays_stopped_is_an_error_after_one_timeout(tmp_path: Path) -> None:
    values = run(3, stopped_for_good, tmp_path, over="processes")
    for taken, text in (values[0], values[2]):
        assert 1.5 < taken < 6, text
        assert re.search(r"  rank 1  +is stopped by a signal", text)
    # The later of the two may find the other one gone on already.
    assert any("Timed out waiting 2000ms: rank 1 has not arrived" in text for _, text in values)


def test_a_wait_with_a_timeout_says_who_is_late(tmp_path: Path) -> None:
    def program(rank: int) -> tuple[list[int], str] | None:
        if rank == 1:
            until = time.monotonic() + 20
            while not (tmp_path / "raised").exists() and time.monotonic() < until:
                time.sleep(0.01)
        work = dist.all_reduce(torch.ones(5000), async_op=True)
        if rank == 1:
            work.wait()
            return None
        with pytest.raises(CollectiveTimeoutError) as caught:
            work.wait(timedelta(seconds=0.2))
        (tmp_path / "raised").touch()
        work.wait()
        return caught.value.missing, str(caught.value)

    missing, text = run(2, program, over="processes")[0]
    assert missing == [1]
    assert "Timed out waiting 200ms: rank 1 has not arrived" in text
    assert re.search(r"phalanx: rank 1 is late: rank 0 has waited .* in all_reduce\(5000 x float32", text)


def test_where_all_wait_for_data_the_network_is_the_usual_cause() -> None:
    call = "all_reduce(), with its data on the way over gloo"
    waits = [Status(rank, "h", rank, doing=(Doing(call, 12.0, True, (1 - rank,), "g", 5),)) for rank in range(2)]
    text = Report(waits, waiter=0).text()
    assert "ranks 0-1 wait for each other" in text and "Usual cause: the network between the hosts is slow" in text
