"""The launcher's decisions: the course of a run, who failed first, the report, and what the console shows."""

from __future__ import annotations

import io
import json
import os
import random
import re
import signal
from pathlib import Path

import pytest

from phalanx.launch import machine, options, report
from phalanx.launch.course import Course, Phase
from phalanx.launch.memory import MemoryKills
from phalanx.launch.output import Sink, Stream, Tail
from phalanx.launch.report import Outcome, innermost_call
from phalanx.launch.verdict import Ending, Record, State, first_failure, left_early, shortened


def record(
    time: float,
    exception: str = "ValueError",
    message: str = "bad",
    blames: int | None = None,
    names: tuple[int, ...] = (),
) -> Record:
    return Record(time, exception, message, f"Traceback\n{exception}: {message}", blames, code=1, names=names)


def test_course_after_a_failure() -> None:
    course = Course(grace=5.0, settle=1.0)
    assert course.tick(0.0) is None and course.deadline is None
    course.failed(10.0)
    course.failed(10.9)  # the second does not prolong it
    assert course.tick(10.9) is None
    assert course.tick(11.0) == signal.SIGTERM and course.phase is Phase.ENDING
    assert course.tick(15.9) is None
    assert course.tick(16.0) == signal.SIGKILL and course.phase is Phase.KILLED
    assert course.tick(99.0) is None and course.interrupted_by is None


def test_course_after_signals() -> None:
    course = Course(grace=5.0)
    assert course.interrupted(signal.SIGTERM, 1.0) == signal.SIGTERM
    course.failed(1.1)
    assert course.phase is Phase.ENDING
    assert course.interrupted(signal.SIGINT, 1.2) == signal.SIGKILL
    assert course.interrupted_by == signal.SIGTERM


def test_course_passes_on_an_interruption_while_it_settles() -> None:
    course = Course(grace=5.0)
    course.failed(1.0)
    assert course.interrupted(signal.SIGINT, 1.5) == signal.SIGINT


def test_the_first_failure_is_the_earliest_that_is_no_victim() -> None:
    victim = Ending(0, 10, 1, ended=1.0, record=record(0.9, "phalanx.errors.PeerLostError", blames=1))
    gloo = Ending(2, 12, 1, ended=1.1, record=record(1.0, "RuntimeError", "Connection closed by peer [::1]:1"))
    killed = Ending(1, 11, -9, ended=1.3)
    later = Ending(3, 13, 1, ended=1.4, record=record(1.35))
    assert first_failure([victim, gloo, killed, later]) is killed


def test_among_victims_the_blame_is_followed() -> None:
    endings = [Ending(rank, 10 + rank, 1, 2.0, record=record(1.0 + rank, "E", blames=rank + 1)) for rank in range(3)]
    assert first_failure(endings) is endings[2]
    circle = [Ending(rank, 10 + rank, 1, 2.0, record=record(1.0 + rank, "E", blames=1 - rank)) for rank in range(2)]
    assert first_failure(circle) is circle[0]


def test_ranks_that_the_launcher_stopped_have_not_failed() -> None:
    stopped = Ending(0, 10, -signal.SIGTERM, ended=2.0, stopped=1.0)
    on_the_way = Ending(1, 11, 1, ended=2.0, stopped=1.0, record=record(1.5, "KeyboardInterrupt"))
    hung_at_exit = Ending(2, 12, -signal.SIGKILL, ended=9.0, stopped=1.0, record=record(0.5))
    assert [e.state for e in (stopped, on_the_way, hung_at_exit)] == [
        State.STOPPED,
        State.STOPPED,
        State.FAILED,
    ]
    assert first_failure([stopped, on_the_way]) is None
    assert hung_at_exit.exit_code == 1


