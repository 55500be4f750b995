"""What `phalanx run` says and writes about runs that went wrong in unusual ways."""

from __future__ import annotations

import functools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import textwrap

import pytest

from tests.procs.launching import ENV, MARK, Launch, launch, lines_of

__all__ = ["launch"]  # the fixture

EARLY = """
import phalanx, torch
if rank == 1 and {before}:
    {end}
phalanx.init()
torch.distributed.all_reduce(torch.ones(4))
if rank == 1:
    {end}
torch.distributed.all_reduce(torch.ones(4))
"""


@pytest.mark.parametrize(
    ("before", "end"),
    [(True, "sys.exit(0)"), (False, "sys.exit(0)"), pytest.param(False, "os._exit(0)", marks=pytest.mark.full)],
)
def test_a_rank_that_leaves_early_is_named(launch: Launch, before: bool, end: str) -> None:
    done = launch.run(EARLY.format(before=before, end=end), "-n", "2", "--report", "report.json")
    page = done.stderr[done.stderr.index("phalanx: rank 1 left early: exit code 0 while rank 0 still needed it") :]
    assert done.returncode == 1
    assert re.match(r"  rank 0: exit code 1 after .* s, pid \d+ on ", page.splitlines()[1])
    assert "  rank 0: phalanx.errors." in page and "Traceback of rank 0:" in page
    assert "stopped by the launcher" not in page
    report = json.loads((launch.folder / "report.json").read_text())
    assert (report["left_early"], report["first_failure"], report["exit_code"]) == ([1], 0, 1)


def test_ranks_that_end_long_before_the_others_are_mentioned(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    run = "import sys; from phalanx.launch import run; run._SAY_ENDED_AFTER = 0.2; sys.exit(run.main(sys.argv[1:]))"
    script = launch.script("time.sleep(1.2 if rank == 0 else 0)")
    command = [sys.executable, "-c", run, "-n", "3", script]
    done = subprocess.run(command, cwd=launch.folder, env=ENV, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0
    said = [line for line in done.stderr.splitlines() if "still running" in line]
    assert said and said[-1].endswith("still running: rank 0")
    assert sorted(rank for line in said for rank in "12" if rank in line.split(";")[0].split("rank")[1]) == ["1", "2"]


def test_a_usage_error_of_the_script_ends_with_its_own_words(launch: Launch) -> None:
    code = "import argparse; p = argparse.ArgumentParser(prog='train'); p.add_argument('--lr', required=True)"
    done = launch.run(f"{code}; p.parse_args()", "-n", "2")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.endswith("  train: error: the following arguments are required: --lr\n")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise ValueError('x' * 2_000_000)", "ValueError: xxx"),
        ("raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})()", "Odd: <its text cannot be formatted>"),
        ("raise type('Odd', (Exception,), {'__module__': None})('gone')", "Odd: gone"),
        ("raise type('Odd', (Exception,), {'__reduce__': None, 'f': lambda: 0})('closure')", "Odd: closure"),
        ("raise ValueError('\\udcff')", "ValueError: \\udcff"),
        ("sys.exit('no data\\nat all')", "sys.exit: no data\n"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt\n"),
        ("sys.stdout.close(); sys.stderr.close(); raise ValueError('closed')", "ValueError: closed"),
        ("sys.stderr.write('last words'); sys.stderr.flush(); os._exit(7)", "exit code 7, without an exception"),
        ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV (signal 11)"),
        ("raise ExceptionGroup('many', [ValueError(1)])" if sys.version_info >= (3, 11) else "raise OSError", ""),
    ],
)
def test_odd_ends_of_all_ranks_at_once(launch: Launch, code: str, says: str) -> None:
    done = launch.run(code, "-n", "2", "--report", "report.json")
    assert done.returncode in (1, 7, 130, 139)
    assert (launch.folder / "report.json").stat().st_size < 300_000
    page = done.stderr[done.stderr.index("phalanx: rank ") :]
    first = page.splitlines()[0]
    assert says.strip() in first and "failed first" in first
    assert len(page) < 20_000
    if "_exit" in code:
        assert page.endswith("  last words\n")
    if "ctypes" in code:
        assert "Last output" in page and "bootstrap" not in page


def test_a_process_forked_from_a_rank_speaks_for_nobody(launch: Launch) -> None:
    code = """
    child = os.fork()
    if child == 0:
        raise ValueError("of the child alone")
    os.waitpid(child, 0)
    time.sleep(0.5)
    print("done")
    """
    done = launch.run(code, "-n", "2")
    assert done.returncode == 0, done.stderr
    assert lines_of(done.stdout, 0) == lines_of(done.stdout, 1) == ["done"]


def test_logs_are_complete_whatever_is_written(launch: Launch) -> None:
    code = """
    os.write(1, b"latin \\xe9\\n" * 3 + b"\\0zero\\n")
    os.write(2, b"no end")
    """
    done = launch.run(code, "-n", "2", "--log-dir", "logs", text=False)
    assert done.returncode == 0
    log = (launch.folder / "logs" / "rank-1.log").read_bytes()
    assert sorted(log.splitlines()) == [b"\0zero", *[b"latin \xe9"] * 3, b"no end"]


def test_too_few_open_files_for_the_ranks(launch: Launch) -> None:
    few = functools.partial(resource.setrlimit, resource.RLIMIT_NOFILE, (20, 20))
    done = launch.run("print(rank)", "-n", "8", preexec_fn=few)
    assert done.returncode == 2 and "cannot start 8 ranks" in done.stderr and "ulimit -n" in done.stderr


def test_a_log_that_another_run_is_writing_is_left_alone(launch: Launch) -> None:
    first = launch.start("print('mine')\n" + MARK + "time.sleep(60)", "-n", "2", "--log-dir", "logs")
    launch.pids("pid-*", 2)
    second = launch.run("print('other')", "-n", "2", "--log-dir", "logs")
    assert second.returncode == 2
    assert "another run is writing it (give this one a --log-dir of its own)" in second.stderr
    assert "logs/rank-0.log" in second.stderr
    first.terminate()
    assert first.wait(timeout=10) == 143
    assert (launch.folder / "logs" / "rank-0.log").read_text() == "mine\n"


def test_a_full_disk_stops_the_log_and_not_the_run(launch: Launch) -> None:
    (launch.folder / "logs").mkdir()
    (launch.folder / "logs" / "rank-1.log").symlink_to("/dev/full")
    (launch.folder / "logs" / "report.json").mkdir()  # what is in the report's way
    done = launch.run("for i in range(3): print('line', i)\nsys.exit(5)", "-n", "2", "--log-dir", "logs")
    assert done.returncode == 5
    assert lines_of(done.stdout, 1) == ["line 0", "line 1", "line 2"]
    assert done.stderr.count("nothing is written to logs/rank-1.log: No space left on device") == 1
    assert done.stderr.count("the report logs/report.json could not be written") == 1
    assert (launch.folder / "logs" / "rank-0.log").read_text().count("line") == 3


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("logs", "Is a directory"), ("/proc/report.json", "No such file"), ("x" * 250, "File name too long"),
        ("absent/report.json", "there is no such folder"), ("", "Is a directory"),
    ],
)  # fmt: skip
def test_a_report_that_cannot_be_written_is_said_before_anything_starts(launch: Launch, path: str, why: str) -> None:
    (launch.folder / "logs").mkdir()
    done = launch.run("print('started')", "-n", "2", "--report", path)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"phalanx run: error: --report {path}: {why}") and done.stderr.count("\n") == 1
    assert sorted(os.listdir(launch.folder)) == ["logs", "script.py"]


