"""Ranks that are late: one report, by one rank, that names the right one; an error with it after the timeout."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import phalanx
from phalanx.errors import CollectiveTimeoutError, MisuseError, RankMismatchError
from phalanx.group import rendezvous, slow
from phalanx.group.watchdog import Watchdog
from phalanx.launch import environment
from phalanx.status.asking import Peer, ask, ask_peers
from phalanx.testing import run
from tests.threads.small_models import ddp, one, x_of
from tests.threads.stuck_programs import Reports, reports

SLOW = 0.4


@pytest.fixture(autouse=True)
def slow_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_SLOW_AFTER", str(SLOW))


@pytest.fixture
def told() -> Iterator[Reports]:
    with reports() as collected:
        yield collected


def watch() -> Watchdog:
    return dist.group.WORLD.board.watch


def first_line(text: str) -> str:
    return text.partition("\n")[0]


# -- reports -----------------------------------------------------------------------------------------------


def test_one_rank_reports_a_late_one_and_again_when_the_time_has_doubled(told: Reports) -> None:
    def program(rank: int) -> None:
        dist.barrier()
        if rank == 1:
            told.wait_for(3)
        dist.all_reduce(torch.ones(4))

    run(3, program)
    assert len(told.texts) >= 3 and set(told.threads) in ({"rank 0"}, {"rank 2"})
    waited = [float(re.search(r"has waited ([\d.]+) s", text)[1]) for text in told.texts]
    assert waited[0] >= SLOW and waited[1] >= 2 * SLOW and waited[2] >= 4 * SLOW
    for text in told.texts:
        assert re.match(r"phalanx: rank 1 is late: rank [02] has waited .* in all_reduce\(4 x float32, op=SUM\)", text)
        assert re.search(r"ranks 0, 2  waiting for rank 1 in all_reduce\(.*test_stuck\.py:\d+ for", text)
        assert re.search(r"rank 1      in no collective for .*, the last was barrier\(\).*; at wait_for \(", text)
        assert re.search(r"  > File \".*test_stuck.py\", line \d+, in program\n        told.wait_for\(3\)", text)


def test_a_wait_that_ends_in_time_is_not_reported(told: Reports) -> None:
    def program(rank: int) -> None:
        for _ in range(50):
            dist.all_reduce(torch.ones(4))

    run(2, program)
    assert told.texts == []


class Batches(torch.utils.data.IterableDataset):
    def __init__(self, stall: Callable[[], None] | None) -> None:
        self.stall = stall

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield torch.ones(1)
        if self.stall is not None:
            self.stall()
        yield torch.ones(1)


def test_a_slow_data_loader_is_named_with_the_model_that_waits(told: Reports) -> None:
    def program(rank: int) -> None:
        model = ddp(one())
        for batch in torch.utils.data.DataLoader(Batches(told.wait_for if rank == 1 else None)):
            model(batch).sum().backward()

    run(2, program)
    text = told.texts[0]
    assert "rank 1 is late" in first_line(text) and "the gradient synchronisation of model" in first_line(text)
    assert "Linear, parameter weight, 1 bucket" in text
    assert re.search(r"  > File .*test_stuck.py\", line \d+, in __iter__\n        self.stall\(\)", text)
    assert "Usual cause: rank 1 waits for its next batch" in text


def test_rank_0_preparing_data_is_named_and_nothing_is_wrong(told: Reports) -> None:
    def program(rank: int) -> str:
        with phalanx.rank_zero_first():
            if rank == 0:
                told.wait_for()
        return "done"

    assert run(3, program) == ["done"] * 3
    text = told.texts[0]
    assert re.match(r"phalanx: rank 0 is late: rank [12] has waited .* in rank_zero_first\(\) at .*test_stuck", text)
    assert re.search(r"  rank 0 .*in rank 0's turn in rank_zero_first\(\) for .*; at wait_for", text)
    assert re.search(r"  ranks 1-2 .*waiting for rank 0 in rank_zero_first\(\)", text)
    assert "the others wait as they should" in text


def test_rank_0_preparing_data_is_named_with_any_backend(told: Reports) -> None:
    def program(rank: int) -> None:
        with phalanx.rank_zero_first():
            if rank == 0:
                told.wait_for()

    run(3, program, backend="gloo")
    assert len(told.texts) == 1 and told.threads == ["rank 1"]
    assert re.match(r"phalanx: this rank has waited [\d.]+ s for rank 0 in rank_zero_first\(\)", told.texts[0])


def test_a_receive_that_waits_is_reported(told: Reports) -> None:
    def program(rank: int) -> float:
        tensor = torch.zeros(1)
        if rank == 0:
            told.wait_for()
            dist.send(torch.ones(1), 1, tag=4)
        elif rank == 1:
            dist.recv(tensor, 0, tag=4)
            assert watch().notes == []
        return tensor.item()

    assert run(3, program) == [0.0, 1.0, 0.0]
    said = first_line(told.texts[0])
    assert re.match(r"phalanx: rank 0 is late: rank 1 has waited .* in recv\(src=0, tag=4\) at .*test_stuck", said)


def test_a_rank_that_waits_for_shared_memory_is_reported(told: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    make = os.memfd_create

    def make_late(name: str) -> int:
        told.wait_for()
        return make(name)

    monkeypatch.setattr(os, "memfd_create", make_late)
    run(2, lambda rank: None)
    assert re.match(r"phalanx: rank 0 is late: rank 1 has waited .* in arena\(", told.texts[0])


def test_an_asynchronous_collective_that_waits_is_reported(told: Reports) -> None:
    def program(rank: int) -> None:
        if rank == 1:
            told.wait_for()
        dist.all_reduce(torch.ones(5000), async_op=True).wait()

    run(2, program)
    assert re.match(r"phalanx: rank 1 is late: rank 0 has waited .* in all_reduce\(5000 x float32", told.texts[0])
    assert "waiting for rank 1 in all_reduce" in told.texts[0]


def test_a_joined_rank_that_waits_for_one_in_its_own_code_reports_it(told: Reports) -> None:
    def program(rank: int) -> None:
        model = ddp(one())
        with model.join():
            for _ in range(rank + 1):
                model(x_of(rank)).sum().backward()
            if rank == 1:
                told.wait_for()

    run(2, program)
    assert "rank 1 is late: rank 0 has waited" in first_line(told.texts[0])
    assert "it has run out of data and follows the others" in told.texts[0]


class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, wait: Callable[[], None]) -> torch.Tensor:
        ctx.wait = wait
        return x.clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.wait()
        return grad, None


def test_a_barrier_against_a_backward_is_a_wait_until_it_is_a_mismatch(told: Reports) -> None:
    def program(rank: int) -> str:
        model = ddp(one())
        with pytest.raises(RankMismatchError) as caught:
            if rank == 0:
                dist.barrier()
            else:
                Late.apply(model(x_of(rank)), told.wait_for).sum().backward()
        return str(caught.value)

    for text in run(2, program):
        assert "rank 0 in barrier()" in text and "rank 1 in the gradient synchronisation" in text
    text = told.texts[0]
    assert re.match(r"phalanx: rank 1 is late: rank 0 has waited .* in barrier\(\)", text)
    assert re.search(r"  rank 1  in no collective .*; at wait_for \(", text)
    assert re.search(r"  > File .*, in backward\n        ctx.wait\(\)", text)
    assert "stands in code that only rank 0 runs" in text


def test_ranks_in_different_groups_are_said_to_wait_for_each_other(told: Reports) -> None:
    def program(rank: int) -> None:
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
        works = [dist.barrier(group=each, async_op=True) for each in ([first] if rank == 0 else [second])]
        told.wait_for()
        works += [dist.barrier(group=each, async_op=True) for each in ([second] if rank == 0 else [first])]
        for work in works:
            work.wait()

    run(2, program)
    assert re.match(r"phalanx: ranks 0-1 wait for each other: rank \d has waited .* in barrier\(\)", told.texts[0])
    assert "call collectives of different groups in different orders" in told.texts[0]


def test_who_has_not_come_to_the_meeting_is_named(told: Reports) -> None:
    store = dist.HashStore()
    seconds = timedelta(seconds=30)
    boards = [None, None]

    def come(rank: int) -> None:
        if rank == 1:
            told.wait_for()
        boards[rank] = rendezvous.meet(store, rank, 2, seconds)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for board in boards:
        board.leave()
    assert re.match(
        r"phalanx: 1 of 2 ranks have waited [\d.]+ s to join the process group: rank 1 is not there yet", told.texts[0]
    )


# -- timeouts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["barrier", "recv", "rank_zero_first", "monitored_barrier"])
def test_after_the_timeout_every_waiting_rank_raises_with_the_report(call: str) -> None:
    gave_up = threading.Semaphore(0)
    calls: dict[str, Callable[[], object]] = {
        "barrier": dist.barrier,
        "recv": lambda: dist.recv(torch.ones(1), 0),
        "rank_zero_first": lambda: phalanx.rank_zero_first().__enter__(),
        "monitored_barrier": lambda: dist.group.WORLD.monitored_barrier(),
    }

    def program(rank: int) -> tuple[list[int], str, str] | None:
        _get_default_store().set_timeout(timedelta(seconds=0.7))  # the limit of rank_zero_first
        dist.barrier()
        if rank == 0:
            for _ in range(2):
                assert gave_up.acquire(timeout=20)
            return None
        try:
            with pytest.raises(CollectiveTimeoutError) as caught:
                calls[call]()
        finally:
            gave_up.release()
        assert watch().notes == []
        return caught.value.missing, caught.value.report, str(caught.value)

    for rank, (missing, report, text) in enumerate(run(3, program, group_timeout=0.7)[1:], 1):
        assert missing == [0]
        assert re.search(r": Timed out waiting 700ms: rank 0 has not arrived\n", text)
        assert text.endswith(report)
        assert f"phalanx: rank 0 is late: rank {rank} has waited" in report
        assert re.search(r"  > File .*, in program\n        assert gave_up.acquire", report)


def test_only_who_has_not_come_is_missing() -> None:
    done = threading.Event()

    def program(rank: int) -> list[int]:
        if rank == 2:
            assert done.wait(20)
            return []
        try:
            with pytest.raises(CollectiveTimeoutError) as caught:
                dist.barrier()
            return caught.value.missing
        finally:
            if rank == 0:
                done.set()

    assert run(4, program, group_timeout=0.5) == [[2], [2], [], [2]]


# -- who speaks --------------------------------------------------------------------------------------------


class Board:
    """Stands for the links of rank `rank`: the others' answers are made up."""

    def __init__(self, rank: int, others: list) -> None:
        self.rank, self.slow_after, self.watch = rank, 0.001, self
        self.ask = lambda wait: [*others, slow_status(rank, wait.doing())]

    def pump_all(self) -> None:
        pass


