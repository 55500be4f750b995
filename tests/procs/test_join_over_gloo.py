"""join() where the model's own collectives go through a plain group of torch, which nobody can follow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx import DistributedDataParallel, ExhaustedError, MisuseError, SyncBatchNorm
from phalanx.testing import run


class Summed(nn.Module):
    """A model that calls a collective of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.line(x)
        dist.all_reduce(x.detach())
        return x


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), SyncBatchNorm(2, track_running_stats=False))


@pytest.mark.parametrize("make", [Summed, normalised])
def test_throwing_stops_all_before_anyone_waits(make: Callable[[], nn.Module]) -> None:
    def program(rank: int) -> tuple[int, str, int]:
        ddp, steps = DistributedDataParallel(make()), 0
        try:
            with ddp.join(throw_on_early_termination=True):
                for _ in range(4 - rank):
                    ddp(torch.randn(4, 2)).sum().backward()
                    steps += 1
        except ExhaustedError as error:
            return steps, str(error), len(ddp._forward_pre_hooks)
        return steps, "", -1

    first, second = run(2, program, over="processes", backend="gloo")
    assert first == (3, "Detected at least one rank that exhausted inputs. Throwing across all ranks.", 0)
    assert second == (3, "Rank 1 exhausted all inputs.", 0)


def test_a_forward_without_gradients_asks_nobody() -> None:
    def program(rank: int) -> bool:
        ddp = DistributedDataParallel(nn.Linear(2, 2))
        with ddp.join(throw_on_early_termination=True):
            if rank == 0:
                with torch.no_grad():
                    ddp(torch.ones(1, 2))
        return True

    assert run(2, program, over="processes", backend="gloo") == [True, True]


def test_following_is_refused() -> None:
    def program(rank: int) -> None:
        ddp = DistributedDataParallel(normalised())
        with pytest.raises(MisuseError, match="whose collectives go through a process group of backend 'gloo'"):
            with ddp.join():
                pass

    run(2, program, over="processes", backend="gloo")
