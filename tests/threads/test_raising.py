"""Steps that raise: in forward or backward, on all ranks or on one, and the good step after them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from phalanx import DistributedDataParallel, PeerFailedError
from phalanx.reduce import memory
from phalanx.testing import run
from phalanx.transport.pieces import Cut
from tests.threads.small_models import Branches, ddp, one, same_on_all, values, x_of


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise ZeroDivisionError("in the middle of backward")
        return grad, None


class MayFail(Branches):
    """Backward raises between b and a."""

    fails = False

    def forward(self, x: Tensor, way: str | None = None) -> Tensor:
        return self.b(Fails.apply(self.a(x), self.fails))


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_backward_that_raised_on_all_ranks_then_a_good_step(reset: bool, n: int):
    def program(rank: int) -> list:
        model, seen = ddp(MayFail()), []
        model(x_of(rank)).sum().backward()
        for _ in range(2):
            model.zero_grad(set_to_none=reset)
            model.module.fails = True
            with pytest.raises(ZeroDivisionError):
                model(x_of(rank)).sum().backward()
            model.module.fails = False
            model.zero_grad(set_to_none=reset)
            model(x_of(rank)).sum().backward()
            seen.append(values(model))
        return seen

    mean = (n + 1) / 2
    assert same_on_all(n, program) == [{"a.weight": mean, "b.weight": mean}] * 2


@pytest.mark.parametrize("direct", [3, 1], ids=["pieces", "segments"])
@pytest.mark.parametrize("reset", [True, False])
def test_a_reduction_that_fails_between_pieces_leaves_every_contribution_as_it_was(
    reset: bool, direct: int, monkeypatch: pytest.MonkeyPatch
):
    """So that survivors can repeat the step. With reset=False gradients lie where results go."""
    monkeypatch.setattr(memory, "CUT", Cut(64, direct, common=0, small=32))

    def program(rank: int) -> tuple[Tensor, Tensor]:
        model = DistributedDataParallel(nn.Linear(100, 1, bias=False))
        x = torch.full((1, 100), rank + 1.0)
        model(x).sum().backward()
        model.zero_grad(set_to_none=reset)
        with model.no_sync():
            model(x).sum().backward()
        given = model.module.weight.grad.clone()
        shared = model._reducer.places.memory.shared

        def fail(post: Callable[[int, int, float], None], piece: int, turn: int, factor: float) -> None:
            if rank == 1 and piece == 3:
                raise OSError("no memory")
            post(piece, turn, factor)

        for each in (shared, shared.halves):
            each.post = partial(fail, each.post)
        with pytest.raises(OSError if rank == 1 else PeerFailedError) as caught:
            model(x).sum().backward()
        model._group.announce_failure(caught.value)
        return given, model.module.weight.grad

    for given, left in run(2, program):
        assert torch.equal(left, 2 * given)


def test_after_a_backward_that_raised_only_what_fired_has_a_gradient():
    def program(rank: int) -> dict:
        model = ddp(MayFail())
        model.module.fails = True
        with pytest.raises(ZeroDivisionError):
            model(x_of(rank)).sum().backward()
        with torch.no_grad():
            model(x_of(rank))
        return values(model)

    assert run(2, program) == [{"a.weight": None, "b.weight": 1.0}, {"a.weight": None, "b.weight": 2.0}]


def test_a_forward_that_raised_then_a_good_step():
    def program(rank: int) -> float:
        model = ddp(one())
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 7))
        model(x_of(rank)).sum().backward()
        return values(model)["weight"]

    assert same_on_all(2, program) == 1.5


def test_a_backward_that_raised_inside_no_sync_then_a_good_step():
    def program(rank: int) -> dict:
        model = ddp(MayFail())
        model.module.fails = True
        with pytest.raises(ZeroDivisionError), model.no_sync():
            model(x_of(rank)).sum().backward()
        model.zero_grad()
        model.module.fails = False
        model(x_of(rank)).sum().backward()
        return values(model)

    assert same_on_all(2, program) == {"a.weight": 1.5, "b.weight": 1.5}


def test_a_backward_that_raised_on_one_rank_and_is_skipped_there():
    def program(rank: int) -> dict:
        model = ddp(MayFail())
        model.module.fails = rank == 1
        try:
            model(x_of(rank)).sum().backward()
        except ZeroDivisionError:
            model.zero_grad()
            model.skip()
        return values(model)

    assert same_on_all(2, program) == {"a.weight": 1.0, "b.weight": 1.0}
