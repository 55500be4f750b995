"""Work of rank 0 alone or first: order, errors, death, time-outs; the logger and the progress display."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import CollectiveTimeoutError, MisuseError, PeerFailedError, PeerLostError
from phalanx.group import rank_zero_block
from phalanx.observe import progress as progress_module
from phalanx.observe.logging import get_logger
from phalanx.observe.progress import progress
from phalanx.testing import Ending, WorldError, run
from phalanx.train.rank_zero import _Process, _stat, rank_zero_first, rank_zero_only

# The helpers work with any backend, and gloo has none of our own checks to help them.
THREADS = {"over": "threads", "backend": "gloo"}
PROCESSES = {"over": "processes", "backend": "gloo"}


# --- rank_zero_first -------------------------------------------------------------------------------


@pytest.mark.parametrize("bed", [THREADS, PROCESSES], ids=["threads", "processes"])
def test_the_others_see_the_file_that_rank_zero_took_its_time_to_write(bed: dict, tmp_path: Path) -> None:
    file = tmp_path / "data"

    def program(rank: int) -> tuple[str, str]:
        with rank_zero_first():
            found = file.read_text() if file.exists() else "nothing"
            if rank == 0:
                time.sleep(0.5)
                file.write_text("prepared")
        with rank_zero_first():
            if rank == 0:
                time.sleep(0.2)
                file.with_suffix(".2").write_text("again")
            again = file.with_suffix(".2").read_text()
        return found, again

    assert run(3, program, **bed) == [("nothing", "again")] + [("prepared", "again")] * 2


def test_they_wait_longer_than_the_groups_timeout() -> None:
    def program(rank: int) -> None:
        with rank_zero_first():
            if rank == 0:
                time.sleep(2.5)

    run(2, program, **PROCESSES, group_timeout=1)


@pytest.mark.parametrize("bed", [THREADS, PROCESSES], ids=["threads", "processes"])
def test_an_error_on_rank_zero_reaches_all_with_its_text(bed: dict) -> None:
    ran: list[int] = []

    def program(rank: int) -> None:
        with rank_zero_first():
            ran.append(rank)
            if rank == 0:
                raise OSError("no space left")

    with pytest.raises(WorldError) as failed:
        run(3, program, **bed)
    errors = failed.value.errors
    assert isinstance(errors[0], OSError)
    for rank in (1, 2):
        assert isinstance(errors[rank], PeerFailedError)
        assert (errors[rank].peer, errors[rank].exception) == (0, "OSError: no space left")
        assert "raise OSError" in errors[rank].traceback
    if bed is THREADS:
        assert ran == [0]


def test_a_world_goes_on_after_a_caught_error() -> None:
    def program(rank: int) -> str:
        try:
            with rank_zero_first():
                if rank == 0:
                    raise ValueError("first try")
        except (ValueError, PeerFailedError):
            pass
        with rank_zero_first():
            return "second try"

    assert run(2, program, **THREADS) == ["second try"] * 2


def test_the_others_learn_at_once_that_rank_zero_was_killed() -> None:
    def program(rank: int) -> tuple[int, float, str]:
        began = time.monotonic()
        try:
            with rank_zero_first():
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
        except PeerLostError as error:
            return error.peer, time.monotonic() - began, str(error)

    killed, *others = run(3, program, **PROCESSES, raises=False)
    assert killed.ending is Ending.KILLED
    for outcome in others:
        peer, seconds, text = outcome.value
        assert peer == 0 and seconds < 2 and "has ended" in text


def test_the_others_learn_at_once_that_the_store_went_with_rank_zero() -> None:
    def program(rank: int, port: int) -> tuple[float, str]:
        join_with_the_store_on_rank_zero(rank, port)
        began = time.monotonic()
        try:
            with rank_zero_first():
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
        except PeerLostError as error:
            return time.monotonic() - began, str(error)

    _, other = run(2, program, free_port(), over="processes", backend=None, raises=False)
    seconds, text = other.value
    assert seconds < 2 and "rank 0 is gone" in text


def test_an_error_is_told_before_the_store_goes_with_rank_zero() -> None:
    def program(rank: int, port: int) -> str:
        join_with_the_store_on_rank_zero(rank, port)
        try:
            with rank_zero_first():
                time.sleep(0.5)
                raise OSError("no space left")
        except OSError:
            os._exit(3)
        except PeerFailedError as error:
            return error.exception

    first, other = run(2, program, free_port(), over="processes", backend=None, raises=False)
    assert (first.exitcode, other.value) == (3, "OSError: no space left")


def join_with_the_store_on_rank_zero(rank: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_process_is_gone_when_it_is_dead_or_its_number_is_anothers() -> None:
    child = subprocess.Popen(["sleep", "60"])
    state, started = _stat(child.pid)
    alive = replace(_Process.this(), pid=child.pid, started=started)
    assert state in "SRD" and not alive.is_gone()
    assert replace(alive, started="1").is_gone()
    assert not replace(alive, started="1", kernel="of another host").is_gone()
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert alive.is_gone()  # although it has not been waited for
    child.wait()
    assert alive.is_gone()


def test_a_rank_zero_that_never_comes_is_named_after_the_timeout() -> None:
    def program(rank: int) -> str:
        dist.barrier()  # rank 0 may not end while the other still connects to it
        store = dist.distributed_c10d._get_default_store()
        store.set_timeout(timedelta(seconds=0.5))
        if rank == 1:
            text = r"rank_zero_first\(\): Timed out waiting 500ms: rank 0 has not arrived"
            with pytest.raises(CollectiveTimeoutError, match=text) as late:
                with rank_zero_first():
                    pass
            return late.value.missing

    assert run(2, program, **PROCESSES) == [None, [0]]


def test_nothing_is_left_in_the_store_for_a_later_group_that_uses_it() -> None:
    def program(rank: int) -> list[bool]:
        with rank_zero_first():
            pass
        dist.barrier()
        store = dist.distributed_c10d._get_default_store()
        return [store.check([f"phalanx/rank_zero_first/1/{key}"]) for key in ("begun", "ended", "seen")]

    assert run(3, program, **THREADS) == [[False] * 3] * 3


def test_without_a_group_it_does_nothing() -> None:
    with rank_zero_first():
        assert rank_zero_block.current() is None


# --- what rank 0 may not do alone ------------------------------------------------------------------


def test_the_mark_is_set_where_only_rank_zero_runs_and_nowhere_else() -> None:
    @rank_zero_only
    def save() -> str | None:
        return rank_zero_block.current()

    def program(rank: int) -> list[str | None]:
        marks = [save(), rank_zero_block.current()]
        with rank_zero_first():
            marks.append(rank_zero_block.current())
        return [*marks, rank_zero_block.current()]

    first, second = run(2, program, **THREADS)
    assert first[0].startswith("rank_zero_only function ") and first[0].endswith("save")
    assert first[1:] == [None, "rank 0's turn in rank_zero_first()", None]
    assert second == [None] * 4


def test_the_mark_goes_when_the_block_fails() -> None:
    with pytest.raises(KeyError), rank_zero_block.entered("outer"):
        try:
            with rank_zero_block.entered("inner"):
                raise ValueError
        except ValueError:
            assert rank_zero_block.current() == "outer"
        raise KeyError
    assert rank_zero_block.current() is None


def test_rank_zero_only_runs_on_rank_zero_and_returns_none_elsewhere() -> None:
    @rank_zero_only
    def name(first: str, *, last: str) -> str:
        """Join names."""
        return f"{first} {last}"

    assert run(3, lambda rank: name("Ada", last="Lovelace"), **THREADS) == ["Ada Lovelace", None, None]
    assert (name.__name__, name.__doc__) == ("name", "Join names.")


def test_rank_zero_only_works_on_methods() -> None:
    class Tracker:
        @rank_zero_only
        def log(self, value: int) -> int:
            return value + 1

    assert run(2, lambda rank: Tracker().log(1), **THREADS) == [2, None]


def test_rank_zero_first_inside_rank_zero_only_is_refused_at_once() -> None:
    @rank_zero_only
    def prepare() -> None:
        with rank_zero_first():
            pass

    def program(rank: int) -> None:
        if rank == 0:
            text = r"rank_zero_first\(\) inside rank_zero_only function .*prepare"
            with pytest.raises(MisuseError, match=text):
                prepare()
        else:
            prepare()

    run(2, program, **THREADS)


def test_a_collective_that_rank_zero_would_be_alone_in_is_refused_at_the_call() -> None:
    @rank_zero_only
    def log() -> None:
        dist.all_reduce(torch.ones(1))

    def program(rank: int) -> str:
        if rank == 0:
            with pytest.raises(MisuseError, match=r"all_reduce.* inside rank_zero_only function .*log"):
                log()
        try:
            with rank_zero_first():
                dist.barrier()
        except (MisuseError, PeerFailedError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"

    first, second = run(2, program, over="threads", backend="phalanx")
    assert first.startswith("MisuseError") and "barrier() inside rank 0's turn in rank_zero_first()" in first
    assert second.startswith("PeerFailedError") and "rank 0 failed with MisuseError" in second


def test_rank_zero_first_may_be_nested() -> None:
    def program(rank: int) -> str:
        with rank_zero_first(), rank_zero_first():
            return "inside"

    assert run(2, program, **THREADS) == ["inside"] * 2


def test_generators_and_coroutines_cannot_be_rank_zero_only() -> None:
    async def coroutine() -> None:
        pass

    def generator() -> object:
        yield

    for fn in (coroutine, generator):
        with pytest.raises(MisuseError, match="generator or a coroutine"):
            rank_zero_only(fn)


# --- the logger ------------------------------------------------------------------------------------


def program_that_logs(rank: int, configure: Callable[[], object]) -> str:
    """Log a little, and return what came out."""
    sys.stderr = written = io.StringIO()
    logger = get_logger("digits")
    configure()
    logger.info("lonely")
    assert get_logger("digits") is logger
    get_logger("digits.child").info("%d items", 3)
    logger.warning("careful")
    return written.getvalue()


def test_rank_zero_logs_from_info_on_and_the_others_from_warning_on() -> None:
    first, second = run(2, program_that_logs, lambda: None, **PROCESSES)
    assert first.splitlines() == [
        "INFO digits: [rank 0] lonely",
        "INFO digits.child: [rank 0] 3 items",
        "WARNING digits: [rank 0] careful",
    ]
    assert second.splitlines() == ["WARNING digits: [rank 1] careful"]


def test_a_level_that_was_asked_for_holds_on_every_rank() -> None:
    _, second = run(2, program_that_logs, lambda: get_logger("digits", logging.INFO), **PROCESSES)
    assert "INFO digits: [rank 1] lonely" in second
    _, second = run(2, program_that_logs, lambda: get_logger("digits").setLevel(logging.DEBUG), **PROCESSES)
    assert "INFO digits: [rank 1] lonely" in second


def test_handlers_of_the_program_get_each_record_once_and_alone() -> None:
    configure = lambda: logging.basicConfig(format="mine: %(message)s")  # noqa: E731
    first, second = run(2, program_that_logs, configure, **PROCESSES)
    assert first.splitlines() == ["mine: [rank 0] lonely", "mine: [rank 0] 3 items", "mine: [rank 0] careful"]
    assert second.splitlines() == ["mine: [rank 1] careful"]


def test_alone_nothing_is_prefixed() -> None:
    (written,) = run(1, program_that_logs, lambda: None, **PROCESSES)
    assert written.splitlines()[0] == "INFO digits: lonely"


# --- progress --------------------------------------------------------------------------------------


def test_all_ranks_get_all_items_and_only_rank_zero_shows_any(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(rank: int) -> tuple[list[int], str]:
        progress_module._SECONDS_TO_FIRST_LINE = 0.02
        sys.stderr = written = io.StringIO()
        items = []
        for item in progress(range(5), "epoch [1]"):
            time.sleep(0.03)
            items.append(item)
        return items, written.getvalue()

    (items, shown), (others, nothing) = run(2, program, **PROCESSES)
    assert items == others == [0, 1, 2, 3, 4]
    assert nothing == ""
    lines = shown.splitlines()
    assert lines[0].startswith("epoch [1]: 1/5 (20%) in ") and lines[-1].startswith("epoch [1]: 5/5 (100%)")
    assert len(lines) < 5


def test_a_short_loop_shows_no_line(capsys: pytest.CaptureFixture) -> None:
    assert list(progress(iter("abc"))) == ["a", "b", "c"]
    assert capsys.readouterr().err == ""


def test_a_bar_per_loop_on_a_terminal_also_nested_and_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        for _ in progress(range(2), "outer"):
            for _ in progress(iter(range(3)), "inner [x]", total=3):
                pass
        with pytest.raises(ValueError):
            for _ in progress(range(2), "broken"):
                raise ValueError
        monkeypatch.undo()
    shown = b""
    with contextlib.suppress(OSError):  # which is how Linux says that the other end is closed
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    shown = shown.decode()
    for text in ("outer", "inner [x]", "broken", "3/3", "2/2", "100%"):
        assert text in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h")  # the cursor is hidden as often as shown


def test_an_item_costs_little() -> None:
    began = time.perf_counter()
    for _ in progress(range(100_000)):
        pass
    assert (time.perf_counter() - began) / 100_000 < 5e-6
