"""Ranks on several hosts, several on some: what each host adds up first is what all ranks get in the end."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx import CollectiveTimeoutError, PeerFailedError, clip_grad_norm_
from phalanx.reduce import memory
from phalanx.testing import generator, run
from phalanx.testing.thread_world import seeded
from phalanx.transport import hosts
from phalanx.transport.backend import Backend
from phalanx.transport.between import hosts_of, lanes_of
from phalanx.transport.pieces import Cut
from tests import collective_programs as programs
from tests.threads.pretended_hosts import pretend_hosts
from tests.threads.small_models import ddp

WORLDS = [(2, 1), (1, 1, 2), (2, 2), (3, 1)]
each_world = pytest.mark.parametrize("sizes", WORLDS, ids=str)


@pytest.fixture(autouse=True)
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "sizes" in request.fixturenames:
        pretend_hosts(monkeypatch, request.getfixturevalue("sizes"))


def test_hosts_and_lanes() -> None:
    assert hosts_of([[0, 1], [1, 0], [2]]) == [[0, 1], [2]]
    assert hosts_of([[0, 2], [1], [0, 2]]) == [[0, 2], [1]]
    assert hosts_of([[0], [0, 1]]) == []  # they do not agree
    assert hosts_of([[0, 1], [0, 1, 2], [1, 2]]) == []
    assert lanes_of([[0, 1, 2], [3, 4]]) == [[0, 3], [1, 4]]


@each_world
@pytest.mark.parametrize("slot", [4096, hosts.SLOT_BYTES])
def test_collectives(sizes: tuple[int, ...], slot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "SLOT_BYTES", slot)

    def program(rank: int) -> int:
        assert dist.group.WORLD.transport.name == "shared memory and gloo"
        made = programs.every_copy(rank, dtypes=[torch.float32, torch.bool]) + programs.every_reduction(rank)
        for count in (1, 5000, 12345):
            summed = programs.values(rank, count, torch.int64)
            dist.all_reduce(summed)
            assert torch.equal(summed, sum(programs.values(r, count, torch.int64) for r in range(sum(sizes))))
        return made

    assert set(run(sum(sizes), program, timeout=60)) == {9 * 2 * 3 + 3 * 5 + 3 * 8 + 7}


@pytest.mark.parametrize("sizes", [(2, 1)])
@pytest.mark.parametrize("part", [programs.sizes_and_splits, programs.asynchronous, programs.sub_groups])
def test_other_calls(sizes: tuple[int, ...], part: Any) -> None:
    run(3, part, timeout=60)


class Given(nn.Module):
    """Parameters whose gradients are what is given to forward."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(count, dtype=dtype) for count in (5, 3000, 1, 700))

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return self.without_first(gradients) + (self.parts[0] * gradients[0]).sum()

    def without_first(self, gradients: list[Tensor]) -> Tensor:
        return sum((p * g).sum() for p, g in zip(self.parts[1:], gradients[1:], strict=True))


def numbers(rank: int, at: int, dtype: torch.dtype) -> list[Tensor]:
    """Whole numbers, so that sums in float32 are exact; not so in half precision."""
    dice = generator(100 * at + rank)
    return [torch.randint(-999, 1000, (count,), generator=dice).to(dtype) for count in (5, 3000, 1, 700)]


