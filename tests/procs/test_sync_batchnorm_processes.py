"""SyncBatchNorm in real processes: a network trained on a split batch, and the compiler."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from phalanx.nn.sync_batchnorm import SyncBatchNorm
from phalanx.testing import run

SIZES = [(3, 5), (0, 8), (7, 1)]
"""The sizes of the two ranks' batches, step by step."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(4 * 4 * 4, 3),
        nn.BatchNorm1d(3, momentum=None),
    ).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    return (
        torch.randn(8, 1, 8, 8, dtype=torch.float64, generator=random),
        torch.randint(3, (8,), generator=random),
    )


def trained(model: nn.Module, rank: int | None) -> dict[str, Tensor]:
    """Train on one rank's part of each batch (all of it, if None); gradients are summed over the ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, sizes in enumerate(SIZES):
        input, target = batch(step)
        if rank is not None:
            input, target = (t.split(sizes)[rank] for t in (input, target))
        optimizer.zero_grad()
        (F.cross_entropy(model(input), target, reduction="sum") / 8).backward()
        if rank is not None:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_two_processes_train_the_network_that_one_does(format):
    def program(rank: int) -> dict[str, Tensor]:
        model = SyncBatchNorm.convert_sync_batchnorm(network()).to(memory_format=format)
        return trained(model, rank)

    expected = trained(network(), None)
    for state in run(2, program, over="processes", timeout=60):
        assert state.keys() == expected.keys()
        for name, truth in expected.items():
            torch.testing.assert_close(state[name], truth, rtol=1e-10, atol=1e-12)


def test_a_compiled_model_computes_the_same():
    def program(rank: int) -> tuple[Tensor, Tensor]:
        model = SyncBatchNorm.convert_sync_batchnorm(network())
        compiled = torch.compile(model, backend="eager")
        input = batch(0)[0].split((3, 5))[rank]
        output = compiled(input)
        output.square().sum().backward()
        dist.all_reduce(model[0].weight.grad)
        breaks = torch._dynamo.utils.counters["graph_break"]
        assert breaks and all("_uncompiled" in why for why in breaks)  # Around each layer, nowhere within.
        return output.detach(), model[0].weight.grad

    model = network()
    output = model(batch(0)[0])
    output.square().sum().backward()
    parts = run(2, program, over="processes", timeout=60)
    torch.testing.assert_close(torch.cat([part for part, _ in parts]), output, rtol=1e-10, atol=1e-12)
    for _, grad in parts:
        torch.testing.assert_close(grad, model[0].weight.grad, rtol=1e-8, atol=1e-12)