def test_a_run_that_does_not_start_leaves_no_report_and_the_old_one_alone(launch: Launch) -> None:
    (launch.folder / "old.json").write_text("old")
    for path in ("old.json", "new.json"):
        done = launch.run("", "-n", "2", "--threads", "0", "--report", path)
        assert done.returncode == 2 and "--threads 0" in done.stderr
    assert sorted(os.listdir(launch.folder)) == ["old.json", "script.py"]
    assert (launch.folder / "old.json").read_text() == "old"


@pytest.mark.parametrize(
    ("closed", "out", "err"),
    [("<&-", True, True), (">&-", False, True), ("2>&-", True, False), (">&- 2>&-", False, False)],
)
def test_the_launchers_own_streams_may_be_closed(launch: Launch, closed: str, out: bool, err: bool) -> None:
    script = launch.script("print('out'); sys.exit(4)")
    command = f"{sys.executable} -m phalanx run -n 2 --report report.json {script} {closed}"
    done = subprocess.run(command, shell=True, cwd=launch.folder, env=ENV, capture_output=True, text=True, timeout=20)
    assert done.returncode == 4
    assert ("[rank 1] out" in done.stdout, "failed first" in done.stderr) == (out, err)
    assert json.loads((launch.folder / "report.json").read_text())["exit_code"] == 4


def test_a_temporary_folder_that_is_missing_is_an_error_of_one_line(launch: Launch) -> None:
    lines = "import tempfile, sys; from phalanx.launch import run; tempfile.tempdir = '/absent'; "
    command = [sys.executable, "-c", lines + "sys.exit(run.main(sys.argv[1:]))", "-n", "2", launch.script("")]
    done = subprocess.run(command, cwd=launch.folder, env=ENV, capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert "no folder for the run's own files" in done.stderr and done.stderr.count("\n") == 1


def _can_unshare() -> bool:
    command = ["unshare", "--user", "--map-root-user", "--net", "true"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(not _can_unshare(), reason="needs a network namespace")
@pytest.mark.parametrize("how", ["run", "spawn"])
def test_without_loopback_the_start_fails_at_once_and_says_why(launch: Launch, how: str) -> None:
    code = """
    import phalanx
    try:
        phalanx.spawn(print, nprocs=2)
    except phalanx.MisuseError as error:
        sys.exit(str(error))
    """
    start = [sys.executable] if how == "spawn" else [sys.executable, "-m", "phalanx", "run", "-n", "2"]
    script = launch.script(textwrap.dedent(code))
    command = ["unshare", "--user", "--map-root-user", "--net", *start, script]
    env = {**ENV, "RANK": "0"}
    done = subprocess.run(command, cwd=launch.folder, env=env, capture_output=True, text=True, timeout=20)
    assert done.returncode == (1 if how == "spawn" else 2)
    assert "the loopback interface is down" in done.stderr and "ip link set lo up" in done.stderr


def test_a_folder_without_a_main_is_no_script(launch: Launch) -> None:
    os.mkdir(launch.folder / "package")
    command = [sys.executable, "-m", "phalanx", "run", "package"]
    done = subprocess.run(command, cwd=launch.folder, env=ENV, capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and "there is no package/__main__.py" in done.stderr
