"""SyncBatchNorm on N ranks is one BatchNorm over the whole batch: forward, statistics and all gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import Function, gradcheck, gradgradcheck

from phalanx.nn import batch_norm_function
from phalanx.nn.sync_batchnorm import SyncBatchNorm
from phalanx.testing import run
from tests.threads.batch_norm_cases import FORMATS, TOLERANCE, Case, OneBatchNorm, check, relative


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple),
    features=st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
    affine=st.booleans(),
    bias=st.booleans(),
    tracked=st.booleans(),
    momentum=st.sampled_from([0.1, 0.7, 1.0, None]),
    steps=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_any_split_equals_one_batch_norm(**options):
    case = Case(**options)
    whole = case.batch(0)[0]
    assume(whole.numel() != whole.size(1))  # One value per channel: an error, see below.
    check(case)


@pytest.mark.parametrize(
    "case",
    [
        Case((6, 10), (8,), torch.float32),
        Case((30, 2, 0), (4, 9), torch.float32),
        Case((5, 3), (3, 8, 8), torch.float32),
        Case((5, 3), (3, 8, 8), torch.float32, "channels_last"),
        Case((1, 4), (3, 4, 4, 4), torch.float32, "channels_last_3d", momentum=None, steps=2),
        Case((4, 4), (3, 8, 6), torch.float32, "transposed"),
        Case((3, 4), (5, 6), torch.float64, "transposed"),
        Case((0, 3), (3, 4, 5), torch.float64, "channels_last"),
        Case((5, 3), (3, 8, 8), torch.float16),
        Case((2, 0, 6), (3, 8, 8), torch.bfloat16, "channels_last"),
        Case((20, 4), (6,), torch.bfloat16, affine=False),
        Case((5, 0, 3), (4,), torch.float64, tracked=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("at_once", [40, 2**17])
def test_types_and_memory_formats(case, at_once, monkeypatch):
    monkeypatch.setattr(batch_norm_function, "_ELEMENTS_AT_ONCE", at_once)  # In pieces, and as a whole.
    check(case)


@pytest.mark.parametrize("format", ["contiguous", "channels_last"])
def test_output_and_gradient_keep_the_memory_format(format):
    case = Case((2, 3), dtype=torch.float32, format=format)

    def program(rank: int) -> list[bool]:
        input = case.part(case.batch(0)[0], rank).requires_grad_()
        output = case.layer(SyncBatchNorm)(input)
        grad = torch.autograd.grad(output.square().sum(), input)[0]  # backward() would lay it out anew.
        return [t.is_contiguous(memory_format=FORMATS[format]) for t in (output, grad)]

    assert run(2, program) == [[True, True]] * 2


def test_a_mean_far_from_zero_costs_no_digits_of_the_variance():
    case = Case((400, 300), (4,), torch.float32, momentum=1.0, shift=3000.0)

    def program(rank: int) -> tuple[float, float]:
        layer, whole = case.layer(SyncBatchNorm), case.batch(0)[0]
        layer(case.part(whole, rank))
        return (
            relative(layer.running_mean, whole.double().mean(0)),
            relative(layer.running_var, whole.double().var(0)),
        )

    for mean, variance in run(2, program):
        assert mean < 1e-7 and variance < 1e-6  # E[x^2] - E[x]^2 in float32 has no digit here.


def test_neighbours_in_float32_have_a_variance_about_a_mean_that_float32_has_not():
    def program(rank: int) -> float:
        layer = SyncBatchNorm(1, momentum=1.0)
        layer(torch.tensor([[2.0**24], [2.0**24 + 2]]))
        return layer.running_var.item()

    assert run(2, program) == pytest.approx([4 / 3] * 2)


def test_a_large_batch_in_float32_is_summed_without_loss():
    case = Case((3000, 2000), (2, 40), torch.float32, momentum=1.0)

    def program(rank: int) -> list[float]:
        layer, (whole, grad) = case.layer(SyncBatchNorm), case.batch(0)
        truth, wide = case.layer(OneBatchNorm).double(), whole.double().requires_grad_()
        input = case.part(whole, rank).clone().requires_grad_()
        layer(input).backward(case.part(grad, rank))
        truth(wide).backward(grad.double())
        sums = torch.stack([layer.weight.grad, layer.bias.grad])
        dist.all_reduce(sums)
        return [
            relative(input.grad, case.part(wide.grad, rank)),
            relative(layer.running_var, truth.running_var),
            relative(sums, torch.stack([truth.weight.grad, truth.bias.grad])),
        ]

    for errors in run(2, program):
        assert max(errors) < 1e-6


def test_a_model_in_half_precision_throughout():
    case = Case((3, 5), (4,), torch.bfloat16)

    def program(rank: int) -> None:
        layer, truth = case.layer(SyncBatchNorm).bfloat16(), case.layer(OneBatchNorm).bfloat16()
        whole, grad = case.batch(0)
        output, expected = layer(case.part(whole, rank)), truth(whole)
        output.backward(case.part(grad, rank))
        assert output.dtype == layer.weight.grad.dtype == layer.running_var.dtype == torch.bfloat16
        assert relative(output, case.part(expected, rank)) < TOLERANCE[torch.bfloat16]
        assert relative(layer.running_var, truth.running_var) < TOLERANCE[torch.bfloat16]

    run(2, program)


def test_under_autocast_it_does_as_batch_norm_does():
    case = Case((3, 5), (4,), torch.float32)

    def program(rank: int) -> None:
        linear, layer, truth = nn.Linear(4, 4), case.layer(SyncBatchNorm), case.layer(OneBatchNorm)
        nn.init.eye_(linear.weight)
        nn.init.zeros_(linear.bias)
        whole = case.batch(0)[0]
        with torch.autocast("cpu", torch.bfloat16):
            output, expected = layer(linear(case.part(whole, rank))), truth(linear(whole))
            assert layer(case.part(whole, rank)).dtype == truth(whole).dtype == torch.float32
            output.sum().backward()
        assert output.dtype == expected.dtype == torch.bfloat16
        assert layer.weight.grad.dtype == linear.weight.grad.dtype == torch.float32
        assert relative(output, case.part(expected, rank)) < TOLERANCE[torch.bfloat16]

    run(2, program)


# ---------------------------------------------------------------- derivatives


class Part(Function):
    """This rank's part of a tensor that all ranks have; its transpose is `Whole`."""

    @staticmethod
    def forward(ctx, whole, sizes):
        ctx.sizes = sizes
        return whole.split(sizes)[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx, grad):
        return Whole.apply(grad, ctx.sizes), None


