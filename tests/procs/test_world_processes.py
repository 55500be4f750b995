"""The processes test bed itself: real processes, real deaths, and nothing left of them."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import PeerFailedError, PeerLostError
from phalanx.testing import Ending, Fault, Faults, Kind, Outcome, Point, WorldError, run


class OnlyHere(Exception):
    """An exception of this module, with an argument that pickle would not find."""

    def __init__(self, *, detail: str) -> None:
        super().__init__(f"only here: {detail}")
        self.detail = detail


def total(rank: int) -> float:
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    return tensor.item()


def processes(n: int, fn, *args, **keywords) -> list:
    return run(n, fn, *args, over="processes", **{"backend": "gloo", **keywords})


def test_values_come_back_from_processes_of_their_own():
    def program(rank: int, factor: int) -> tuple:
        return rank * factor, dist.get_rank(), dist.get_world_size(), total(rank), os.getpid()

    results = processes(3, program, 10)
    assert [r[:4] for r in results] == [(10 * rank, rank, 3, 6.0) for rank in range(3)]
    pids = {r[4] for r in results}
    assert len(pids | {os.getpid()}) == 4
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_lambdas_tensors_and_large_results_travel():
    big = torch.arange(2_000_000, dtype=torch.float32)
    first, second = processes(2, lambda rank, x: x[rank:] * 2, big)
    assert torch.equal(first, big * 2)
    assert torch.equal(second, big[1:] * 2)


def test_ranks_find_a_launchers_variables_and_those_of_the_call():
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "A_VARIABLE"]
    got = processes(2, lambda rank: [os.environ[name] for name in names], env={"A_VARIABLE": "x"})
    assert got == [[str(rank), str(rank), "2", "2", "127.0.0.1", "x"] for rank in range(2)]
    assert "A_VARIABLE" not in os.environ


def test_a_program_may_join_by_the_launchers_variables():
    def program(rank: int) -> float:
        dist.init_process_group("gloo")
        return total(rank)

    assert processes(2, program, backend=None) == [3.0, 3.0]


def test_ranks_have_one_torch_thread_each():
    assert processes(2, lambda rank: torch.get_num_threads(), backend=None) == [1, 1]


def test_the_first_failure_in_time_is_on_top_and_all_are_there():
    def program(rank: int) -> None:
        if rank == 2:
            raise OnlyHere(detail="the cause")
        dist.barrier()

    with pytest.raises(WorldError, match="3 of 3 ranks failed") as caught:
        processes(3, program)
    text = str(caught.value)
    assert list(caught.value.errors)[0] == 2
    assert sorted(caught.value.errors) == [0, 1, 2]
    assert text.index("only here: the cause") < min(text.index("rank 0 "), text.index("rank 1 "))
    assert 'raise OnlyHere(detail="the cause")' in text


def test_the_peers_of_a_rank_that_raised_are_told():
    def program(rank: int) -> None:
        if rank == 1:
            raise OnlyHere(detail="the cause")
        total(rank)

    with pytest.raises(WorldError) as caught:
        processes(2, program, backend="phalanx")
    assert list(caught.value.errors) == [1, 0]
    assert isinstance(caught.value.errors[0], PeerFailedError)
    assert "only here: the cause" in str(caught.value.errors[0])


def test_exceptions_come_back_whole_or_as_text():
    def program(rank: int) -> None:
        if rank == 0:
            raise PeerLostError(peer=1, rank=0, call="all_reduce")
        error = ValueError("cannot travel")
        error.lock = threading.Lock()
        raise error

    with pytest.raises(WorldError) as caught:
        processes(2, program, backend=None)
    assert isinstance(caught.value.errors[0], PeerLostError)
    assert caught.value.errors[0].peer == 1
    assert "ValueError: cannot travel" in caught.value.errors[1]


def test_a_result_that_cannot_travel_is_a_failure():
    with pytest.raises(WorldError, match="cannot pickle"):
        processes(1, lambda rank: threading.Lock(), backend=None)


def test_a_killed_rank_is_told_with_its_signal():
    def program(rank: int) -> int:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return rank

    with pytest.raises(WorldError, match="rank 1 was killed by a signal") as caught:
        processes(2, program)
    assert caught.value.errors == {1: "killed by SIGKILL"}


@pytest.mark.parametrize(
    ("leave", "code", "text"),
    [(os._exit, 3, "exit code 3"), (sys.exit, 4, "exit code 4"), (sys.exit, 0, "exit code 0")],
)
def test_a_rank_that_exits_has_failed(leave, code: int, text: str):
    outcomes: list[Outcome] = processes(1, lambda rank: leave(code), backend=None, raises=False)
    assert [(o.ending, o.exitcode, o.text) for o in outcomes] == [(Ending.EXITED, code, text)]


def test_outcomes_of_a_killed_rank_and_a_survivor():
    def program(rank: int) -> str:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(RuntimeError):
            for _ in range(100):
                dist.barrier()
        return "survived"

    outcomes: list[Outcome] = processes(2, program, raises=False, timeout=20)
    assert [o.ending for o in outcomes] == [Ending.RETURNED, Ending.KILLED]
    assert outcomes[0].value == "survived"
    assert outcomes[1].exitcode == -signal.SIGKILL
    assert all(0 <= o.at < 20 for o in outcomes)


def test_a_hang_is_a_failure_that_shows_where():
    def stuck(rank: int) -> None:
        while rank == 1:
            time.sleep(0.01)

    started = time.monotonic()
    with pytest.raises(WorldError, match="rank 1 was still running at the timeout") as caught:
        processes(2, stuck, backend=None, timeout=1)
    assert time.monotonic() - started < 5
    assert list(caught.value.errors) == [1]
    assert "in stuck" in caught.value.errors[1]
    assert "_run_program" not in caught.value.errors[1]


def test_a_rank_that_hangs_at_exit_has_hung():
    def program(rank: int) -> str:
        atexit.register(time.sleep, 60)
        return "done"

    with pytest.raises(WorldError, match="It returned, then its process did not end"):
        processes(1, program, backend=None, timeout=1)


def test_a_stopped_rank_is_told():
    with pytest.raises(WorldError, match="is stopped by a signal"):
        processes(1, lambda rank: os.kill(os.getpid(), signal.SIGSTOP), backend=None, timeout=1)


def test_exit_functions_and_the_last_exception_hook_run(tmp_path):
    def program(rank: int) -> None:
        def hook(kind: type, error: BaseException, trace: object) -> None:
            (tmp_path / f"hook-{rank}").write_text(str(error))

        sys.excepthook = hook
        atexit.register((tmp_path / f"exit-{rank}").touch)
        if rank == 1:
            raise ValueError("noticed")

    with pytest.raises(WorldError):
        processes(2, program, backend=None)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["exit-0", "exit-1", "hook-1"]
    assert (tmp_path / "hook-1").read_text() == "noticed"


def test_what_a_rank_has_started_ends_with_it():
    def program(rank: int) -> int:
        return subprocess.Popen(["sleep", "60"]).pid

    (pid,) = processes(1, program, backend=None)
    assert_gone(pid)


@pytest.mark.parametrize(
    ("kind", "ending", "exitcode"),
    [(Kind.KILL, Ending.KILLED, -9), (Kind.EXIT, Ending.EXITED, 5), (Kind.STOP, Ending.HUNG, None)],
)
def test_a_fault_strikes_and_is_on_record(kind: Kind, ending: Ending, exitcode: int | None, tmp_path):
    planned = Fault(rank=1, step=2, at=Point.BEFORE_REDUCE, kind=kind, exitcode=5)
    faults = Faults([planned, Fault(rank=1, step=3, at=Point.BETWEEN, kind=kind)], record=tmp_path)

    def program(rank: int) -> int:
        for step in range(4):
            faults.point(rank, step, Point.BEFORE_REDUCE)
            faults.point(rank, step, Point.BETWEEN)
        return step

    outcomes: list[Outcome] = processes(2, program, backend=None, raises=False, timeout=2)
    assert outcomes[0].value == 3
    assert (outcomes[1].ending, outcomes[1].exitcode) == (ending, exitcode)
    assert faults.fired() == [planned]


def test_ranks_die_with_the_test(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, time\n"
        "from phalanx.testing import run\n"
        "def program(rank, folder):\n"
        "    pathlib.Path(folder, str(os.getpid())).touch()\n"
        "    time.sleep(60)\n"
        "if __name__ == '__main__':\n"
        f"    run(2, program, {str(tmp_path / 'pids')!r}, over='processes', backend=None, timeout=60)\n"
    )
    folder = tmp_path / "pids"
    folder.mkdir()
    root = str(Path(__file__).parents[2])
    test = subprocess.Popen([sys.executable, str(script)], cwd=root, env={**os.environ, "PYTHONPATH": root})
    try:
        until = time.monotonic() + 40
        while len(list(folder.iterdir())) < 2:
            assert time.monotonic() < until and test.poll() is None, "the ranks have not started"
            time.sleep(0.05)
    finally:
        test.kill()
        test.wait()
    for path in folder.iterdir():
        assert_gone(int(path.name))


def assert_gone(pid: int, seconds: float = 3.0) -> None:
    """Wait for a process to end; one that nobody has collected yet has ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} lives on")


def test_a_world_that_is_made_again_over_gloo() -> None:
    """The launcher's store still has the addresses of the last one."""

    def program(rank: int) -> list[float]:
        found = []
        for _ in range(3):
            if not dist.is_initialized():
                dist.init_process_group("phalanx")
            total = torch.full((5,), rank + 1.0)
            dist.all_reduce(total)
            found.append(total[0].item())
            dist.destroy_process_group()
        return found

    assert run(2, program, over="processes", env={"PHALANX_TRANSPORT": "gloo"}) == [[3.0] * 3] * 2
