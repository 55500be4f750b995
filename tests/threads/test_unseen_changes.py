"""What users change between the forwards of the wrapper: gradients given other memory, parameters of another form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

from phalanx import MisuseWarning
from phalanx.testing import generator, oracle, run
from tests.threads.small_models import ddp, filled, one, same_on_all, x_of


@pytest.fixture(params=["auto", "gloo"], autouse=True)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_TRANSPORT", request.param)


def nothing(_: Tensor) -> None:
    pass


def data(gradient: Tensor) -> Tensor:
    return gradient.data


def a_view(gradient: Tensor) -> Tensor:
    return gradient.detach()[:]


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("keep", [nothing, data, a_view], ids=lambda keep: keep.__name__)
@pytest.mark.parametrize("layers", [1, 3])
def test_a_gradient_that_was_given_other_data_is_gone_when_it_is_dropped(
    layers: int, keep: Callable[[Tensor], Tensor | None], to_none: bool
) -> None:
    """What somebody keeps of the old data keeps its values."""

    def program(rank: int) -> list[float]:
        model, seen, kept = ddp(nn.Sequential(*(one() for _ in range(layers)))), [], []
        for step in range(4):
            model(x_of(rank) * 10**step).sum().backward()
            for p in model.parameters():
                kept.append((keep(p.grad), 1.5 * 10**step))
                seen.append(p.grad.item() / 10**step)
                p.grad.data = p.grad.data * 0.5  # clipping by hand
            model.zero_grad(set_to_none=to_none)
        assert all(each is None or each.item() == value for each, value in kept)
        return seen

    assert same_on_all(2, program) == [1.5] * 4 * layers


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


def a_child_of_a_childless_layer(model: Convolved) -> None:
    model.conv.adapter = filled(nn.Conv2d(2, 3, 3), seed=3)
    model.conv.register_forward_hook(lambda conv, inputs, output: output + conv.adapter(inputs[0]))


def the_first_parameter_of_a_module(model: Convolved) -> None:
    model.scale = nn.Parameter(torch.full((2,), 0.5))
    model.register_forward_hook(lambda model, _, output: output * model.scale)


def one_less(model: Convolved) -> None:
    model.conv.bias = None


CHANGES = [
    channels_last, one_layer_in_double, all_in_double, another_shape, another_layer, one_more_layer, swapped,
    a_child_of_a_childless_layer, the_first_parameter_of_a_module, one_less,
]  # fmt: skip


def _batch(rank: int) -> Tensor:
    return torch.randn(2, 2, 5, 5, generator=generator(rank))


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def _expected(change: Callable[[Convolved], None]) -> oracle.Gradients:
    truth = filled(Convolved())
    change(truth)
    return oracle.gradients(truth, _loss, [[_batch(rank)] for rank in range(2)])


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("wrapper", [True, False], ids=["model(x)", "model.module(x)"])
def test_gradients_after_a_change_are_the_mean_and_have_the_form_of_their_parameter(
    change: Callable[[Convolved], None], wrapper: bool
) -> None:
    def program(rank: int) -> list[oracle.Gradients]:
        seen = []
        for zeroed in (True, False):
            model = ddp(filled(Convolved()))
            _loss(model, _batch(rank)).backward()
            if zeroed:
                model.zero_grad()
            change(model.module)
            for _ in range(2):
                model.zero_grad()
                _loss(model if wrapper else model.module, _batch(rank)).backward()
                seen.append(oracle.gradients_of(model))
                for p in model.parameters():
                    assert (p.grad.dtype, p.grad.stride()) == (p.dtype, p.stride())
        return seen

    for seen in run(2, program):
        for gradients in seen:
            oracle.assert_close(gradients, _expected(change), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("change", [channels_last, swapped, one_less], ids=lambda change: change.__name__)
@pytest.mark.parametrize("wrapper", [True, False], ids=["model(x)", "model.module(x)"])
@pytest.mark.filterwarnings("error::phalanx.MisuseWarning")
def test_a_change_between_two_micro_batches(change: Callable[[Convolved], None], wrapper: bool) -> None:
    """What has accumulated of other parameters is synchronised too."""

    def program(rank: int) -> oracle.Gradients:
        model = ddp(filled(Convolved()))
        with model.no_sync():
            _loss(model, _batch(rank)).backward()
        model.module.zero_grad()
        change(model.module)
        with model.no_sync():
            _loss(model if wrapper else model.module, _batch(rank)).backward()
        _loss(model if wrapper else model.module, _batch(rank)).backward()
        return oracle.gradients_of(model)

    expected = {name: None if gradient is None else 2 * gradient for name, gradient in _expected(change).items()}
    for gradients in run(2, program):
        oracle.assert_close(gradients, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("change", [channels_last, all_in_double, another_layer], ids=lambda change: change.__name__)
@pytest.mark.parametrize("forward", [True, False])
def test_a_rank_that_skips_the_first_step_after_a_change(change: Callable[[Convolved], None], forward: bool) -> None:
    def program(rank: int) -> oracle.Gradients:
        model = ddp(filled(Convolved()))
        _loss(model, _batch(rank)).backward()
        model.zero_grad()
        change(model.module)
        if rank == 0:
            if forward:
                model(_batch(rank))
            model.skip()
        else:
            _loss(model, _batch(rank)).backward()
        return oracle.gradients_of(model)

    truth = filled(Convolved())
    change(truth)
    expected = oracle.gradients(truth, _loss, [[_batch(1)]])
    for gradients in run(2, program):
        oracle.assert_close(gradients, expected, rtol=1e-5, atol=1e-6)


class Late(nn.Module):
    """Makes a layer at one of its calls."""

    def __init__(self, at_call: int) -> None:
        super().__init__()
        self.layers, self.at_call = nn.ModuleList([one()]), at_call

    def forward(self, x: Tensor) -> Tensor:
        self.at_call -= 1
        if not self.at_call:
            self.layers.append(one())
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("at_call", [1, 3])
@pytest.mark.parametrize("how", ["ddp", "functional_call", "mixed precision"])
def test_a_layer_that_a_forward_makes(how: str, at_call: int) -> None:
    def program(rank: int) -> list[list[float]]:
        mixed = _MixedPrecision(param_dtype=torch.float32) if how == "mixed precision" else None
        model, seen = ddp(Late(at_call), mixed_precision=mixed), []
        for _ in range(4):
            if how == "functional_call":
                output = torch.func.functional_call(model, dict(model.named_parameters()), (x_of(rank),))
            else:
                output = model(x_of(rank))
            output.sum().backward()
            seen.append([p.grad.item() for p in model.parameters()])
            model.zero_grad()
        return seen

    assert same_on_all(2, program) == [[1.5]] * (at_call - 1) + [[1.5, 1.5]] * (5 - at_call)


def test_what_is_held_back_stays_when_another_layer_is_unfrozen() -> None:
    def program(rank: int) -> list[float]:
        plain = nn.Sequential(one(), one())
        plain[1].requires_grad_(False)
        model = ddp(plain)
        model.sync_policy("0", every=2)
        model(x_of(rank)).sum().backward()
        plain[1].requires_grad_(True)
        model.zero_grad()
        model(10 * x_of(rank)).sum().backward()
        return [p.grad.item() for p in plain.parameters()]

    assert same_on_all(2, program) == [16.5, 15.0]


def test_what_has_accumulated_stays_when_a_layer_gets_another_name_and_is_frozen() -> None:
    def program(rank: int) -> list[float]:
        model = ddp(nn.Sequential(one()))
        with model.no_sync():
            model(x_of(rank)).sum().backward()
        model.module[0].requires_grad_(False)
        model.module[0] = nn.Sequential(model.module[0], one())
        model(10 * x_of(rank)).sum().backward()
        return [p.grad.item() for p in model.parameters()]

    assert same_on_all(2, program) == [1.5, 15.0]


def test_a_first_buffer_that_comes_later_is_rank_0s() -> None:
    def program(rank: int) -> float:
        model = ddp(one())
        model.module.register_buffer("rank", torch.tensor(float(rank)))
        model(x_of(rank)).sum().backward()
        model(x_of(rank)).sum().backward()
        return model.module.rank.item()

    assert run(2, program) == [0.0, 0.0]


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