def test_a_rank_that_others_missed_after_its_good_end_has_left_early() -> None:
    early = Ending(1, 11, 0, ended=2.0)
    missed = Ending(0, 10, 1, ended=2.2, record=record(2.1, "RankMismatchError", names=(0, 1)))
    follower = Ending(2, 12, 1, ended=2.3, record=record(2.2, "PeerFailedError", blames=0))
    assert left_early([missed, early, follower]) == [early]
    assert first_failure([missed, early, follower]) is missed
    report = outcome([missed, early, follower])
    assert report.text().startswith("phalanx: rank 1 left early: exit code 0 while rank 0 still needed it\n")
    assert report.text().splitlines()[1] == "  rank 0: exit code 1 after 3.0 s, pid 10 on here, run r1"
    assert "  rank 0: RankMismatchError" in report.text() and "  rank 1:" not in report.text()
    assert report.exit_code == 1 and report.json()["left_early"] == [1]


def test_who_ended_well_without_being_missed_has_not_left_early() -> None:
    own = Ending(0, 10, 1, ended=3.0, record=record(2.5))
    assert left_early([own, Ending(1, 11, 0, ended=2.0)]) == []
    before = Ending(0, 10, 1, ended=1.0, record=record(0.9, "RankMismatchError", names=(0, 1)))
    assert left_early([before, Ending(1, 11, 0, ended=2.0)]) == []


def test_a_rank_stopped_after_its_last_line_has_left_early_too() -> None:
    hung = Ending(1, 11, -15, ended=4.0, stopped=3.5, finished=2.0)
    missed = Ending(0, 10, 1, ended=2.2, record=record(2.1, "PeerLostError", blames=1, names=(1,)))
    assert left_early([missed, hung]) == [hung]
    assert hung.describe() == "its script had ended well; stopped by the launcher (SIGTERM)"


def test_where_only_a_connection_closed_the_report_is_not_sure_who_left() -> None:
    gloo = Ending(0, 10, 1, ended=2.2, record=record(2.1, "RuntimeError", "Connection closed by peer [::1]:1"))
    text = outcome([gloo, Ending(1, 11, 0, ended=2.0), Ending(2, 12, 0, ended=2.0)]).text()
    assert text.startswith("phalanx: ranks 1, 2 probably left early: exit code 0 while rank 0 still needed them")


def test_summaries_are_one_short_line() -> None:
    mismatch = record(1.0, "RankMismatchError", "different calls:\n  rank 0 in a\n  rank 1 in b\nUsual cause: x")
    assert mismatch.summary == "RankMismatchError: different calls: rank 0 in a; rank 1 in b"
    assert record(1.0, "SystemExit", "3").summary == "sys.exit(3)"
    assert record(1.0, "SystemExit", "no data\nat all").summary == "sys.exit: no data"
    assert record(1.0, message="").summary == "ValueError"
    long = record(1.0, message="a" + "x" * 10_000 + "z").summary
    assert len(long) < 500 and "characters left out" in long and long.startswith("ValueError: ax") and long[-1] == "z"
    assert shortened("y" * 400) == "y" * 400


def outcome(endings: list[Ending], interrupted_by: int | None = None, kills: MemoryKills | None = None) -> Outcome:
    kills = kills or MemoryKills(0, 0)
    return Outcome("r1", "here", 4, ["train.py"], 3.0, endings, interrupted_by, kills, {1: "logs/rank-1.log"})


def test_report_ends_with_the_traceback_of_the_first_failure() -> None:
    text = outcome(
        [
            Ending(0, 10, -15, 2.0, stopped=1.9, doing="step (train.py:7)"),
            Ending(1, 11, 1, 2.0, record=record(1.0, message="no such\nbatch")),
        ]
    ).text()
    assert text.startswith("phalanx: rank 1 failed first: ValueError: no such\n")
    assert "rank 0: stopped by the launcher (SIGTERM); it was in step (train.py:7)" in text
    assert "logs/rank-1.log" in text
    assert text.endswith("Traceback of rank 1:\nTraceback\nValueError: no such\nbatch\n")