@each_world
@pytest.mark.parametrize("cut", [Cut(4096, common=0, small=64), Cut()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_gradients_are_the_mean_rounded_once(
    sizes: tuple[int, ...], cut: Cut, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "CUT", cut)
    size = sum(sizes)

    def program(rank: int) -> None:
        model = ddp(Given(dtype))
        for at in range(4):
            model.zero_grad()
            model(numbers(rank, at, dtype)).backward()
            for place, parameter in enumerate(model.module.parts):
                total = sum(numbers(each, at, dtype)[place].double() for each in range(size))
                assert torch.equal(parameter.grad, (total / size).to(torch.float32).to(dtype)), (at, place)

    if dtype is torch.float64 and size == 3:
        dtype = torch.float32  # a third is rounded to float32 above
    run(size, program)


@each_world
def test_a_wire_carries_each_hosts_sum_once(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CUT", Cut(4096, common=0, small=64))
    begun: list[tuple[Any, int]] = []
    begin = Backend.begin

    def spied(self: Backend, total: Tensor, op: Any) -> Any:
        begun.append((self._rank, total.numel()))
        return begin(self, total, op)

    monkeypatch.setattr(Backend, "begin", spied)

    def program(rank: int) -> int:
        model = ddp(Given(torch.float32))
        dist.barrier()
        begun.clear()
        dist.barrier()
        model(numbers(rank, 0, torch.float32)).backward()
        return sum(region.count for region in model._reducer.plan.regions)

    count = run(sum(sizes), program)[0]
    by_host = [sum(elements for host, elements in begun if host == each) for each in range(len(sizes))]
    assert by_host == [count] * len(sizes)


@each_world
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_together(sizes: tuple[int, ...], norm_type: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CUT", Cut(4096, common=0, small=64))

    def program(rank: int) -> list[float]:
        model, norms = ddp(Given(torch.float32)), []
        store = None
        for at in range(4):
            model.zero_grad()
            model(numbers(rank, at, torch.float32)).backward()
            twins = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
            for twin, p in zip(twins, model.parameters(), strict=True):
                twin.grad = p.grad.clone()
            expected = nn.utils.clip_grad_norm_(twins, 1.0, norm_type)
            assert torch.equal(clip_grad_norm_(model.parameters(), 1.0, norm_type), expected)
            for twin, p in zip(twins, model.parameters(), strict=True):
                assert torch.equal(twin.grad, p.grad)
            store = model._reducer.places.memory.shared
            assert store.shows_common
            norms.append(expected.item())
        return norms

    results = run(sum(sizes), program)
    assert results == [results[0]] * len(results)


@each_world
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_join_weigh_and_unused_parameters(
    sizes: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "CUT", Cut(4096, common=0, small=64))
    size = sum(sizes)

    def program(rank: int) -> None:
        model = ddp(Given(dtype))
        with model.join(divide_by_initial_world_size=False):
            for at in range(rank + 1):
                model.zero_grad()
                given = numbers(rank, at, dtype)
                loss = model(given) if rank % 2 else model.module.without_first(given)
                model.weigh(loss, rank + 1).backward()
                weights = {each: each + 1.0 for each in range(size) if each >= at}
                for place, parameter in enumerate(model.module.parts):
                    total = sum(
                        weight * numbers(each, at, dtype)[place].double()
                        for each, weight in weights.items()
                        if place or each % 2
                    )
                    expected = torch.as_tensor(total / sum(weights.values()), dtype=torch.float32)
                    shown = torch.zeros(()) if parameter.grad is None else parameter.grad
                    near = 1e-6 if dtype is torch.float64 else 0.01
                    assert torch.allclose(shown.float(), expected, rtol=near, atol=near), (at, place)

    run(size, program)


@each_world
def test_a_rank_that_fails_ends_all_others_at_once(sizes: tuple[int, ...]) -> None:
    size = sum(sizes)
    line = threading.Barrier(size)

    def program(rank: int) -> float:
        with seeded(0):
            layers = nn.Linear(300, 300)
        model = ddp(layers)
        model(torch.ones(2, 300)).sum().backward()
        line.wait(20)
        began = time.perf_counter()
        try:
            if rank == size - 1:
                raise ArithmeticError("made up")
            model(torch.ones(2, 300)).sum().backward()
        except ArithmeticError as error:
            dist.group.WORLD.announce_failure(error)
        except PeerFailedError as error:
            assert "made up" in str(error)
        else:
            raise AssertionError("no error")
        return time.perf_counter() - began

    assert max(run(size, program)) < 2


@pytest.mark.parametrize("sizes", [(2, 2)])
def test_a_rank_that_is_late_on_its_host_is_named_alone(sizes: tuple[int, ...]) -> None:
    line = threading.Barrier(4)

    def program(rank: int) -> None:
        core = dist.group.WORLD.core
        if rank == 0:
            core.timeout = 0.3
            with pytest.raises(CollectiveTimeoutError) as caught:
                core.fence_on_host()
            assert caught.value.missing == [1]
        line.wait(20)

    run(4, program)
