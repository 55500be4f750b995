"""Ranks that all raise the same, from the same tickets, though one hears of the others' failure first."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from phalanx.errors import CollectiveTimeoutError, MisuseError, PeerFailedError, RankMismatchError, ReplicaDriftError
from phalanx.group.link import HEADER, LEAVING
from phalanx.testing import Outcome, run
from tests.threads.small_models import ddp, x_of

LATE = 0.1


def send_late_to(peer: int) -> None:
    """What this rank sends to `peer` arrives when the others have gone on."""
    link = dist.group.WORLD.board.links[peer]
    send = link.send

    def late(data: bytes, board: object) -> None:
        time.sleep(LATE)
        send(data, board)

    link.send = late


def raise_own(rank: int) -> None:
    if rank == 2:
        send_late_to(1)
    dist.all_reduce(torch.ones(1))
    raise ValueError("the loss is too high")


def wrap_another_model(rank: int) -> None:
    if rank == 2:
        send_late_to(1)
    ddp(nn.Linear(2, 3 if rank == 2 else 2))


def drift(rank: int) -> None:
    model = ddp(nn.Linear(1, 1))
    if rank == 2:
        model.module.bias.detach().numpy()[0] += 1
        send_late_to(1)
    for _ in range(20):
        model(x_of(rank)).sum().backward()


@pytest.mark.parametrize(
    ("program", "error"),
    [(raise_own, ValueError), (wrap_another_model, MisuseError), (drift, ReplicaDriftError)],
)
def test_who_is_late_in_a_round_that_others_have_ended_ends_it_too(program, error: type[Exception]) -> None:
    outcomes: list[Outcome] = run(3, program, raises=False)
    assert [type(outcome.error) for outcome in outcomes] == [error] * 3


def test_who_follows_raises_what_the_others_have_raised_before_it() -> None:
    def program(rank: int) -> None:
        model = ddp(nn.Linear(1, 1))
        with model.join():
            for step in range(1 if rank == 1 else 2):
                model(x_of(rank)).sum().backward()
                if rank == 2 and step == 1:
                    send_late_to(1)
                dist.broadcast(torch.ones(3), src=1)

    outcomes: list[Outcome] = run(3, program, raises=False)
    assert [type(outcome.error) for outcome in outcomes] == [RankMismatchError] * 3
    assert all("it has run out of data" in str(outcome.error) for outcome in outcomes)


def test_a_rank_that_has_left_is_named_by_all_that_wait_for_it() -> None:
    def program(rank: int) -> None:
        if rank == 2:
            board = dist.group.WORLD.board
            board.links[0].send(HEADER.pack(0, LEAVING, 0, 0), board)
            time.sleep(LATE)  # rank 1 hears of it only when rank 0 has failed
        else:
            dist.barrier()

    outcomes: list[Outcome] = run(3, program, raises=False)
    for outcome in outcomes[:2]:
        assert isinstance(outcome.error, RankMismatchError), outcome.text
        assert sorted(outcome.error.calls) == [outcome.rank, 2]


@pytest.mark.parametrize("late", [True, False])
def test_who_has_come_later_gives_up_with_the_first_that_waits_for_the_same_rank(late: bool) -> None:
    gave_up = threading.Semaphore(0)

    def program(rank: int) -> None:
        groups = [dist.new_group([0, 1, 2], timeout=timedelta(seconds=1)) for _ in range(2)]
        dist.barrier()
        if rank == 1:
            for _ in range(2):
                assert gave_up.acquire(timeout=20)
            return
        time.sleep(0.4 * (rank == 2))
        try:
            dist.barrier(group=groups[0 if late else rank == 2])
        finally:
            gave_up.release()

    outcomes: list[Outcome] = run(3, program, raises=False)
    first, second = outcomes[0].error, outcomes[2].error
    assert isinstance(first, CollectiveTimeoutError) and first.missing == ([1] if late else [1, 2])
    if late:
        assert isinstance(second, CollectiveTimeoutError)
        assert (second.missing, second.rank, second.report) == ([1], 2, first.report)
        assert "rank 0 has waited that long" in str(second)
    else:
        assert isinstance(second, PeerFailedError) and second.peer == 0, "it waits in another group"


def test_who_waits_for_a_rank_that_shuts_down_after_a_failure_elsewhere_has_its_cause() -> None:
    def program(rank: int) -> str:
        pair = dist.new_group([0, 1])
        if rank == 2:
            raise ValueError("the cause")
        if rank == 1:
            with pytest.raises(PeerFailedError):
                dist.barrier()
            dist.destroy_process_group()  # and build another one
            return ""
        with pytest.raises(PeerFailedError) as caught:
            dist.barrier(group=pair)
        assert caught.value.peer == 2
        return caught.value.exception

    outcomes: list[Outcome] = run(3, program, raises=False)
    assert outcomes[0].value == "ValueError: the cause", outcomes[0].text


def test_who_asks_tells_how_busy_it_is_besides() -> None:
    def program(rank: int) -> float:
        (status,) = dist.group.WORLD.board.watch.ask()
        return status.cpu

    assert run(1, program)[0] < 0.5