@pytest.mark.parametrize(
    ("kills", "words"),
    [
        (MemoryKills(1, 1), "in this control group (a container, or a job's share) meanwhile: probably this rank"),
        (MemoryKills(None, 2), "on this host meanwhile: probably this rank (it had 3.0 GiB in use at most)"),
        (MemoryKills(), "most often"),
        (MemoryKills(0, 0), "somebody probably sent"),
    ],
)
def test_report_recognizes_a_likely_memory_kill(kills: MemoryKills, words: str) -> None:
    report = outcome([Ending(0, 10, -9, 2.0, peak_memory=3 << 30)], kills=kills)
    assert words in report.text() and "SIGKILL" in report.text()
    assert report.exit_code == 137
    assert report.json()["likely_out_of_memory"] is bool(kills.any)


def test_a_sigkill_of_the_launchers_own_is_no_memory_kill() -> None:
    endings = [Ending(0, 10, 1, 2.0, record=record(1.0)), Ending(1, 11, -9, 3.0, stopped=2.9)]
    report = outcome(endings, kills=MemoryKills(1, 1))
    assert "memory" not in report.text() and not report.json()["likely_out_of_memory"]


def test_report_shows_last_output_where_there_is_no_traceback() -> None:
    crashed = Ending(1, 11, -11, 2.0, last_output=["terminate called", f'  File "{report.__file__}", line 1 in run'])
    text = outcome([Ending(0, 10, -15, 3.0, stopped=2.9), crashed]).text()
    assert text.endswith("Last output of rank 1:\n  terminate called\n")
    assert "killed by SIGSEGV (signal 11)" in text


def test_a_failure_before_an_interruption_is_still_told() -> None:
    endings = [Ending(0, 10, 1, 2.0, record=record(1.0)), Ending(1, 11, -2, 3.0, stopped=2.0)]
    text = outcome(endings, signal.SIGINT).text()
    assert "rank 0 failed first: ValueError" in text and text.endswith("(exit code 130)\n")


def test_the_tail_of_an_output_is_what_a_reader_last_saw() -> None:
    tail = Tail()
    tail.feed(b"x" * 100_000 + b"\n 10%\r 20%\rdone\r\n\n")
    tail.feed(b"\xff no end")
    assert tail.lines()[-2:] == ["done", "\\xff no end"]
    assert sum(map(len, tail.lines())) < 10_000
    for i in range(50):
        tail.feed(b"%d\n" % i)
    assert tail.lines() == [str(i) for i in range(38, 50)]


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    report.write({"exit_code": 3}, str(path))
    assert json.loads(path.read_text()) == {"exit_code": 3}
    with pytest.raises(OSError):
        report.write({}, str(tmp_path / "absent" / "report.json"))
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError):  # what cannot be put in place leaves nothing behind
        report.write({}, str(path))
    assert [each.name for each in tmp_path.iterdir()] == ["report.json"]


def test_report_names_a_cause_on_another_host() -> None:
    assert (
        "the cause is rank 7, on another host" in outcome([Ending(0, 10, 1, 2.0, record=record(1.0, blames=7))]).text()
    )


def test_exit_codes() -> None:
    assert outcome([Ending(0, 10, 0, 1.0)]).exit_code == 0
    assert outcome([Ending(0, 10, 7, 1.0)]).exit_code == 7
    assert outcome([Ending(0, 10, -11, 1.0)]).exit_code == 139
    assert outcome([Ending(0, 10, 1, 1.0, record=record(0.1))], signal.SIGINT).exit_code == 130


def test_the_page_on_the_launcher_has_every_option_and_every_figure_of_the_report() -> None:
    page = (Path(__file__).parents[2] / "docs/launcher.md").read_text()
    missing = [name for name in options._OPTIONS if f"`{name}" not in page]
    data = outcome([Ending(0, 10, 0, 1.0)]).json()
    general = {"run_id", "host", "world_size", "command", "seconds", "ranks"}  # they speak for themselves
    missing += [key for key in data.keys() - general if f"`{key}`" not in page]
    missing += [key for key in data["ranks"][0].keys() - {"rank", "pid", "blames"} if f"`{key}`" not in page]
    missing += [code for code in re.findall(r"\d\d+", options._EXIT_CODES) if code not in page]
    assert not missing


