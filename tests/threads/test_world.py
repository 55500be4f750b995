"""The threads test bed itself: every rank has a torch.distributed of its own, and nothing is left of it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d

from phalanx.errors import MisuseError, PeerFailedError
from phalanx.testing import (
    Ending,
    Fault,
    FaultError,
    Faults,
    Kind,
    Outcome,
    Point,
    WorldError,
    generator,
    run,
    seeded,
)


def total(rank: int, *more: float) -> float:
    tensor = torch.tensor([rank + 1.0 + sum(more)])
    dist.all_reduce(tensor)
    return tensor.item()


def test_values_come_back_in_order_of_rank():
    def program(rank: int, factor: int) -> tuple:
        return rank * factor, dist.get_rank(), dist.get_world_size(), total(rank)

    assert run(3, program, 10, backend="gloo") == [(10 * rank, rank, 3, 6.0) for rank in range(3)]


def test_each_rank_has_groups_of_its_own():
    def program(rank: int) -> float:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=groups[rank // 2])
        return tensor.item()

    assert run(4, program, backend="gloo") == [1.0, 1.0, 5.0, 5.0]


def test_functional_collectives_find_the_group_of_the_rank():
    def program(rank: int) -> float:
        return functional.all_reduce(torch.tensor([rank + 1.0]), "sum", dist.group.WORLD).item()

    assert run(2, program, backend="gloo") == [3.0, 3.0]


def test_threads_that_a_rank_starts_belong_to_its_world():
    def program(rank: int) -> list:
        seen: list = []

        def inner() -> None:
            seen.append(dist.get_rank())
            seen.append(functional.all_reduce(torch.tensor([rank + 1.0]), "sum", dist.group.WORLD).item())

        def outer() -> None:
            thread = threading.Thread(target=inner)
            thread.start()
            thread.join()

        thread = threading.Thread(target=outer)
        thread.start()
        thread.join()
        return seen

    assert run(2, program, backend="gloo") == [[0, 3.0], [1, 3.0]]


def test_hooks_in_backward_belong_to_the_rank():
    def program(rank: int) -> float:
        parameter = torch.nn.Parameter(torch.ones(2))
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
        (parameter * (rank + 1)).sum().backward()
        return parameter.grad[0].item()

    assert run(2, program, backend="gloo") == [3.0, 3.0]


def test_other_threads_see_what_was_there_before():
    met = threading.Barrier(2)

    def program(rank: int) -> bool:
        met.wait(10)
        met.wait(10)
        return dist.is_initialized()

    seen: list[bool] = []

    def bystander() -> None:
        met.wait(10)
        seen.append(dist.is_initialized())
        met.wait(10)

    thread = threading.Thread(target=bystander)
    thread.start()
    assert run(1, program, backend="gloo") == [True]
    thread.join()
    assert seen == [False]


def test_everything_is_as_before_after_success_and_failure():
    before = c10d._world, sys.excepthook, threading.Thread.start
    run(2, total, backend="gloo")
    with pytest.raises(WorldError):
        run(2, lambda rank: 1 / rank, backend="gloo")
    assert (c10d._world, sys.excepthook, threading.Thread.start) == before
    assert not dist.is_initialized()


def test_without_a_backend_the_program_joins_for_itself():
    assert run(2, lambda rank: dist.is_initialized(), backend=None) == [False, False]


def test_a_program_may_close_its_group_itself():
    def program(rank: int) -> int:
        dist.destroy_process_group()
        return rank

    assert run(2, program, backend="gloo") == [0, 1]


def test_the_first_failure_in_time_is_on_top_and_all_are_there():
    def program(rank: int) -> None:
        if rank == 2:
            raise ValueError("the cause")
        dist.barrier()

    with pytest.raises(WorldError, match="3 of 3 ranks failed") as caught:
        run(3, program, backend="gloo")
    text = str(caught.value)
    assert list(caught.value.errors)[0] == 2
    assert sorted(caught.value.errors) == [0, 1, 2]
    assert text.index("ValueError: the cause") < min(text.index("rank 0 "), text.index("rank 1 "))
    assert 'raise ValueError("the cause")' in text
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_group_that_only_garbage_holds_does_not_keep_its_peers_waiting():
    def program(rank: int) -> None:
        if rank == 1:
            circle = [dist.group.WORLD]
            circle.append(circle)
            raise ValueError("the cause")
        dist.barrier()

    outcomes: list[Outcome] = run(2, program, backend="gloo", raises=False, timeout=10)
    assert [o.ending for o in outcomes] == [Ending.RAISED, Ending.RAISED]


def test_the_peers_of_a_rank_that_raised_are_told():
    def program(rank: int) -> None:
        if rank == 1:
            raise ValueError("the cause")
        total(rank)

    with pytest.raises(WorldError) as caught:
        run(2, program)
    assert list(caught.value.errors) == [1, 0]
    assert isinstance(caught.value.errors[0], PeerFailedError)
    assert "ValueError: the cause" in str(caught.value.errors[0])


def test_a_rank_that_exits_has_failed():
    with pytest.raises(WorldError, match="exit code 3"):
        run(1, lambda rank: sys.exit(3), backend=None)


def test_a_hang_is_a_failure_that_shows_where():
    def stuck(rank: int) -> None:
        while rank == 1:
            time.sleep(0.01)

    started = time.monotonic()
    with pytest.raises(WorldError) as caught:
        run(2, stuck, backend=None, timeout=0.5)
    assert time.monotonic() - started < 3
    assert list(caught.value.errors) == [1]
    assert "time.sleep(0.01)" in str(caught.value)
    assert "in stuck" in str(caught.value)
    assert "left behind" not in str(caught.value)


def test_ranks_that_do_not_notice_a_failure_are_ended_after_the_grace_time(monkeypatch):
    monkeypatch.setattr("phalanx.testing.world._GRACE", 0.2)

    def program(rank: int) -> None:
        if rank == 1:
            raise ValueError("the cause")
        while True:
            time.sleep(0.01)

    started = time.monotonic()
    with pytest.raises(WorldError) as caught:
        run(2, program, backend=None, timeout=20)
    assert time.monotonic() - started < 5
    assert [o.ending for o in caught.value.outcomes] == [Ending.ENDED, Ending.RAISED]
    assert str(caught.value).index("the cause") < str(caught.value).index("rank 0 ")


def test_outcomes_instead_of_an_error():
    def program(rank: int) -> str:
        if rank == 0:
            raise KeyError("gone")
        return "well"

    outcomes: list[Outcome] = run(2, program, backend=None, raises=False)
    assert [o.ending for o in outcomes] == [Ending.RAISED, Ending.RETURNED]
    assert isinstance(outcomes[0].error, KeyError)
    assert outcomes[1].value == "well"
    assert all(0 <= o.at < 5 for o in outcomes)


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"over": "fibres"}, 'over="threads"'),
        ({"env": {"A": "1"}}, 'over="processes"'),
        ({"timeout": 0}, "more than 0 seconds"),
    ],
)
def test_a_call_that_cannot_be_right_says_so(keywords: dict, text: str):
    with pytest.raises(MisuseError, match=text):
        run(1, total, **keywords)


def test_a_world_in_a_world_of_threads_says_so():
    def program(rank: int) -> None:
        run(1, total, backend="gloo")

    with pytest.raises(WorldError, match="while another such world runs"):
        run(1, program, backend="gloo")


def test_seeded_gives_every_rank_the_same_model_and_leaves_the_generator_alone():
    def program(rank: int) -> torch.Tensor:
        with seeded(7):
            time.sleep(0.002)  # so that the others come between, if they can
            return torch.rand(3)

    before = torch.random.get_rng_state()
    drawn = run(4, program, backend=None)
    assert all(torch.equal(numbers, torch.rand(3, generator=generator(7))) for numbers in drawn)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(torch.rand(3, generator=generator(1)), torch.rand(3, generator=generator(1)))


def test_a_fault_fires_once_and_is_on_record(tmp_path):
    faults = Faults([Fault(rank=1, step=2, at=Point.BEFORE_REDUCE, kind=Kind.RAISE)], record=tmp_path)

    def program(rank: int) -> int:
        for step in range(4):
            faults.point(rank, step, Point.BEFORE_FORWARD)
            faults.point(rank, step, Point.BEFORE_REDUCE)
        return rank

    assert faults.fired() == []
    text = "rank 1 raises an exception at step 2, before the reduction"
    with pytest.raises(WorldError, match=text) as caught:
        run(2, program, backend=None)
    assert isinstance(caught.value.errors[1], FaultError)
    assert list(caught.value.errors) == [1]
    assert faults.fired() == faults.planned
    assert run(2, program, backend=None) == [0, 1]


def test_faults_that_fire_are_told_in_order_of_time(tmp_path):
    late = Fault(rank=0, step=1, at=Point.BETWEEN, kind=Kind.SLEEP, seconds=0.01)
    early = Fault(rank=0, step=0, at=Point.BETWEEN, kind=Kind.SLEEP, seconds=0.01)
    never = Fault(rank=0, step=5, at=Point.BETWEEN, kind=Kind.SLEEP)
    faults = Faults([late, early, never], record=tmp_path)
    started = time.monotonic()
    for step in range(2):
        faults.point(0, step, Point.BETWEEN)
    assert time.monotonic() - started >= 0.02
    assert faults.fired() == [early, late]


@pytest.mark.parametrize("kind", [Kind.KILL, Kind.EXIT, Kind.STOP])
def test_a_fault_that_would_end_the_test_itself_is_refused(kind: Kind, tmp_path):
    faults = Faults([Fault(rank=0, step=0, at=Point.IN_REDUCE, kind=kind)], record=tmp_path)
    with pytest.raises(WorldError, match="would end the whole test"):
        run(1, lambda rank: faults.point(rank, 0, Point.IN_REDUCE), backend=None)
    assert faults.fired() == []


COLLECTING = """
import gc, time, torch
from phalanx.testing import run

def program(rank):
    until = time.monotonic() + 1
    while time.monotonic() < until:
        for _ in range(20):
            cycle = [torch.ones(1)]
            cycle.append(cycle)
        with torch.random.fork_rng():
            pass

if __name__ == "__main__":
    gc.set_threshold(5)
    run(2, program)
    assert torch.get_rng_state.__closure__ is None  # torch's own again
"""


def test_the_random_state_can_be_read_by_all_ranks_while_garbage_is_collected() -> None:
    """In a process of its own: what can go wrong holds the interpreter's lock for ever."""
    subprocess.run([sys.executable, "-c", COLLECTING], timeout=60, check=True)
