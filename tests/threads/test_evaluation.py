"""Buffers when a model is evaluated: rank 0's, as in torch, and without a collective in the forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from phalanx import DistributedDataParallel
from phalanx.testing import run


def norm() -> nn.BatchNorm1d:
    return nn.BatchNorm1d(1, momentum=0.5).double()


def batch(rank: int) -> Tensor:
    return torch.tensor([[rank * 8.0], [rank * 8.0 + 2.0]], dtype=torch.float64)


def test_every_rank_evaluates_rank_0s_statistics() -> None:
    def program(rank: int) -> list[float]:
        ddp = DistributedDataParallel(norm())
        ddp(batch(rank)).square().sum().backward()
        before = ddp.module.running_mean.item()
        ddp.eval()
        if rank == 1:  # alone: no forward without gradients talks to anybody
            with torch.no_grad():
                ddp(batch(rank))
        return [before, ddp.module.running_mean.item()]

    assert run(2, program) == [[0.5, 0.5], [4.5, 0.5]]


def test_what_was_loaded_since_the_step_stays() -> None:
    def program(rank: int) -> float:
        ddp = DistributedDataParallel(norm())
        ddp(batch(rank)).square().sum().backward()
        ddp.load_state_dict(norm().state_dict())
        with torch.no_grad():
            ddp.eval()(batch(rank))
        return ddp.module.running_mean.item()

    assert run(2, program) == [0.0, 0.0]


def test_a_forward_after_one_under_no_sync_leaves_buffers_alone() -> None:
    """As in torch: ranks may have different numbers of micro-batches before they synchronise."""

    def program(rank: int) -> float:
        ddp = DistributedDataParallel(norm())
        with ddp.no_sync():
            for _ in range(1 + 2 * rank):
                ddp(batch(rank)).square().sum().backward()
        ddp(batch(rank)).square().sum().backward()
        return ddp.module.running_mean.item()

    assert run(2, program) == [0.75, 9.0 * (1 - 0.5**4)]