class Whole(Function):
    """The concatenated parts of all ranks, on all ranks; its transpose is `Part`."""

    @staticmethod
    def forward(ctx, part, sizes):
        ctx.sizes = sizes
        whole = part.new_zeros(sum(sizes), *part.shape[1:])
        whole.split(sizes)[dist.get_rank()].copy_(part)
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx, grad):
        return Part.apply(grad, ctx.sizes), None


class Same(Function):
    """A tensor that all ranks have, and whose gradient is the sum of theirs; its transpose is `Sum`."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, grad):
        return Sum.apply(grad)


class Sum(Function):
    @staticmethod
    def forward(ctx, tensor):
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad):
        return Same.apply(grad)


@pytest.mark.parametrize("sizes", [(2, 1), (3, 0)])
def test_gradcheck_and_gradgradcheck(sizes):
    """As a function of the whole batch that all ranks have, so that all see one function and one Jacobian."""
    case = Case(sizes, (2, 2))

    def program(rank: int) -> bool:
        layer = case.layer(SyncBatchNorm)

        def function(whole: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            named = {"weight": Same.apply(weight), "bias": Same.apply(bias)}
            output = torch.func.functional_call(layer, named, Part.apply(whole, sizes))
            return Whole.apply(output, sizes)

        whole, grad = (t.requires_grad_() for t in case.batch(0))
        inputs = (whole, *(p.detach().requires_grad_() for p in layer.parameters()))
        return gradcheck(function, inputs) and gradgradcheck(function, inputs, grad)

    assert run(2, program) == [True, True]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_gradient_penalty_equals_that_of_one_batch_norm(dtype):
    case = Case((4, 0, 3), dtype=dtype)

    def penalty(layer: nn.Module, input: Tensor, grad: Tensor) -> Tensor:
        inner = torch.autograd.grad(layer(input).tanh(), input, grad, create_graph=True)[0]
        inner.square().sum().backward()
        return inner

    def program(rank: int) -> list[float]:
        layer, truth = case.layer(SyncBatchNorm), case.layer(OneBatchNorm)
        whole, grad = case.batch(0)
        input = case.part(whole, rank).clone().requires_grad_()
        inner = penalty(layer, input, case.part(grad, rank))
        expected = penalty(truth, whole.requires_grad_(), grad)
        weight = layer.weight.grad
        dist.all_reduce(weight)
        return [
            relative(inner, case.part(expected, rank), expected),
            relative(input.grad, case.part(whole.grad, rank), whole.grad),
            relative(weight, truth.weight.grad),
        ]

    for errors in run(3, program):
        assert max(errors) < (1e-12 if dtype is torch.float64 else 2e-6)
