"""What users change between the forwards of the wrapper: gradients given other memory, parameters of another form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from phalanx import MisuseWarning
from phalanx.testing import generator, oracle, run
from tests.threads.small_models import ddp, filled, one, same_on_all, x_of


@pytest.fixture(params=["auto", "gloo"], autouse=True)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_TRANSPORT", request.param)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("alias", [True, False], ids=["the old data are kept", "dropped"])
def test_a_gradient_that_was_given_other_data_is_gone_when_it_is_dropped(alias: bool, to_none: bool) -> None:
    def program(rank: int) -> list[float]:
        model, seen, kept = ddp(one()), [], []
        weight = model.module.weight
        for _ in range(4):
            model(x_of(rank)).sum().backward()
            seen.append(weight.grad.item())
            if alias:
                kept.append(weight.grad.data)
            weight.grad.data = weight.grad.data * 0.5  # clipping by hand
            model.zero_grad(set_to_none=to_none)
        assert all(each.item() == 1.5 for each in kept)
        return seen

    assert same_on_all(2, program) == [1.5] * 4


def test_other_data_and_then_another_gradient_are_accumulated_onto() -> None:
    def program(rank: int) -> list[float]:
        model, seen = ddp(one()), []
        weight = model.module.weight
        for given in (10.0, 20.0):
            model(x_of(rank)).sum().backward()
            weight.grad.data = torch.full((1, 1), given)
            seen.append(weight.grad.item())
            model(x_of(rank)).sum().backward()
            seen.append(weight.grad.item())
            weight.grad = torch.full((1, 1), 3 * given)
            model(x_of(rank)).sum().backward()
            seen.append(weight.grad.item())
            model.zero_grad()
        return seen

    assert same_on_all(2, program) == [10.0, 11.5, 31.5, 20.0, 21.5, 61.5]


# ------------------------------------------------------------------ parameters


class Convolved(nn.Module):
    """A convolution and a linear layer, of which tests change one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x.to(self.conv.weight.dtype)).tanh().mean((2, 3))
        return self.head(x.to(self.head.weight.dtype))


def channels_last(model: Convolved) -> None:
    model.to(memory_format=torch.channels_last)


def one_layer_in_double(model: Convolved) -> None:
    model.head.double()


def all_in_double(model: Convolved) -> None:
    model.double()


def another_shape(model: Convolved) -> None:
    model.head.weight.data = torch.full((4, 3), 0.25)
    model.head.bias.data = torch.full((4,), 0.5)


def another_layer(model: Convolved) -> None:
    model.head = filled(nn.Linear(3, 5), seed=1)


def one_more_layer(model: Convolved) -> None:
    model.head = nn.Sequential(filled(nn.Linear(3, 3), seed=2), model.head)
    model.head.weight = model.head[1].weight


def swapped(model: Convolved) -> None:
    torch.utils.swap_tensors(model.head.weight, nn.Parameter(torch.full((2, 3), 0.25)))


CHANGES = [channels_last, one_layer_in_double, all_in_double, another_shape, another_layer, one_more_layer, swapped]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("wrapper", [True, False], ids=["model(x)", "model.module(x)"])
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("zeroed", [True, False], ids=["without gradients", "with gradients"])
def test_gradients_after_a_change_are_the_mean_and_have_the_form_of_their_parameter(
    change: Callable[[Convolved], None], wrapper: bool, local: bool, zeroed: bool
) -> None:
    def build() -> Convolved:
        return filled(Convolved())

    def x(rank: int) -> Tensor:
        return torch.randn(2, 2, 5, 5, generator=generator(rank))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    def program(rank: int) -> list[oracle.Gradients]:
        model, seen = ddp(build()), []
        loss(model, x(rank)).backward()
        if zeroed:
            model.zero_grad()
        change(model.module)
        for _ in range(2):
            model.zero_grad()
            if local:
                with model.no_sync():
                    loss(model if wrapper else model.module, x(rank)).backward()
            loss(model if wrapper else model.module, x(rank)).backward()
            seen.append(oracle.gradients_of(model))
            for p in model.parameters():
                assert (p.grad.dtype, p.grad.stride()) == (p.dtype, p.stride())
        return seen

    truth = build()
    change(truth)
    expected = oracle.gradients(truth, loss, [[x(rank)] for rank in range(2)])
    if local:
        expected = {name: None if gradient is None else 2 * gradient for name, gradient in expected.items()}
    for seen in run(2, program):
        for gradients in seen:
            oracle.assert_close(gradients, expected, rtol=1e-5, atol=1e-6)


@contextmanager
def _warning_of_a_step(expected: bool) -> Iterator[None]:
    if expected:
        with pytest.warns(MisuseWarning, match="unsynchronised-step"):
            yield
    else:
        yield


@pytest.mark.parametrize("wrapper", [True, False], ids=["model(x)", "model.module(x)"])
@pytest.mark.filterwarnings("error::phalanx.MisuseWarning")
def test_a_step_on_parameters_that_no_forward_of_the_wrapper_has_seen_is_warned_of(wrapper: bool) -> None:
    """No hook runs when all of them are new."""

    def program(rank: int) -> None:
        model = ddp(one())
        model(x_of(rank)).sum().backward()
        model.module.weight = nn.Parameter(torch.ones(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (model if wrapper else model.module)(x_of(rank)).sum().backward()
        optimizer.step()

    with _warning_of_a_step(not wrapper):
        run(2, program)
