"""What usually is the cause of what a report shows, and what to do. Pure: reads statuses, guesses, says so."""

from __future__ import annotations

import re
from collections.abc import Sequence

from phalanx.errors import name_ranks
from phalanx.status.answer import Condition, Frame, Status

_IDLE_CPU = 0.1  # of a core: below, a process waits for something
_LOADING = re.compile(r"torch[/\\]utils[/\\]data[/\\]")
_COMPUTING = re.compile(r"torch[/\\](nn|autograd|optim)[/\\]")
_LOADING_FUNCTIONS = {"__next__", "__iter__", "__getitem__", "__getitems__", "collate_fn"}
_DEBUGGERS = ("pdb.py", "bdb.py", "ipdb", "pydevd")
_RANK_ZERO_FIRST = "rank_zero_first("
_GRADIENTS = "gradient synchronisation"
_ON_THE_WAY = "with its data on the way over"


def usual_causes(statuses: Sequence[Status], waiting: Status | None, late: Sequence[Status]) -> list[str]:
    """The usual causes, most likely first; none where nothing is wrong."""
    odd = [each for each in statuses if each.condition is not Condition.ANSWERS]
    found = [cause for each in odd if (cause := _of_process(each))]
    if waiting is None or waiting.waiting is None:
        return found
    if late and all(each.waiting is not None and each.waiting.awaits for each in late):
        return [*found, _for_each_other(late)]
    found += [cause for each in late if (cause := _of_stack(each))]
    return found or _of_calls(statuses, waiting, late)


def _of_process(status: Status) -> str:
    name = f"rank {status.rank}"
    if status.condition is Condition.STOPPED:
        if "debugger" in status.detail:
            return f"{name} sits in a debugger; the others wait until it goes on or their timeout has passed"
        return f"{name} was stopped from outside, and nothing but a signal lets it go on: kill -CONT {status.pid}"
    if status.condition in (Condition.LEFT, Condition.ENDED):
        return (
            f"{name} has finished or died while others still make calls: ranks have different numbers of batches "
            "(write `with ddp.join():` around the loop), or one returned early"
        )
    if status.condition is Condition.SILENT:
        return (
            f"{name} is in a long call of a C extension, or of a device or file system that hangs; "
            f"`gdb -p {status.pid}` shows which"
        )
    if status.condition is Condition.UNREACHABLE:
        return f"the network to the host of {name} is cut, or that host is down or has stopped: look with ping and ssh"
    return ""


def _of_stack(status: Status) -> str:
    """What a late rank's stack gives away."""
    name = f"rank {status.rank}"
    if any(_RANK_ZERO_FIRST in each.call for each in status.doing):
        return f"{name} has its turn in rank_zero_first(), and the others wait as they should, however long it takes"
    if any(part in frame.file for frame in status.stack for part in _DEBUGGERS):
        return f"{name} sits in a Python debugger; the others wait until it goes on or their timeout has passed"
    if _is_loading(status.stack):
        return (
            f"{name} waits for its next batch: slow storage, or too little preparation ahead "
            "(DataLoader's num_workers and prefetch_factor), or larger samples than the other ranks have"
        )
    return ""


def _is_loading(stack: Sequence[Frame]) -> bool:
    """Whether a data set or an iterator is at work, and what it has called is no model."""
    for frame in reversed(stack):
        if _COMPUTING.search(frame.file):
            return False
        if _LOADING.search(frame.file) or (frame.users and frame.function in _LOADING_FUNCTIONS):
            return True
    return False


def _for_each_other(late: Sequence[Status]) -> str:
    names = name_ranks([each.rank for each in late])
    if any(each.waiting is not None and _ON_THE_WAY in each.waiting.call for each in late):
        return "the network between the hosts is slow or loses what is sent; there may also be much to send"
    if any(each.waiting is not None and each.waiting.call.startswith("recv(") for each in late):
        return f"{names} each receive before they send what the other waits for; let one of them send first"
    return (
        f"{names} call collectives of different groups in different orders, and "
        "each waits for the other; every rank must call them in the same order"
    )


def _of_calls(statuses: Sequence[Status], waiting: Status, late: Sequence[Status]) -> list[str]:
    wait = waiting.waiting
    causes = []
    waiters = [each.rank for each in statuses if each.waiting is not None]
    names = name_ranks([each.rank for each in late])
    if waiters == [0] and len(statuses) > 1 and wait is not None:
        causes.append(
            f"{wait.call} stands in code that only rank 0 runs (`if phalanx.is_main():`); "
            "call it on every rank, outside of that block"
        )
    if wait is not None and _GRADIENTS in wait.call:
        causes.append(
            f"{names} had fewer batches than the others and has gone on; write `with ddp.join():` around the loop"
        )
    if all(each.cpu is not None and each.cpu < _IDLE_CPU for each in late) and late:
        causes.append(f"{names} uses no CPU: it waits for a file, a lock, the network or another process")
    elif late:
        causes.append(f"{names} has more to compute than the others, or computes on fewer cores")
    return causes
