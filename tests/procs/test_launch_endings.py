"""`phalanx run` at its end: failures, signals, and nothing left behind."""

from __future__ import annotations

import re
import signal
import time

import pytest

from tests.procs.launching import ENV, MARK, Launch, gone, launch, lines_of

__all__ = ["launch"]  # the fixture


def test_the_first_failure_wins(launch: Launch) -> None:
    code = """
    from phalanx.errors import PeerLostError
    if rank == 1:
        print("before")
        time.sleep(0.3)
        raise ValueError("bad batch")
    if rank == 0:  # a victim that ends before the one that it blames
        time.sleep(0.1)
        raise PeerLostError(peer=1, rank=0, call="step")
    def step():
        time.sleep(60)
    step()
    """
    began = time.monotonic()
    done = launch.run(code, "-n", "3")
    assert time.monotonic() - began < 5
    assert done.returncode == 1
    assert "[rank 0] phalanx.errors.PeerLostError: [rank 0] rank 1 is gone" in done.stderr
    report = done.stderr[done.stderr.index("phalanx: rank 1 failed first: ValueError: bad batch") :]
    assert "rank 0: phalanx.errors.PeerLostError: [rank 0] rank 1 is gone" in report
    assert "rank 2: stopped by the launcher (SIGTERM); it was in step (" in report
    assert report.index("Traceback of rank 1:") > report.index("rank 2:")
    assert done.stderr.endswith("ValueError: bad batch\n")
    assert "[rank 1] before" in done.stdout
    assert "bootstrap" not in done.stderr


def test_the_exit_code_is_the_failing_ranks(launch: Launch) -> None:
    assert launch.run("sys.exit(40 + rank) if rank == 1 else time.sleep(60)", "-n", "2").returncode == 41
    killed = launch.run("os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(60)", "-n", "2")
    assert killed.returncode == 137
    assert "rank 1 failed first: killed by SIGKILL (signal 9)" in killed.stderr
    crashed = launch.run("import ctypes; ctypes.string_at(0) if rank == 0 else time.sleep(60)", "-n", "2")
    assert crashed.returncode == 139
    assert "killed by SIGSEGV" in crashed.stderr and "Fatal Python error" in crashed.stderr


def test_a_rank_that_hangs_after_its_error_is_still_the_first(launch: Launch) -> None:
    code = """
    import threading
    threading.Thread(target=time.sleep, args=(60,)).start()  # the interpreter waits for it
    if rank == 0:
        raise ValueError("early")
    time.sleep(60)
    """
    done = launch.run(code, "-n", "2", "--grace", "1")
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: early\n")


def test_a_rank_may_end_well_before_the_others(launch: Launch) -> None:
    done = launch.run("time.sleep(0.5 * rank); print('done')", "-n", "2")
    assert done.returncode == 0
    assert lines_of(done.stdout, 0) == lines_of(done.stdout, 1) == ["done"]


def test_sigterm_then_sigkill_after_the_grace_time(launch: Launch) -> None:
    code = """
    signal.signal(signal.SIGTERM, lambda *_: print("asked"))
    if rank == 0:
        time.sleep(0.3)
        sys.exit(3)
    while True:
        time.sleep(1)
    """
    began = time.monotonic()
    done = launch.run(code, "-n", "2", "--grace", "0.5")
    assert 1.5 < time.monotonic() - began < 6
    assert done.returncode == 3
    assert lines_of(done.stdout, 1) == ["asked"]
    assert "rank 1: stopped by the launcher (SIGKILL)" in done.stderr


def test_a_stopped_rank_is_ended_too(launch: Launch) -> None:
    code = MARK + "time.sleep(0.5); sys.exit(3) if rank == 0 else os.kill(os.getpid(), signal.SIGSTOP)"
    done = launch.run(code, "-n", "2", "--grace", "20")  # not by SIGKILL: SIGTERM reaches it
    assert done.returncode == 3 and "rank 1: stopped by the launcher (SIGTERM)" in done.stderr
    assert gone(launch.pids("pid-*", 2), 1)


@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_are_passed_on_once(launch: Launch, signum: int, exit_code: int) -> None:
    code = f"""
    times = []
    signal.signal({int(signum)}, lambda *_: times.append(1))
    {MARK}
    while not times:
        time.sleep(0.05)
    time.sleep(0.3)
    print(f"got {{len(times)}}")
    """.replace(MARK, MARK.strip())
    process = launch.start(code, "-n", "2")
    launch.pids("pid-*", 2)
    process.send_signal(signum)
    out, err = process.communicate(timeout=10)
    assert process.returncode == exit_code, err
    assert lines_of(out, 0) == lines_of(out, 1) == ["got 1"]
    assert re.search(rf"stopped by {signal.Signals(signum).name} after [\d.]+ s \(exit code {exit_code}\)\n$", err)


def test_a_second_interrupt_kills_at_once(launch: Launch) -> None:
    process = launch.start("signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + MARK + "time.sleep(60)", "-n", "2")
    pids = launch.pids("pid-*", 2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=3) == 130
    assert gone(pids, 1)


def test_user_signals_are_passed_on_without_ending_the_run(launch: Launch) -> None:
    code = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\n" + MARK + "time.sleep(60)"
    process = launch.start(code, "-n", "2")
    launch.pids("pid-*", 2)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=5) == 0


CHILDREN = """
import subprocess
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", stubborn])
open(f"child-{rank}", "w").write(str(child.pid))
"""


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)"])
def test_children_of_ranks_end_with_them(launch: Launch, end: str) -> None:
    launch.run(CHILDREN + "time.sleep(0.3)\n" + end, "-n", "2")
    assert gone(launch.pids("child-*", 2), 0.5)


def test_ranks_and_their_children_die_with_the_launcher(launch: Launch) -> None:
    (launch.folder / "tmp").mkdir()
    env = {**ENV, "TMPDIR": str(launch.folder / "tmp")}
    process = launch.start(CHILDREN + MARK + "time.sleep(60)", "-n", "2", env=env)
    pids = launch.pids("pid-*", 2) + launch.pids("child-*", 2)
    process.kill()
    assert gone(pids, 2)
    until = time.monotonic() + 2
    while list((launch.folder / "tmp").iterdir()):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_nothing_is_left_in_the_temporary_folder(launch: Launch) -> None:
    (launch.folder / "tmp").mkdir()
    launch.run("sys.exit(rank)", "-n", "2", env={**ENV, "TMPDIR": str(launch.folder / "tmp")})
    assert not list((launch.folder / "tmp").iterdir())