def test_innermost_call_prefers_the_users_code_in_the_main_thread() -> None:
    stacks = (
        'Thread 0x1 (most recent call first):\n  File "worker.py", line 1 in work\n\n'
        "Current thread 0x2 (most recent call first):\n"
        '  File "/v/lib/python3.11/site-packages/torch/x.py", line 9 in all_reduce\n'
        '  File "/home/me/train.py", line 31 in step\n  File "/home/me/train.py", line 40 in <module>\n'
    )
    assert innermost_call(stacks) == "step (/home/me/train.py:31)"
    assert innermost_call("") == ""


@pytest.mark.parametrize(
    ("groups", "file", "text"),
    [
        ("0::/job/7\n", "sys/fs/cgroup/job/7/memory.events", "low 0\noom 5\noom_kill 4\n"),
        ("0::/outer/path\n", "sys/fs/cgroup/memory.events", "oom_kill 4\noom_group_kill 0\n"),
        ("9:cpu:/\n4:memory:/job\n0::/\n", "sys/fs/cgroup/memory/job/memory.oom_control", "under_oom 0\noom_kill 4\n"),
        ("3:cpu,memory:/a:b\n", "sys/fs/cgroup/memory/a:b/memory.oom_control", "oom_kill 4\n"),
    ],
)
def test_memory_kills_of_a_control_group(tmp_path: Path, groups: str, file: str, text: str) -> None:
    assert MemoryKills.now(tmp_path) == MemoryKills() and MemoryKills().any is None
    for name, content in (("proc/self/cgroup", groups), (file, text), ("proc/vmstat", "free 5\noom_kill 9\n")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    kills = MemoryKills.now(tmp_path)
    assert kills == MemoryKills(group=4, host=9)
    assert kills.since(MemoryKills(4, 8)) == MemoryKills(0, 1) and kills.since(MemoryKills(4, 8)).any
    assert kills.since(MemoryKills()) == MemoryKills() and not kills.since(kills).any


def test_quota(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text("150000 100000\n")
    assert machine._quota(quota) == 2
    quota.write_text("max 100000\n")
    assert machine._quota(quota) is None


class Console:
    """Streams of several ranks on one file, as the launcher has them; `terminal` plays one."""

    def __init__(self, path: Path, terminal: bool = False, ranks: int = 2) -> None:
        self._file: io.BufferedRandom = open(path, "w+b")
        self.sink = Sink(self._file.fileno(), lambda: True)
        self.sink.terminal = terminal
        self.streams = [Stream(self.sink, f"[rank {rank}] ") for rank in range(ranks)]
        self.now = 0.0

    def feed(self, rank: int, data: bytes, rest: float = 0.0) -> None:
        self.streams[rank].feed(data, self.now)
        self.now += rest
        for stream in self.streams:
            stream.preview(self.now)

    def close(self) -> str:
        for stream in self.streams:
            stream.finish()
        self._file.seek(0)
        with self._file:
            return self._file.read().decode()


def screen(text: str) -> list[str]:
    """What a terminal shows of it: carriage returns overwrite, and the one escape sequence clears."""
    lines, at = [""], 0
    for piece in re.findall(r"\x1b\[K|.|\n", text, flags=re.DOTALL):
        if piece == "\n":
            lines.append("")
            at = 0
        elif piece == "\r":
            at = 0
        elif piece == "\x1b[K":
            lines[-1] = lines[-1][:at]
        else:
            lines[-1] = lines[-1][:at] + piece + lines[-1][at + 1 :]
            at += 1
    return lines


def test_lines_are_prefixed_and_a_missing_end_is_added(tmp_path: Path) -> None:
    console = Console(tmp_path / "out")
    console.feed(0, b"one\ntwo\n")
    console.feed(1, b"")
    console.feed(1, b"no end")
    assert console.close() == "[rank 0] one\n[rank 0] two\n[rank 1] no end\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_random_writes_never_cut_or_mix_lines(tmp_path: Path, terminal: bool) -> None:
    rng = random.Random(7)
    console = Console(tmp_path / "out", terminal, ranks=3)
    expected: list[list[str]] = [[], [], []]
    left = []
    for rank in range(3):
        for i in range(60):
            expected[rank].append(f"{rank}:{i}:" + "x" * rng.choice([0, 3, 300, 9000]) + ".")
        left.append(b"".join(line.encode() + b"\n" for line in expected[rank]))
    while any(left):
        rank = rng.choice([r for r in range(3) if left[r]])
        size = rng.choice([1, 5, 100, 5000])
        console.feed(rank, left[rank][:size], rest=rng.choice([0, 0, 0.1, 1.0]))
        left[rank] = left[rank][size:]
    shown = screen(console.close()) if terminal else console.close().split("\n")
    for rank in range(3):
        prefix = f"[rank {rank}] "
        complete = [line[len(prefix) :] for line in shown if line.startswith(prefix) and line.endswith(".")]
        assert complete == expected[rank]
    previews = [line for line in shown if line and not line.endswith(".")]
    assert (
        not previews
        if terminal
        else all(any(line in f"[rank {r}] {e}" for r in range(3) for e in expected[r]) for line in previews)
    )


def test_a_progress_bar_is_shown_while_it_moves(tmp_path: Path) -> None:
    console = Console(tmp_path / "out", terminal=True)
    console.feed(0, b"\r 10%", rest=0.1)
    console.feed(0, b"\r 20%", rest=0.1)
    assert screen(os.pread(console.sink.fd, 1000, 0).decode()) == ["[rank 0]  20%"]
    console.feed(1, b"epoch done\n")
    assert screen(os.pread(console.sink.fd, 1000, 0).decode()) == ["[rank 1] epoch done", "[rank 0]  20%"]
    console.feed(0, b"\r100%\n")
    assert screen(console.close()) == ["[rank 1] epoch done", "[rank 0] 100%", ""]


def test_a_bar_on_a_pipe_moves_too_and_others_get_lines_of_their_own(tmp_path: Path) -> None:
    console = Console(tmp_path / "out")
    console.feed(0, b"50%\r", rest=0.1)
    assert b"50%" in os.pread(console.sink.fd, 1000, 0)
    console.feed(1, b"hello\n", rest=0.1)
    console.feed(1, b"again\n", rest=0.1)
    text = console.close()
    assert "[rank 1] hello\n[rank 1] again\n" in text
    assert text.count("50%") == 2  # once as it moved, once as the line that it ended as


def test_a_bar_that_runs_for_days_does_not_grow(tmp_path: Path) -> None:
    console = Console(tmp_path / "out", terminal=True)
    for i in range(2000):
        console.feed(0, b"\r%5d of many, many steps" % i, rest=random.Random(i).choice([0, 0.1]))
    assert len(console.streams[0].pending) < 10_000
    assert screen(console.close()) == ["[rank 0]  1999 of many, many steps", ""]


def test_a_reader_that_has_gone_breaks_the_sink_only() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    sink = Sink(write_end, lambda: True)
    Stream(sink, "").feed(b"line\n", 0.0)
    os.close(write_end)
    assert sink.broken


def test_a_blocked_reader_does_not_hold_the_launcher_for_ever() -> None:
    read_end, write_end = os.pipe()
    asked = []

    def give_up() -> bool:
        asked.append(True)
        return len(asked) < 2

    Stream(Sink(write_end, give_up), "").feed(b"x" * (1 << 20) + b"\n", 0.0)
    os.close(read_end)
    os.close(write_end)
    assert len(asked) == 2


def test_the_header_tells_of_more_threads_than_cores(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    given = options.parse(["-n", "3", "--threads", "2", str(script)])
    assert given.header("host", 6) == "phalanx: 3 ranks on 1 host (host), 2 threads per rank\n"
    assert given.header("host", 4) == "phalanx: 3 ranks on 1 host (host), 2 threads per rank (more than the 4 cores)\n"
    assert given.header("host", 1).endswith("2 threads per rank (on one core)\n")
