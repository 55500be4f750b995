"""Clipping by the norm of all gradients: what torch gives, and where ranks do it together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx import MisuseError, RankMismatchError, clip_grad_norm_
from phalanx.reduce import memory
from phalanx.testing import generator, run
from phalanx.testing.thread_world import seeded
from phalanx.transport.pieces import Cut
from phalanx.transport.shared_gradients import SharedGradients
from tests.threads.small_models import ddp, one, same_on_all, values, x_of

ALL_NORMS = [2.0, 1.0, 0.5, 3.0, float("inf"), float("-inf"), 0.0]


def step(model: nn.Module, rank: int, scale: float = 1.0) -> float:
    model(scale * x_of(rank)).sum().backward()
    return values(model)["weight"]


def test_clipping_in_a_hook_is_local_and_after_backward_global():
    def program(rank: int) -> tuple:
        model = ddp(one())
        handle = model.module.weight.register_hook(lambda grad: grad.clamp(max=1.0))
        clipped = step(model, rank)
        handle.remove()
        model.zero_grad()
        step(model, rank)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        return clipped, norm, values(model)["weight"]

    assert same_on_all(2, program) == (1.0, 1.5, pytest.approx(0.5, abs=1e-5))


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("size", [0.0, 0.7, 1.0, 1.3, float("inf"), float("nan")])
def test_what_no_rank_shares_is_clipped_as_torch_does(size: float, norm_type: float):
    theirs, ours = (nn.ParameterList([torch.zeros(2), torch.zeros(3), torch.zeros(1)]) for _ in range(2))
    for model in (theirs, ours):
        model[0].grad, model[1].grad = torch.tensor([0.0, size]), torch.zeros(3)
    norms = [
        nn.utils.clip_grad_norm_(theirs.parameters(), 1.0, norm_type),
        clip_grad_norm_(ours.parameters(), 1.0, norm_type),
    ]
    assert torch.equal(*map(torch.nan_to_num, norms)) and ours[2].grad is None
    for a, b in zip(theirs[:2], ours[:2], strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=0, atol=0, equal_nan=True)
    version = ours[0].grad._version
    norm = clip_grad_norm_(ours.parameters(), float("inf"), norm_type)
    expected = nn.utils.get_total_norm([theirs[0].grad, theirs[1].grad], norm_type)
    assert torch.equal(norm.nan_to_num(), expected.nan_to_num())
    assert ours[0].grad._version == version  # the norm was all that was asked for


def test_clipping_raises_what_torch_raises():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([0.0, float("nan")])
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_([], 1.0) == 0.0


def test_clipping_what_is_not_synchronised_is_refused():
    def program(rank: int) -> None:
        model = ddp(one())
        with model.no_sync():
            step(model, rank)
        with pytest.raises(MisuseError, match="weight"):
            clip_grad_norm_(model.parameters(), 1.0)

    run(2, program)


# ------------------------------------------------------------------ together


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Ranks share their gradients, in pieces; whenever rank 0 scales its part of them, that is noted here."""
    noted: list[str] = []
    scale = SharedGradients.scale_common

    def spied(self: SharedGradients, *arguments: Any) -> None:
        if self.rank == 0:
            noted.append("scaled")
        scale(self, *arguments)

    monkeypatch.setattr(memory, "CUT", Cut(4096, common=0, small=1024))
    monkeypatch.setattr(SharedGradients, "scale_common", spied)
    yield noted


def model_of(dtype: torch.dtype = torch.float32) -> Any:
    with seeded(0):
        layers = nn.Sequential(nn.Linear(6, 70), nn.Tanh(), nn.Conv1d(1, 3, 5), nn.Flatten(), nn.Linear(198, 7))
    return ddp(layers.to(dtype))


def backward(model: Any, rank: int, at: int = 0) -> None:
    model.zero_grad()
    x = torch.randn(5, 1, 6, generator=generator(10 * at + rank))
    model(x.to(next(model.parameters()).dtype)).square().mean().backward()


def gradients(model: Any) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.module.parameters()]


