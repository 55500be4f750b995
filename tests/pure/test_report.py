"""The report on what ranks are doing, from statuses made up here: who is late, in which words, with which causes."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from phalanx.status.answer import Condition, Doing, Frame, Status, status_of
from phalanx.status.process import descendants, known_of, look
from phalanx.status.report import Report

REDUCE = "all_reduce(4 x float32, op=SUM) at train.py:12"
GRADIENTS = "the gradient synchronisation of model 1a2b (10 elements) at train.py:20"
SITE = "/env/lib/python3.11/site-packages/torch/"


def waiting(rank: int, *awaits: int, call: str = REDUCE, seconds: float = 10.0, **more: object) -> Status:
    return Status(rank, "h", 100 + rank, doing=(Doing(call, seconds, True, awaits, "g", 7),), cpu=0.0, **more)


def busy(rank: int, *stack: Frame, cpu: float = 1.0, **more: object) -> Status:
    return Status(rank, "h", 100 + rank, idle=11.0, last=REDUCE, cpu=cpu, stack=stack, **more)


def user(line: int, function: str = "train", file: str = "/home/me/train.py") -> Frame:
    return Frame(file, line, function, f"source of {line}", True)


def test_who_is_late_is_named_with_time_place_and_stack() -> None:
    start = Frame("/env/lib/python3.11/runpy.py", 3, "_run_code")
    late = busy(1, start, user(8, "<module>"), user(33), Frame(SITE + "nn/modules/linear.py", 5, "forward"))
    report = Report([waiting(0, 1), late, waiting(2, 1, seconds=9.5)], waiter=0)
    assert [each.rank for each in report.late] == [1]
    text = report.text()
    assert text.startswith("phalanx: rank 1 is late: rank 0 has waited 10.0 s (since ")
    assert f"  ranks 0, 2  waiting for rank 1 in {REDUCE} for 9.5 to 10.0 s; CPU 0 %\n" in text
    assert f"  rank 1      in no collective for 11.0 s, the last was {REDUCE}; at train (/home/me/train.py:33)" in text
    assert "(pid 101 on h); CPU 100 %" in text
    assert '  > File "/home/me/train.py", line 33, in train\n        source of 33\n' in text
    assert f'    File "{SITE}nn/modules/linear.py", line 5, in forward\n' in text
    assert "runpy" not in text, "what starts the user's code is left out"


def test_a_rank_that_is_waited_for_and_waits_itself_is_not_the_late_one() -> None:
    report = Report([waiting(0, 1, 2), waiting(1, 2, call="barrier() at a.py:1"), busy(2), busy(3)], waiter=0)
    assert [each.rank for each in report.late] == [2]
    assert report.headline().startswith("rank 2 is late: rank 0 has waited")
    assert report.deadlocked == []


def test_ranks_that_wait_for_each_other_are_said_to_and_why() -> None:
    report = Report([waiting(0, 1), waiting(1, 0, call="barrier() at a.py:1"), busy(2)], waiter=0)
    assert [each.rank for each in report.deadlocked] == [0, 1]
    assert report.headline().startswith("ranks 0-1 wait for each other: rank 0 has waited")
    assert "different groups in different orders" in report.text()
    receives = Report([waiting(0, 1, call="recv(src=1)"), waiting(1, 0, call="recv(src=0)")], waiter=0)
    assert "receive before they send" in receives.text()


def test_asked_from_outside_short_waits_are_no_news() -> None:
    well = Report([waiting(0, 1, seconds=0.3), busy(1)])
    assert well.headline() == "no rank waits for another"
    assert Report([waiting(0, 1, seconds=3.0), busy(1)]).headline().startswith("rank 1 is late")
    assert Report([busy(0), replace(busy(1), condition=Condition.SILENT)]).headline() == "rank 1 did not answer"


def late_with(*stack: Frame, cpu: float = 1.0, **more: object) -> list[Status]:
    return [waiting(0, 1), waiting(2, 1), busy(1, *stack, cpu=cpu, **more)]


LOADER = Frame(SITE + "utils/data/dataloader.py", 700, "__next__")


@pytest.mark.parametrize(
    ("statuses", "cause"),
    [
        (late_with(user(5), LOADER), "rank 1 waits for its next batch"),
        (late_with(user(5), LOADER, user(60, "__getitem__")), "rank 1 waits for its next batch"),
        (late_with(user(5), user(60, "__getitem__"), user(70, "decode")), "rank 1 waits for its next batch"),
        (late_with(user(5, "__iter__"), Frame(SITE + "nn/modules/linear.py", 1, "forward")), "has more to compute"),
        (late_with(user(5), Frame("/usr/lib/python3.11/mailbox.py", 1, "__getitem__")), "has more to compute"),
        (late_with(user(5), Frame("/usr/lib/python3.11/pdb.py", 1, "interaction")), "sits in a Python debugger"),
        (late_with(user(5)), "rank 1 has more to compute"),
        (late_with(user(5), cpu=0.01), "rank 1 uses no CPU: it waits for a file"),
        (late_with(doing=(Doing("rank 1's turn in rank_zero_first()", 9.0),)), "has its turn in rank_zero_first()"),
        ([waiting(0, 1, 2), busy(1), busy(2)], "stands in code that only rank 0 runs"),
        ([waiting(1, 0, call=GRADIENTS), busy(0)], "rank 0 had fewer batches than the others"),
        (late_with(condition=Condition.STOPPED, detail="is stopped by a signal"), "kill -CONT 101"),
        (late_with(condition=Condition.STOPPED, detail="is held by a debugger (gdb)"), "rank 1 sits in a debugger"),
        (late_with(condition=Condition.LEFT, detail="has left the others"), "write `with ddp.join():`"),
        (late_with(condition=Condition.SILENT, detail="does not answer"), "gdb -p 101"),
        (late_with(condition=Condition.UNREACHABLE, detail="does not answer from b"), "look with ping and ssh"),
    ],
)
def test_usual_causes(statuses: list[Status], cause: str) -> None:
    assert cause in "\n".join(Report(statuses, waiter=statuses[0].rank).json()["causes"])


def test_nothing_is_said_about_causes_where_nobody_waits() -> None:
    assert Report([busy(0), busy(1)]).json()["causes"] == []


def test_many_ranks_make_few_rows() -> None:
    statuses = [waiting(rank, 63) for rank in range(63)] + [busy(63)]
    assert len(Report(statuses, waiter=0).text().splitlines()) < 8
    different = [waiting(rank, 63, call=f"call {rank}") for rank in range(63)] + [busy(63)]
    assert "and 24 more rows" in Report(different, waiter=0).text()


def test_a_status_survives_its_journey() -> None:
    status = replace(waiting(1, 0, 2), idle=3.0, stack=(user(5), LOADER))
    assert status_of(json.loads(json.dumps(status.json()))) == status
    with pytest.raises((KeyError, ValueError, TypeError)):
        status_of({"rank": 1})


def test_what_the_kernel_tells() -> None:
    here = look(os.getpid())
    assert here is not None and here.letter == "R" and here.cpu_seconds > 0 and not here.is_stopped
    assert os.getpid() in descendants(os.getppid()) and os.getppid() not in descendants(os.getpid())
    missing = 4_200_000  # above the largest number that Linux gives
    assert look(missing) is None
    assert known_of([missing]) == {missing: (Condition.ENDED, "has ended", None)}