def slow_status(rank: int, *doing: slow.Doing):
    return rendezvous.Watchdog.status.__globals__["Status"](rank, "h", 1, doing=doing)


def other(rank: int, seconds: float, printed: int = 0, key: str = "g"):
    return slow_status(rank, slow.Doing("barrier()", seconds, True, (9,), key, 5, printed))


@pytest.mark.parametrize(
    ("others", "speaks"),
    [
        ([], True),
        ([other(1, 60.0)], False),  # has waited longer
        ([other(1, 10.0)], False),  # as long, and comes first
        ([other(3, 10.0)], True),
        ([other(1, 2.0)], True),  # has only just begun
        ([other(3, 60.0)], False),
        ([other(1, 60.0, key="another")], True),
        ([other(3, 10.0, printed=1)], False),  # has spoken
    ],
)
def test_of_those_that_wait_longest_the_lowest_speaks(told: Reports, others: list, speaks: bool) -> None:
    board = Board(2, [*others, slow_status(9)])
    wait = slow.LongWait(board, "barrier()", "g", 5, slow.time.perf_counter() - 10.0, lambda: [9])
    wait._slow_after = 3.0
    wait.look()
    assert bool(told.texts) is speaks
    if not speaks and not any(status.doing[0].printed for status in others):
        wait.due = 0.0
        wait.look()
        assert told.texts, "nobody has spoken, so it does"


