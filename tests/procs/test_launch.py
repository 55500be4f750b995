"""`phalanx run` with real processes: variables, arguments, output. Most ranks do not import torch."""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import socket
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from phalanx.launch import machine
from tests.procs.launching import ENV, MARK, Launch, launch, lines_of

__all__ = ["launch"]  # the fixture


def test_help_is_quick_and_imports_no_torch() -> None:
    seconds = []
    for _ in range(5):
        process = subprocess.Popen([sys.executable, "-m", "phalanx", "--help"], env=ENV, stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        seconds.append(used.ru_utime + used.ru_stime)  # of this process alone, whatever else runs here
    assert min(seconds) < 0.2
    check = "import sys, phalanx.launch.run, phalanx.launch.spawn; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], env=ENV, check=True)


def test_the_version(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "phalanx", "--version"]
    done = subprocess.run(command, env=ENV, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"phalanx {metadata.version('phalanx-ddp')}\n"


def test_a_line_that_torch_has_marked_with_the_rank_is_marked_once(launch: Launch) -> None:
    done = launch.run(
        "r = os.environ['RANK']; print(f'[rank{r}]: one', f'[rank{r}]:[W1] two', '[rank7]: three', sep='\\n')",
        "-n",
        "2",
    )
    assert lines_of(done.stdout, 1) == ["one", "[W1] two", "[rank7]: three"]


def test_ranks_get_torchruns_variables_and_arguments(launch: Launch) -> None:
    names = (
        "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_WORLD_SIZE "
        "ROLE_NAME MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT "
        "TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_USE_AGENT_STORE OMP_NUM_THREADS PHALANX_RUN_ID"
    ).split()
    code = f"import json; print(json.dumps([{{n: os.environ[n] for n in {names}}}, sys.argv]))"
    done = launch.run(code, "-n", "2", args=["-n", "5", "--help", "--", "x y"])
    assert done.returncode == 0, done.stderr
    seen = [json.loads(lines_of(done.stdout, rank)[0]) for rank in range(2)]
    assert [v["RANK"] for v, _ in seen] == [v["LOCAL_RANK"] for v, _ in seen] == ["0", "1"]
    variables, argv = seen[1]
    assert argv == ["script.py", "-n", "5", "--help", "--", "x y"]
    assert variables["WORLD_SIZE"] == variables["LOCAL_WORLD_SIZE"] == "2"
    assert variables["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert variables["MASTER_PORT"] == seen[0][0]["MASTER_PORT"]
    assert int(variables["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)
    more = r" \(on one core\)" if machine.cores() == 1 else ""
    assert re.fullmatch(rf"phalanx: 2 ranks on 1 host \(.+\), \d+ threads? per rank{more}\n", done.stderr)


def test_threads_of_the_user_win(launch: Launch) -> None:
    code = "print(os.environ['OMP_NUM_THREADS'])"
    with_variable = {**ENV, "OMP_NUM_THREADS": "7"}
    assert lines_of(launch.run(code, "-n", "2", env=with_variable).stdout, 1) == ["7"]
    assert lines_of(launch.run(code, "-n", "2", "--threads", "3", env=with_variable).stdout, 1) == ["3"]


def test_ranks_of_a_second_host(launch: Launch) -> None:
    code = "print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')))"
    done = launch.run(code, "-n", "2", "--nnodes", "2", "--node-rank", "1", "--master-addr", "node0")
    assert lines_of(done.stdout, 3) == ["3 4 node0 29500"]
    assert "2 ranks of 4" in done.stderr and "node0:29500" in done.stderr


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["-n", "0", "script.py"], "at least 1 rank"),
        (["-n", "two", "script.py"], "-n two"),
        ([], "no script given"),
        (["absent.py"], "script not found: absent.py"),
        (["--nnodes", "2", "--master-addr", "a", "--node-rank", "2", "script.py"], "--node-rank 2"),
        (["--nnodes", "2", "script.py"], "--master-addr"),
        (["--threads", "0", "script.py"], "--threads 0"),
        (["--grace", "-1", "script.py"], "--grace -1"),
        (["--master-port", "70000", "script.py"], "--master-port 70000"),
        (["--no-such", "script.py"], "--no-such"),
        (["--log-dir", "script.py/x", "script.py"], "--log-dir script.py/x"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(launch: Launch, line: list[str], says: str) -> None:
    launch.script("")
    command = [sys.executable, "-m", "phalanx", "run", *line]
    done = subprocess.run(command, cwd=launch.folder, env=ENV, capture_output=True, text=True, timeout=10)
    assert done.returncode == 2
    assert says in done.stderr and done.stderr.count("\n") == 1


PROBE = """
import json, multiprocessing
def child(queue): queue.put([__name__, sys.argv, sys.path[0]])
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    if __spec__ is None or __spec__.name != "__main__":  # multiprocessing itself cannot spawn from a folder
        process = context.Process(target=child, args=(queue,))
        process.start()
    else:
        queue.put(None)
    main = sys.modules["__main__"]
    names = {n: repr(getattr(main, n)).split(" at 0x")[0] for n in dir(main) if n.startswith("__")}
    print(json.dumps([names, main.__dict__ is globals(), sys.argv, sys.path, queue.get()]))
    sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("how", [["script.py"], ["-m", "script"], ["package"], ["-m", "package.module"]])
def test_a_script_cannot_tell_the_launcher_from_plain_python(launch: Launch, how: list[str]) -> None:
    (launch.folder / "package").mkdir()
    for name in ("script.py", "package/__main__.py", "package/module.py", "package/__init__.py"):
        launch.script(PROBE.replace("rank", "_"), name)
    env = {**ENV, "RANK": "0"}
    plain, run = (
        subprocess.run([*start, *how, "7"], cwd=launch.folder, env=env, capture_output=True, text=True, timeout=20)
        for start in ([sys.executable, "-u"], [sys.executable, "-m", "phalanx", "run", "-n", "1"])
    )
    assert plain.returncode == run.returncode == 7
    assert json.loads(run.stdout) == json.loads(plain.stdout)


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit()", 0),
        ("sys.exit(5)", 5),
        ("sys.exit('a message')", 1),
        ("raise SystemExit(300)", 44),
        ("raise ValueError('x')", 1),
        ("raise KeyboardInterrupt", 130),
        ("os._exit(9)", 9),
        ("os.abort()", 134),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
        (
            "import atexit; atexit.register(print, 'left'); sys.excepthook = lambda *a: print('hook'); 1 / 0",
            1,
        ),
        ("def broken(: pass", 1),
    ],
)
def test_exit_codes_and_output_are_plain_pythons(launch: Launch, code: str, exit_code: int) -> None:
    run = launch.run(code, "-n", "1")
    plain = subprocess.run(
        [sys.executable, "-u", "script.py"],
        cwd=launch.folder,
        env={**ENV, "RANK": "0"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == exit_code
    assert plain.returncode % 256 == exit_code or plain.returncode == 128 - exit_code
    assert run.stdout == plain.stdout
    if "abort" not in code:  # where Python adds its stacks
        assert plain.stderr in run.stderr
    assert ("phalanx: rank 0 failed:" in run.stderr) == (exit_code != 0)


def test_long_lines_are_not_cut_or_mixed(launch: Launch) -> None:
    code = """
    for i in range(40):
        print(f"{rank}.{i}." + "x" * (50_000 if i % 4 == 0 else 10) + ".")
        print(f"{rank}.{i}.error", file=sys.stderr)
    """
    done = launch.run(code, "-n", "3", stderr=subprocess.STDOUT)
    seen = done.stdout.splitlines()[1:]
    for rank in range(3):
        lines = [f"{rank}.{i}." + "x" * (50_000 if i % 4 == 0 else 10) + "." for i in range(40)]
        assert [line for line in lines_of(done.stdout, rank) if not line.endswith("error")] == lines
    assert len(seen) == 3 * 80


def test_a_partial_line_comes_through_while_the_rank_waits(launch: Launch) -> None:
    process = launch.start("print('50%', end='\\r'); time.sleep(60)", "-n", "2")
    text, until = "", time.monotonic() + 5
    while "50%" not in text:
        assert time.monotonic() < until
        if select.select([process.stdout], [], [], 0.1)[0]:
            text += os.read(process.stdout.fileno(), 1000).decode()


def read_terminal(fd: int, until: Callable[[str], bool], seconds: float = 10.0) -> str:
    text, deadline = "", time.monotonic() + seconds
    while not until(text):
        assert time.monotonic() < deadline, text
        if select.select([fd], [], [], 0.1)[0]:
            try:
                data = os.read(fd, 1000)
            except OSError:
                break
            text += data.decode()
    return text


def test_on_a_terminal_rank_0_has_one_and_ctrl_c_comes_once(launch: Launch) -> None:
    code = MARK + textwrap.dedent("""
    got = []
    signal.signal(signal.SIGINT, lambda *_: got.append(1))
    print("terminal" if sys.stdout.isatty() and sys.stderr.isatty() else "pipe")
    while not got:
        time.sleep(0.05)
    time.sleep(0.3)
    print("got", len(got))
    """)

    def own_the_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    ours, theirs = os.openpty()
    try:
        process = launch.start(code, "-n", "2", stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=own_the_terminal)
        os.close(theirs)
        text = read_terminal(ours, lambda text: "terminal" in text and "pipe" in text)
        os.write(ours, b"\x03")
        text += read_terminal(ours, lambda text: "exit code" in text)
        assert process.wait(timeout=5) == 130
    finally:
        os.close(ours)
    assert "[rank 0] terminal" in text and "[rank 1] pipe" in text
    assert text.count("got 1") == 2


def test_log_dir_holds_a_log_per_rank_and_the_report(launch: Launch) -> None:
    code = "print('out', rank); print('err', rank, file=sys.stderr)\n"
    code += "if rank: raise ValueError('bad')\ntime.sleep(60)"
    done = launch.run(code, "-n", "2", "--log-dir", "logs/deep")
    assert done.returncode == 1 and "[rank 0] out 0" in done.stdout and "logs/deep/rank-1.log" in done.stderr
    logs = launch.folder / "logs" / "deep"
    assert sorted((logs / "rank-0.log").read_text().splitlines()) == ["err 0", "out 0"]
    assert "ValueError: bad" in (logs / "rank-1.log").read_text()
    report = json.loads((logs / "report.json").read_text())
    assert (report["exit_code"], report["first_failure"], report["world_size"]) == (1, 1, 2)
    states = [(rank["state"], rank["exit_code"], rank["exception"]) for rank in report["ranks"]]
    assert states == [("stopped", 143, None), ("failed", 1, "ValueError")]
    assert "raise ValueError('bad')" in report["ranks"][1]["traceback"]


def test_one_rank_with_a_log_has_no_prefix(launch: Launch) -> None:
    done = launch.run("print('plain')", "-n", "1", "--log-dir", "logs")
    assert done.stdout == "plain\n"
    assert json.loads((launch.folder / "logs" / "report.json").read_text())["exit_code"] == 0


def test_only_rank_0_reads_the_input(launch: Launch) -> None:
    done = launch.start("print(repr(sys.stdin.read()))", "-n", "2", stdin=subprocess.PIPE)
    out, _ = done.communicate("typed", timeout=10)
    assert lines_of(out, 0) == ["'typed'"] and lines_of(out, 1) == ["''"]


def test_a_port_in_use_is_said_before_anything_starts(launch: Launch) -> None:

    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        done = launch.run("print('started')", "-n", "2", "--master-port", str(port))
    assert done.returncode == 2 and f"port {port} is in use" in done.stderr and "started" not in done.stdout


def test_a_broken_pipe_reaches_the_ranks(launch: Launch) -> None:
    process = launch.start("while True: print('y'); time.sleep(0.01)", "-n", "2")
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    assert process.wait(timeout=10) == 1
    assert "BrokenPipeError" in process.stderr.read()


def test_two_launches_at_once_meet_in_ports_of_their_own(launch: Launch) -> None:
    code = """
    import torch.distributed as dist
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, wait_for_workers=False)
    run = os.environ["PHALANX_RUN_ID"]
    store.set(f"run {rank}", run)
    assert store.get(f"run {1 - rank}").decode() == run
    print("met", port)
    store.add("left", 1)
    while rank == 0 and store.add("left", 0) < 2:
        time.sleep(0.01)
    """
    processes = [launch.start(code, "-n", "2") for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    ports = {lines_of(out, rank)[0] for out, _ in outputs for rank in range(2)}
    assert len(ports) == 2
