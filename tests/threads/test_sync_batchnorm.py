"""SyncBatchNorm on N ranks is one BatchNorm over the whole batch: forward, running statistics, all gradients."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import Function, gradcheck, gradgradcheck

from phalanx.errors import MisuseError
from phalanx.nn.sync_batchnorm import SyncBatchNorm
from phalanx.testing import WorldError, generator, run

FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class OneBatchNorm(nn.modules.batchnorm._BatchNorm):
    """The truth: torch's BatchNorm, for an input of any number of dimensions."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


@dataclass(frozen=True)
class Case:
    """A batch, how it is split, and the layer's options."""

    sizes: tuple[int, ...]
    features: tuple[int, ...] = (3, 4, 5)
    dtype: torch.dtype = torch.float64
    format: str = "contiguous"
    affine: bool = True
    bias: bool = True
    tracked: bool = True
    momentum: float | None = 0.1
    steps: int = 1
    seed: int = 0
    shift: float = 1.0

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The input of all ranks, and the gradient that comes back."""
        shape, random = (sum(self.sizes), *self.features), generator(100 * self.seed + step)
        whole, grad = (torch.randn(shape, dtype=torch.float64, generator=random) for _ in range(2))
        return self._laid_out(whole * 2 + self.shift), self._laid_out(grad)

    def part(self, whole: Tensor, rank: int) -> Tensor:
        start = sum(self.sizes[:rank])
        return whole[start : start + self.sizes[rank]]

    def layer(self, kind: type[nn.Module]) -> nn.Module:
        """A layer with parameters of its own, in float32 for the half-precision types."""
        dtype = torch.promote_types(self.dtype, torch.float32)
        layer = kind(
            self.features[0], 1e-3, self.momentum, self.affine, self.tracked, dtype=dtype, bias=self.bias
        )  # fmt: skip
        random = generator(self.seed)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(1 + torch.rand(parameter.shape, generator=random))
        return layer

    def _laid_out(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self.dtype)
        if self.format == "transposed":
            return tensor.transpose(1, -1).contiguous().transpose(1, -1)
        return tensor.contiguous(memory_format=FORMATS[self.format])


def errors_on_a_rank(rank: int, case: Case) -> dict[str, float]:
    """The relative errors of this rank against one BatchNorm over the whole batch, over all steps."""
    layer, truth = case.layer(SyncBatchNorm), case.layer(OneBatchNorm)
    errors: dict[str, float] = {}
    for step in range(case.steps):
        whole, grad = case.batch(step)
        input = case.part(whole, rank).clone().requires_grad_()
        whole.requires_grad_()
        output, expected = layer(input), truth(whole)
        output.backward(case.part(grad, rank))
        expected.backward(grad)
        assert output.dtype == expected.dtype
        errors[f"output {step}"] = relative(output, case.part(expected, rank), expected)
        # The gradient is what is left of grad x weight / std, which may be next to nothing.
        size = whole.grad.norm().clamp(min=1e-3 * grad.norm())
        errors[f"input's gradient {step}"] = relative(input.grad, case.part(whole.grad, rank), size)
    for name, parameter in truth.named_parameters():
        mine = layer.get_parameter(name).grad.clone()
        dist.all_reduce(mine)
        errors[name] = relative(mine, parameter.grad)
    assert dict(layer.named_buffers()).keys() == dict(truth.named_buffers()).keys()
    for name, buffer in truth.named_buffers():
        errors[name] = relative(layer.get_buffer(name), buffer)
    return errors


def relative(actual: Tensor, expected: Tensor, scale: Tensor | None = None) -> float:
    """The norm of the difference over that of `scale` (`expected`, where not given)."""
    assert actual.shape == expected.shape
    size = (expected if scale is None else scale).double().norm()
    difference = (actual.double() - expected.double()).norm()
    return (difference / size).item() if difference or size.isnan() else 0.0


def check(case: Case) -> None:
    for rank, errors in enumerate(run(len(case.sizes), errors_on_a_rank, case)):
        wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE[case.dtype]}
        assert not wrong, f"on rank {rank} of {case}"


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
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
def test_types_and_memory_formats(case):
    check(case)


@pytest.mark.parametrize("format", ["contiguous", "channels_last"])
def test_output_and_gradient_keep_the_memory_format(format):
    case = Case((2, 3), dtype=torch.float32, format=format)

    def program(rank: int) -> list[bool]:
        input = case.part(case.batch(0)[0], rank).requires_grad_()
        output = case.layer(SyncBatchNorm)(input)
        output.square().sum().backward()
        return [t.is_contiguous(memory_format=FORMATS[format]) for t in (output, input.grad)]

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


def test_a_large_batch_in_float32_is_summed_without_loss():
    case = Case((3000, 2000), (2, 8), torch.float32, momentum=1.0)

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


# ---------------------------------------------------------------- few values, none, and what cannot be right


def test_a_batch_that_is_empty_on_all_ranks_changes_nothing():
    def program(rank: int) -> None:
        layer, input = SyncBatchNorm(3), torch.empty(0, 3, 2, requires_grad=True)
        layer(input).sum().backward()
        assert layer.running_mean.eq(0).all() and layer.running_var.eq(1).all()
        assert layer.num_batches_tracked == 1
        assert input.grad.shape == (0, 3, 2) and layer.weight.grad.eq(0).all() and layer.bias.grad.eq(0).all()

    run(2, program)


@pytest.mark.parametrize("features", [(3,), (3, 1, 1)])
def test_one_value_per_channel_is_torchs_error_on_every_rank(features):
    def program(rank: int) -> str:
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training") as caught:
            SyncBatchNorm(3)(torch.ones(int(rank == 1), *features))
        return str(caught.value)

    with pytest.raises(ValueError) as truth:
        OneBatchNorm(3)(torch.ones(1, *features))
    assert run(3, program) == [str(truth.value)] * 3


def test_one_value_on_each_of_two_ranks_is_enough():
    check(Case((1, 1), (3,)))


@pytest.mark.parametrize(
    ("input", "error", "match"),
    [
        (torch.ones(2), ValueError, "expected at least 2D input"),
        (torch.ones(2, 0), ValueError, "input channels should be non-zero"),
        (torch.ones(2, 4), MisuseError, r"\[rank 0\] SyncBatchNorm\(3\).*should contain 4 elements not 3"),
        (torch.ones(2, 3, dtype=torch.int64), MisuseError, "torch.int64"),
    ],
)
def test_a_wrong_input_is_an_error_before_anyone_waits(input, error, match):
    def program(rank: int) -> None:
        if rank == 0:
            with pytest.raises(error, match=match):
                SyncBatchNorm(3)(input)

    run(2, program, timeout=10)


# ---------------------------------------------------------------- communication


@pytest.fixture
def calls(monkeypatch):
    """The collectives that rank 0 calls from here on, by name."""
    names: list[str] = []
    for name in ("all_gather_single", "all_reduce"):
        collective = getattr(dist, name)

        def counting(*args, _name=name, _collective=collective, **keywords):
            if dist.get_rank() == 0:
                names.append(_name)
            return _collective(*args, **keywords)

        monkeypatch.setattr(dist, name, counting)
    return names


def test_one_collective_in_forward_and_one_in_backward(calls):
    def program(rank: int) -> None:
        layer = SyncBatchNorm(3)
        output = layer(torch.randn(rank, 3, requires_grad=True))
        dist.barrier()
        assert rank or calls == ["all_gather_single"]
        output.sum().backward()
        assert rank or calls == ["all_gather_single", "all_reduce"]
        layer(torch.randn(2, 3)).sum().backward()  # Nobody asks for the gradient of the input.
        assert rank or calls == ["all_gather_single", "all_reduce", "all_gather_single"]
        assert layer.weight.grad is not None

    run(3, program)


def test_a_group_of_one_asks_nobody(calls):
    def program(rank: int) -> None:
        group = [dist.new_group([rank]) for rank in range(2)][rank]
        layer, truth = SyncBatchNorm(3, process_group=group), nn.BatchNorm1d(3)
        input = torch.randn(5, 3, requires_grad=True)
        assert layer(input).equal(truth(input))
        assert layer.running_var.equal(truth.running_var)

    run(2, program)
    run(1, lambda rank: SyncBatchNorm(3)(torch.randn(5, 3)))
    assert calls == []


def test_eval_mode_runs_on_one_rank_alone():
    def program(rank: int) -> None:
        if rank == 0:
            layer, truth, input = SyncBatchNorm(3), nn.BatchNorm1d(3), torch.randn(5, 3)
            assert layer.eval()(input).equal(truth.eval()(input))
            layer = SyncBatchNorm(3, track_running_stats=False).eval()
            assert layer(input).mean().abs() < 1e-6  # Of its own batch, as torch has it.

    run(2, program, timeout=10)


def test_without_torch_distributed_it_is_batch_norm():
    layer, truth, input = SyncBatchNorm(3, momentum=None), nn.BatchNorm2d(3, momentum=None), torch.randn(2, 3, 4, 4)
    assert not dist.is_initialized()
    for _ in range(2):
        assert layer(input).equal(truth(input))
    assert layer.running_mean.equal(truth.running_mean)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        layer(torch.ones(1, 3, 1, 1))


def test_zeros_in_every_collective_are_a_rank_that_is_not_there():
    """What a rank out of data contributes under `join`, which knows the size of a collective and no more."""
    case = Case((3, 2, 0))

    def program(rank: int) -> dict[str, float]:
        if rank < 2:
            return errors_on_a_rank(rank, case)
        dist.all_gather_single(torch.empty(3 * 7, dtype=torch.float64), torch.zeros(7, dtype=torch.float64))
        dist.all_reduce(torch.zeros(6, dtype=torch.float64))
        for _ in range(2):
            dist.all_reduce(torch.zeros(3, dtype=torch.float64))  # The test's own, of weight and bias.
        return {}

    for errors in run(3, program):
        assert all(error <= 1e-12 for error in errors.values())


def test_each_process_group_has_its_own_statistics():
    case = Case((3, 2))

    def program(rank: int) -> Tensor:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        layer = SyncBatchNorm(3, momentum=1.0, process_group=groups[rank // 2], dtype=case.dtype)
        layer(case.part(case.batch(rank // 2)[0], rank % 2))
        return layer.running_mean

    means = run(4, program)
    for rank, mean in enumerate(means):
        assert relative(mean, case.batch(rank // 2)[0].mean((0, 2, 3))) < 1e-12


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


# ---------------------------------------------------------------- convert, copy, pickle


def test_convert_takes_every_batch_norm_and_shares_what_it_has():
    model = nn.ModuleDict(
        {
            "a": nn.BatchNorm1d(3, eps=0.1, momentum=None),
            "b": nn.Sequential(nn.BatchNorm2d(4, affine=False), nn.BatchNorm3d(5, track_running_stats=False)),
            "c": nn.SyncBatchNorm(6),
            "d": nn.InstanceNorm1d(3, affine=True),
            "e": nn.BatchNorm1d(3, bias=False),
        }
    )
    model["a"].eval()
    model["a"].qconfig = "qconfig"
    old = copy.copy(model["a"])
    state, before = model.state_dict(keep_vars=True), str(model)
    assert SyncBatchNorm.convert_sync_batchnorm(model) is model
    layers = [model["a"], *model["b"], model["c"], model["e"]]
    assert all(type(layer) is SyncBatchNorm for layer in layers)
    assert type(model["d"]) is nn.InstanceNorm1d
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(state) and all(after[name] is state[name] for name in state)
    assert [layer.training for layer in layers] == [False, True, True, True, True]
    assert (old.eps, old.momentum, old.qconfig) == (model["a"].eps, model["a"].momentum, model["a"].qconfig)
    assert [layer.affine for layer in layers] == [True, False, True, True, True]
    assert not model["b"][1].track_running_stats and model["e"].bias is None
    assert str(model) == before.replace("BatchNorm1d(", "SyncBatchNorm(").replace(
        "BatchNorm2d(", "SyncBatchNorm("
    ).replace("BatchNorm3d(", "SyncBatchNorm(")


def test_convert_is_idempotent_and_takes_a_lone_layer():
    layer = SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm2d(3))
    assert type(layer) is SyncBatchNorm and isinstance(layer, nn.SyncBatchNorm)
    assert SyncBatchNorm.convert_sync_batchnorm(layer) is layer
    model = nn.Sequential(layer)
    assert SyncBatchNorm.convert_sync_batchnorm(model)[0] is layer


def test_a_layer_in_two_places_stays_one_layer():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model.append(model[1])
    SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(model[1]) is SyncBatchNorm and model[3] is model[1]


def test_a_layer_that_does_not_know_its_channels_yet_cannot_be_converted():
    with pytest.raises(MisuseError, match="LazyBatchNorm1d.*\n.*call the model once"):
        SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.LazyBatchNorm1d()))


def test_convert_sets_the_group_or_keeps_the_one_there_is():
    def program(rank: int) -> None:
        one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
        model = SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)), one)
        assert model[0].process_group is one
        assert SyncBatchNorm.convert_sync_batchnorm(model)[0].process_group is one
        assert SyncBatchNorm.convert_sync_batchnorm(model, two)[0].process_group is two
        torchs = nn.SyncBatchNorm(3, process_group=two)
        assert SyncBatchNorm.convert_sync_batchnorm(torchs).process_group is two

    run(2, program)


def test_copies_and_pickles_of_a_layer_are_in_its_group():
    def program(rank: int) -> bytes:
        group = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        layer = SyncBatchNorm(3, process_group=group)
        assert copy.deepcopy(nn.Sequential(layer))[0].process_group is group
        data = pickle.dumps(layer)
        loaded = pickle.loads(data)
        assert loaded.process_group is group
        loaded(torch.full((2, 3), float(rank)))
        assert loaded.running_mean.allclose(torch.tensor(0.1 * (1 + rank % 2)))
        return data

    data = run(4, program)[0]
    assert not dist.is_initialized()
    alone = pickle.loads(data)
    assert alone.process_group is None and alone(torch.randn(4, 3)).shape == (4, 3)
    with pytest.raises(WorldError, match=r"ranks \[0, 2\], but this process has no such group"):
        run(2, lambda rank: pickle.loads(data))


# ---------------------------------------------------------------- training


def test_no_grad_and_frozen_parameters():
    case = Case((3, 2))

    def program(rank: int) -> None:
        layer, whole = case.layer(SyncBatchNorm), case.batch(0)[0]
        with torch.no_grad():
            assert not layer(case.part(whole, rank)).requires_grad
        layer.weight.requires_grad_(False)
        input = case.part(whole, rank).clone().requires_grad_()
        layer(input).sum().backward()
        assert layer.weight.grad is None and relative(layer.bias.grad.mean(), torch.tensor(20.0 * case.sizes[rank])) == 0
        assert layer.num_batches_tracked == 2

    run(2, program)