def test_who_comes_while_ranks_are_asked_is_not_reported(told: Reports) -> None:
    late = [9]
    board = Board(2, [slow_status(9)])
    board.pump_all = late.clear
    slow.LongWait(board, "barrier()", "g", 5, 0.0, lambda: late).look()
    assert told.texts == []


# -- settings ----------------------------------------------------------------------------------------------


def test_when_a_wait_is_slow_is_the_programs_choice_then_the_environments() -> None:
    assert environment.slow_after({}) == 10.0 and environment.slow_after({"PHALANX_SLOW_AFTER": "inf"}) == float("inf")
    for wrong in ("soon", "0", "-3", "nan"):
        with pytest.raises(MisuseError, match="PHALANX_SLOW_AFTER"):
            environment.slow_after({"PHALANX_SLOW_AFTER": wrong})
    with pytest.raises(MisuseError, match="slow_after=0"):
        phalanx.init(slow_after=0)

    def program(rank: int) -> tuple[float, float]:
        before = dist.group.WORLD.board.slow_after
        phalanx.init(slow_after=7)
        return before, dist.group.WORLD.board.slow_after

    try:
        assert run(1, program) == [(SLOW, 7.0)]
        assert slow.default() == 7.0
    finally:
        slow.choose(None)
    assert slow.default() == SLOW