def twins_of(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters with copies of their gradients; the same one again where one is listed again."""
    twins = {id(parameter): nn.Parameter(parameter.detach().clone()) for parameter in parameters}
    for parameter in parameters:
        twins[id(parameter)].grad = None if parameter.grad is None else parameter.grad.clone()
    return [twins[id(parameter)] for parameter in parameters]


def check(parameters: list[nn.Parameter], *arguments: Any) -> float:
    """Clip in both ways, and compare; return the norm."""
    twins = twins_of(parameters)
    theirs = nn.utils.clip_grad_norm_(twins, *arguments)
    ours = clip_grad_norm_(parameters, *arguments)
    assert ours.dtype == theirs.dtype and torch.equal(ours.nan_to_num(), theirs.nan_to_num()), (ours, theirs)
    for twin, parameter in zip(twins, parameters, strict=True):
        assert (twin.grad is None) == (parameter.grad is None)
        if twin.grad is not None:
            assert torch.equal(twin.grad.nan_to_num(), parameter.grad.nan_to_num())
    return ours.item()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("norm_type", ALL_NORMS)
def test_ranks_that_clip_together_get_what_torch_gives(size: int, norm_type: float, shared: list[str]) -> None:
    def program(rank: int) -> list[float]:
        model = model_of()
        norms = []
        for at in range(4):
            backward(model, rank, at)
            norms.append(check(list(model.parameters()), 1e-3 if at % 2 else 1e3, norm_type))
        return norms

    norms = same_on_all(size, program)
    assert len(shared) == sum(norm > (1e-3 if at % 2 else 1e3) for at, norm in enumerate(norms))
    assert shared or norm_type == float("-inf")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype, shared: list[str]) -> None:
    def program(rank: int) -> float:
        model = model_of(dtype)
        backward(model, rank)
        return check(list(model.parameters()), 1e-3)

    same_on_all(2, program)
    assert shared


def test_clipped_gradients_are_shared_and_their_versions_tell(shared: list[str]) -> None:
    def program(rank: int) -> None:
        model = model_of()
        for at in range(3):
            backward(model, rank, at)
            before = [each._version for each in gradients(model)]
            clip_grad_norm_(model.parameters(), 1e-3)
            assert all(each._version > version for each, version in zip(gradients(model), before, strict=True))
            assert model._reducer.places.memory.shared.shows_common

    run(3, program)
    assert len(shared) == 3


def test_some_parameters_in_any_order_and_frozen_ones(shared: list[str]) -> None:
    def program(rank: int) -> list[float]:
        model = model_of()
        model.module[0].bias.requires_grad_(False)
        norms = []
        for at in range(3):
            backward(model, rank, at)
            listed = [parameter for place, parameter in enumerate(model.parameters()) if place != 2 + at]
            expected = nn.utils.get_total_norm([p.grad for p in listed if p.grad is not None])
            norms.append(clip_grad_norm_(iter(listed if rank else listed[::-1]), 1e-3).item())
            assert norms[-1] == pytest.approx(expected.item(), rel=1e-6)
            assert gradients(model)[2 + at].norm() > 1e-3  # not listed, not clipped
            assert nn.utils.get_total_norm([p.grad for p in listed if p.grad is not None]) < 1.01e-3
        return norms

    same_on_all(2, program)
    assert len(shared) == 3


def test_the_same_parameter_listed_twice(shared: list[str]) -> None:
    def program(rank: int) -> None:
        model = model_of()
        backward(model, rank)
        check([*model.parameters(), next(model.parameters())], 1e-3)

    run(2, program)
    assert shared


def test_asynchronous_collectives_come_first(shared: list[str]) -> None:
    def program(rank: int) -> None:
        model = model_of()
        for at in range(5):
            backward(model, rank, at)
            tensors = [torch.ones(1000) for _ in range(20)]
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            clip_grad_norm_(model.parameters(), 1e-3)
            for work, tensor in zip(works, tensors, strict=True):
                work.wait()
                assert torch.equal(tensor, torch.full((1000,), 2.0))

    run(2, program)
    assert len(shared) == 5


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_finite_norm(value: float, shared: list[str]) -> None:
    def program(rank: int) -> None:
        model = model_of()
        for at in range(3):
            backward(model, rank, at)
            if at < 2:
                model.zero_grad()
                (model(torch.ones(5, 1, 6)).sum() * (value if rank else 1.0)).backward()
            if at == 0:
                before = [each.nan_to_num() for each in gradients(model)]
                with pytest.raises(RuntimeError, match="non-finite"):
                    clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
                assert all(
                    torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(gradients(model), before, strict=True)
                )
            else:
                check(list(model.parameters()), 1e-3)

    run(2, program)
    assert len(shared) == 2


# ------------------------------------------------------------------ not together


def scaled(model: Any) -> None:
    torch._foreach_mul_(gradients(model), 2.0)


def written_through_numpy(model: Any) -> None:
    gradients(model)[0].numpy()[0] = 7.0


def replaced(model: Any) -> None:
    first = next(model.module.parameters())
    first.grad = first.grad.clone()


def replaced_data(model: Any) -> None:
    gradients(model)[1].data = torch.ones_like(gradients(model)[1])


def dropped(model: Any) -> None:
    next(model.module.parameters()).grad = None


def all_dropped(model: Any) -> None:
    model.zero_grad()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("change", [scaled, written_through_numpy, replaced, replaced_data, dropped, all_dropped])
def test_what_one_rank_has_changed_each_clips_alone(
    change: Callable[[Any], None], size: int, shared: list[str]
) -> None:
    def program(rank: int) -> None:
        model = model_of()
        for at in range(3):
            backward(model, rank, at)
            if at == 1 and rank == 1:
                change(model)
            check(list(model.parameters()), 1e-3)

    run(size, program)
    assert shared[0] == "scaled" and len(shared) < 3


def test_after_a_step_that_a_rank_has_skipped_each_clips_alone(shared: list[str]) -> None:
    def program(rank: int) -> None:
        model = model_of()
        for at in range(3):
            if at == 1 and rank == 1:
                model.zero_grad()
                model.skip()
            else:
                backward(model, rank, at)
            if at != 1 or rank != 1:
                check(list(model.parameters()), 1e-3)

    run(2, program)
    assert 1 <= len(shared) <= 2


def test_a_gradient_kept_from_the_step_before_is_not_clipped(shared: list[str]) -> None:
    def program(rank: int) -> None:
        model = model_of()
        backward(model, rank)
        kept = [each.detach() for each in gradients(model)]
        copies = [each.clone() for each in kept]
        for at in range(1, 4):
            backward(model, rank, at)
            check(list(model.parameters()), 1e-3)
            assert all(map(torch.equal, kept, copies))

    run(2, program)
    assert not shared  # where a gradient has been kept, they stay where autograd makes them


def test_ranks_that_clip_two_models_in_different_orders(shared: list[str]) -> None:
    def program(rank: int) -> None:
        models = [model_of(), model_of()]
        for at, model in enumerate(models):
            backward(model, rank, at)
        for model in models[::-1] if rank else models:
            check(list(model.parameters()), 1e-3)

    run(2, program)
    assert not shared


def test_ranks_that_list_different_parameters_twice(shared: list[str]) -> None:
    def program(rank: int) -> None:
        model = model_of()
        backward(model, rank)
        parameters = list(model.parameters())
        check([*parameters, parameters[rank]], 1e-3)

    run(2, program)
    assert not shared


def test_ranks_that_differ_in_what_is_an_error(shared: list[str]) -> None:
    def program(rank: int) -> None:
        model = model_of()
        backward(model, rank)
        model.zero_grad()
        (model(torch.ones(5, 1, 6)).sum() * float("nan")).backward()
        if rank:
            check(list(model.parameters()), 1e-3)
        else:
            with pytest.raises(RuntimeError, match="non-finite"):
                clip_grad_norm_(model.parameters(), 1e-3, error_if_nonfinite=True)

    run(2, program)
    assert not shared


def test_a_fork_while_a_rank_waits_for_the_other_to_clip(shared: list[str]) -> None:
    def program(rank: int) -> None:
        model = model_of()
        for at in range(3):
            backward(model, rank, at)
            if rank:
                time.sleep(0.2)
            else:  # what forking calls before
                forks = threading.Timer(0.1, model._reducer.places.memory.shared.keep_for_child)
                forks.start()
            check(list(model.parameters()), 1e-3)
            if not rank:
                forks.join()

    run(2, program)
    assert len(shared) == 3


def test_gradients_of_two_models(shared: list[str]) -> None:
    def program(rank: int) -> None:
        models = [model_of(), model_of()]
        for at, model in enumerate(models):
            backward(model, rank, at)
        check([*models[0].parameters(), *models[1].parameters()], 1e-3)

    run(2, program)
    assert not shared


def test_a_frozen_parameter_with_a_gradient_of_its_own(shared: list[str]) -> None:
    def program(rank: int) -> None:
        model = model_of()
        backward(model, rank)
        other = nn.Parameter(torch.zeros(3), requires_grad=False)
        other.grad = torch.full((3,), rank + 1.0)
        check([*model.parameters(), other], 1e-3)

    run(2, program)
    assert not shared


def test_ranks_that_clip_to_different_norms(shared: list[str]) -> None:
    def program(rank: int) -> None:
        model = model_of()
        backward(model, rank)
        check(list(model.parameters()), 1e-3 * (rank + 1))

    run(2, program)
    assert not shared


def test_one_rank_may_ask_for_the_norm(shared: list[str]) -> None:
    def program(rank: int) -> None:
        model = model_of()
        backward(model, rank)
        if rank == 0:
            expected = nn.utils.get_total_norm([p.grad for p in model.parameters()])
            assert torch.equal(clip_grad_norm_(model.parameters(), float("inf")), expected)
        backward(model, rank)

    run(2, program)


def test_a_rank_that_does_not_clip_is_named(shared: list[str]) -> None:
    def program(rank: int) -> str:
        model = model_of()
        backward(model, rank)
        with pytest.raises(RankMismatchError) as raised:
            if rank == 0:
                clip_grad_norm_(model.parameters(), 1.0)
            backward(model, rank)
        return str(raised.value)

    for said in run(2, program):
        assert "phalanx.clip_grad_norm_()" in said and "rank 1" in said
