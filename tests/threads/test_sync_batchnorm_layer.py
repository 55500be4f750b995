"""SyncBatchNorm as a layer: empty batches and errors, what it communicates, convert, copy and pickle."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.errors import MisuseError
from phalanx.nn.sync_batchnorm import SyncBatchNorm
from phalanx.testing import WorldError, run
from tests.threads.batch_norm_cases import Case, OneBatchNorm, check, errors_on_a_rank, relative

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
        with pytest.raises(ValueError, match="Expected more than 1 value per channel") as caught:
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
    layer, truth = SyncBatchNorm(3, momentum=None), nn.BatchNorm2d(3, momentum=None)
    input = torch.randn(2, 3, 4, 4)
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
        assert layer.weight.grad is None
        assert layer.bias.grad.eq(4 * 5 * case.sizes[rank]).all()
        assert layer.num_batches_tracked == 2

    run(2, program)