# -- the watchdog ------------------------------------------------------------------------------------------


def test_ranks_of_other_hosts_are_asked_over_tcp_with_their_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous._Meeting, "_connect_unix", lambda self, peer: False)

    def program(rank: int) -> list[tuple[int, str]]:
        peers = watch()._peers
        assert all(not peer.unix and peer.tcp for peer in peers.values() if peer.rank != rank)
        wrong = [Peer(1 - rank, 1, "h", tcp=peers[1 - rank].tcp, token="0" * 32)]
        found = [(status.rank, status.condition.value) for status in watch().ask()]
        dist.barrier()
        found += [(status.rank, status.condition.value) for status in ask(wrong, 1.0)]
        dist.barrier()
        return found

    answers = [(0, "answers"), (1, "answers")]
    assert run(2, program) == [[*answers, (1, "unreachable")], [*answers, (0, "unreachable")]]


def test_ranks_of_one_host_open_no_port_and_know_each_other() -> None:
    def program(rank: int) -> int:
        assert len(watch()._listeners) == 1
        said = ask_peers(watch()._me.unix, 5.0)
        assert said is not None and [peer.rank for peer in said["peers"]] == [0, 1]
        dist.barrier()
        return len(said["peers"])

    assert run(2, program) == [2, 2]


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_other_users_get_no_answer() -> None:
    def program(rank: int) -> bytes:
        unix, (read, write) = watch()._me.unix, os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.setuid(65534)
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.settimeout(10)
                    sock.connect("\0" + unix)
                    sock.sendall(bytes(32) + b"S")
                    os.write(write, sock.recv(100) or b"nothing")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        heard = os.read(read, 100)
        os.close(read), os.close(write)
        assert ask_peers(unix, 5.0) is not None
        return heard

    assert run(1, program) == [b"nothing"]


def test_a_forked_child_lets_go_of_the_sockets() -> None:
    in_turn = threading.Lock()  # forks in two threads at once are no business of this test

    def program(rank: int) -> int:
        mine = watch()
        with in_turn:
            child = os.fork()
        if child == 0:
            os._exit(sum(sock.fileno() >= 0 for sock in [*mine._sockets, mine._end]))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert run(2, program) == [0, 0]


def test_the_watchdog_ends_with_its_world_even_if_nobody_closes_it() -> None:
    board = rendezvous.meet(dist.HashStore(), 0, 1, timedelta(seconds=5))
    mine = board.watch
    assert mine._thread.is_alive()
    os.close(board._wake_read), os.close(board._wake_write)
    del board
    mine._thread.join(5)
    assert not mine._thread.is_alive() and all(sock.fileno() < 0 for sock in mine._sockets)
