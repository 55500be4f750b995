"""SyncBatchNorm in the replicas of a DataParallel: one BatchNorm over the whole batch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx import DataParallel, MisuseError, SyncBatchNorm
from phalanx.nn.batch_norm_replicas import normalize_apart, normalize_parts
from phalanx.testing import generator, oracle, run
from tests.threads.batch_norm_cases import Case, OneBatchNorm, relative
from tests.threads.small_models import filled, noise, squares


def normed(momentum: float | None = 0.1) -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=momentum), nn.ReLU(inplace=True), nn.Linear(4, 4),
        nn.BatchNorm1d(4, affine=False), nn.Tanh(), nn.Linear(4, 1),
    ).double()  # fmt: skip


def synced(plain: nn.Module, replicas: int = 3) -> DataParallel:
    return DataParallel(SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)), replicas=replicas)


@pytest.mark.parametrize("size", [9, 7, 2])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_replicas_together_are_one_process_with_the_whole_batch(size: int, momentum: float | None) -> None:
    plain = filled(normed(momentum))
    model = synced(plain)
    for step in range(3):
        batch = noise(size, 3, seed=step)
        for each in (plain, model):
            each.zero_grad()
            squares(each, batch).backward()
        oracle.assert_close(oracle.gradients_of(model), oracle.gradients_of(plain), rtol=1e-8, atol=1e-10)
    for name, buffer in plain.named_buffers():
        assert torch.allclose(model.module.get_buffer(name), buffer), name
    batch = noise(5, 3)
    assert torch.allclose(model.eval()(batch), plain.eval()(batch))


def test_second_derivatives_go_through_the_meeting() -> None:
    def penalty(model: nn.Module, batch: Tensor) -> Tensor:
        batch = batch.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(batch).pow(3).sum(), batch, create_graph=True)
        return gradient.square().sum()

    plain, batch = filled(normed()), noise(5, 3)
    model = synced(plain, 2)
    penalty(model, batch).backward()
    oracle.assert_close(oracle.gradients_of(model), oracle.gradients(plain, penalty, [[batch]]), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    "case",
    [
        Case((3, 2)),
        Case((1, 4, 2), features=(3,), momentum=None, steps=2),
        Case((2, 3), affine=False, shift=100.0),
        Case((2, 3), bias=False, tracked=False),
        Case((4, 3), dtype=torch.bfloat16),
    ],
    ids=str,
)
def test_over_several_devices_the_parts_stay_where_they_are(case: Case) -> None:
    """What runs on different devices, on one: the parts are normalised where they are, with common moments."""
    layer, truth = case.layer(OneBatchNorm), case.layer(OneBatchNorm)
    for step in range(case.steps):
        whole, grad = case.batch(step)
        whole.requires_grad_()
        parts = [case.part(whole, rank).detach().requires_grad_() for rank in range(len(case.sizes))]
        output, expected = torch.cat(normalize_apart(layer, parts)), truth(whole)
        output.backward(grad)
        expected.backward(grad)
        limit = {torch.float64: 1e-10, torch.bfloat16: 2e-2}[case.dtype]
        assert output.dtype == expected.dtype and relative(output, expected) < limit
        assert relative(torch.cat([part.grad for part in parts]), whole.grad) < limit
    for name, buffer in truth.named_buffers():
        assert relative(layer.get_buffer(name), buffer) < 1e-5, name
    for name, parameter in truth.named_parameters():
        assert relative(layer.get_parameter(name).grad, parameter.grad) < max(limit, 1e-5), name


def test_one_value_in_all_replicas_is_torchs_error() -> None:
    model = synced(normed(), 2)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        model(noise(1, 3))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        normalize_apart(OneBatchNorm(3), [noise(1, 3).float()])


class Way(nn.Module):
    """Two layers; the function says how a replica uses them."""

    def __init__(self, way: Callable[[Way, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b = SyncBatchNorm(3).double(), SyncBatchNorm(3).double()
        self.way = way

    def forward(self, x: Tensor) -> Any:
        return self.way(self, x)


def fails_on_the_second(module: Way, x: Tensor) -> Tensor:
    if len(x) == 2:
        raise KeyError("mine")
    return module.a(x)


@pytest.mark.parametrize(
    ("way", "error", "words"),
    [
        (lambda m, x: m.a(x) if len(x) == 3 else m.b(x), MisuseError,
         "different layers: replica 0 in SyncBatchNorm 'a', replica 1 in SyncBatchNorm 'b'"),
        (lambda m, x: m.a(x) if len(x) == 3 else x, MisuseError,
         "replica 0 is in SyncBatchNorm 'a', and replica 1 has ended without it"),
        (fails_on_the_second, KeyError, "in replica 1 on device cpu"),
        (lambda m, x: m.a(x[:, :2]), MisuseError, "running_mean should contain 2 elements not 3"),
    ],
    ids=["another layer", "no layer", "raises", "channels"],
)  # fmt: skip
def test_replicas_that_do_not_meet_are_an_error_and_no_wait(way: Any, error: type, words: str) -> None:
    with pytest.raises(error) as caught:
        DataParallel(Way(way), replicas=2)(noise(5, 3))
    assert words in str(caught.value)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica")]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_that_runs_again_in_backward_is_refused(reentrant: bool) -> None:
    model = DataParallel(Way(lambda m, x: checkpoint(m.a, x, use_reentrant=reentrant)), replicas=2)
    output = model(noise(4, 3).requires_grad_())
    with pytest.raises(MisuseError, match="SyncBatchNorm 'a' of a replica runs outside of the forward"):
        output.sum().backward()


def test_other_ranks_come_after_the_replicas() -> None:
    whole, truth = noise(10, 3), SyncBatchNorm(3).double()
    expected = truth(whole)

    def program(rank: int) -> dict[str, float]:
        model = DataParallel(SyncBatchNorm(3).double(), replicas=2)
        part = slice(0, 3) if rank == 0 else slice(3, 10)
        errors = {"output": relative(model(whole[part]), expected[part])}
        for name, buffer in truth.named_buffers():
            errors[name] = relative(model.module.get_buffer(name), buffer)
        return errors

    for errors in run(2, program):
        assert max(errors.values()) < 1e-10, errors


def test_parts_on_several_devices_and_other_ranks_are_refused() -> None:
    parts = [(OneBatchNorm(3), torch.zeros(2, 3, device=device)) for device in ("cpu", "meta")]
    with pytest.raises(MisuseError, match="on several devices, and other ranks"):
        normalize_parts(parts, lambda whole: whole, alone=False)


def test_the_layer_in_the_module_itself_has_no_seat() -> None:
    model = synced(normed(), 2)
    model(noise(4, 3))
    assert not [part for part in model.modules() if "_seat" in part.__dict__]
    random = torch.randn(4, 3, dtype=torch.float64, generator=generator(0))
    assert torch.isfinite(model.module(random)).all()
