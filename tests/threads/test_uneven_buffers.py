"""Buffers and statistics when ranks run out of data or skip, and the ways in which buffers are kept equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx import DistributedDataParallel, MisuseError, SyncBatchNorm
from phalanx.testing import run
from tests.threads.test_uneven_cases import alike, failures, line


def halves(rank: int, step: int) -> Tensor:
    """Data of a rank: two halves of one set, shifted against each other."""
    draw = torch.Generator().manual_seed(10 * rank + step)
    return torch.randn(6, 1, generator=draw).double() + 4.0 * rank


def test_buffers_are_those_of_the_ranks_still_running() -> None:
    def program(rank: int) -> dict[str, Any]:
        ddp = DistributedDataParallel(nn.Sequential(line(), nn.BatchNorm1d(1)))
        with ddp.join():
            for _ in range(0 if rank == 0 else 3):
                ddp(torch.tensor([[5.0], [3.0]])).square().sum().backward()
        return {name: tensor.item() for name, tensor in ddp.module[1].state_dict().items()}

    plain = nn.BatchNorm1d(1)
    for _ in range(3):
        plain(torch.tensor([[5.0], [3.0]]))
    expected = {name: pytest.approx(tensor.item()) for name, tensor in plain.state_dict().items()}
    assert run(2, program) == [expected] * 2


@pytest.mark.parametrize("weighed", [True, False])
def test_synchronised_statistics_are_those_of_the_ranks_still_running(weighed: bool) -> None:
    """And everything else is what one BatchNorm over the whole batch has, of which rank 1 has the larger part."""
    counts = (3, 6)

    def data(rank: int, step: int) -> Tensor:
        return torch.randn(2 + 3 * rank, 1, 8, generator=torch.Generator().manual_seed(10 * rank + step)).double()

    def net(norm: type[nn.Module]) -> nn.Module:
        model = nn.Sequential(nn.Conv1d(1, 2, 1, bias=False), norm(2)).double()
        for number, parameter in enumerate(model.parameters()):
            nn.init.constant_(parameter, 0.5 + number)
        return model

    def loss_of(outputs: Tensor) -> Tensor:
        return outputs.tanh().flatten(1).sum(1).mean()

    def program(rank: int) -> tuple[list[Tensor], dict[str, Tensor]]:
        ddp = DistributedDataParallel(net(SyncBatchNorm))
        gradients = []
        with ddp.join():
            for step in range(counts[rank]):
                ddp.zero_grad()
                loss = loss_of(ddp(data(rank, step)))
                (ddp.weigh(loss, 2 + 3 * rank) if weighed else loss).backward()
                gradients.append(torch.cat([p.grad.flatten() for p in ddp.parameters()]))
        return gradients, ddp.module[1].state_dict()

    truth, expected = net(nn.BatchNorm1d), []
    for step in range(6):
        truth.zero_grad()
        parts = [data(rank, step) for rank in range(2) if step < counts[rank]]
        outputs = truth(torch.cat(parts)).split([len(part) for part in parts])
        (loss_of(torch.cat(outputs)) if weighed else sum(map(loss_of, outputs)) / 2).backward()
        expected.append(torch.cat([p.grad.flatten() for p in truth.parameters()]))
    for rank, (gradients, state) in enumerate(run(2, program)):
        assert all(torch.allclose(g, e, 1e-12, 1e-14) for g, e in zip(gradients, expected[: counts[rank]], strict=True))
        assert all(torch.allclose(state[name], true, 1e-12) for name, true in truth[1].state_dict().items())


def test_weighing_nothing_where_statistics_are_shared() -> None:
    """A rank whose loss counts for nothing has a gradient all the same: its inputs shift the others' statistics."""

    def net(norm: type[nn.Module]) -> nn.Module:
        model = nn.Sequential(nn.Linear(1, 1, bias=False), norm(1), nn.Tanh()).double()
        nn.init.constant_(model[0].weight, 0.7)
        return model

    def program(rank: int) -> float:
        ddp = DistributedDataParallel(net(SyncBatchNorm))
        loss = ddp(halves(rank, 0)).pow(3).mean()
        ddp.weigh(loss * (torch.nan if rank == 0 else 1.0), 6 * rank).backward()
        return ddp.module[0].weight.grad.item()

    truth = net(nn.BatchNorm1d)
    truth(torch.cat([halves(rank, 0) for rank in range(2)]))[6:].pow(3).mean().backward()
    expected = truth[0].weight.grad.item()
    assert abs(expected) > 1e-7  # all of it through the statistics, but for eps
    assert run(2, program) == [pytest.approx(expected, rel=1e-9)] * 2


@pytest.mark.parametrize("norm", [SyncBatchNorm, nn.BatchNorm1d])
def test_buffers_of_a_rank_that_skips(norm: type[nn.Module]) -> None:
    """Rank 0 skips: it gets the running statistics of a rank that does not, instead of sending its old ones."""

    def program(rank: int) -> list[tuple[float, int]]:
        ddp = DistributedDataParallel(nn.Sequential(line(), norm(1)))
        seen = []
        for step in range(2):
            if rank == 0 and step == 0:
                ddp.skip()
            else:
                ddp(torch.tensor([[1.0], [3.0]])).square().sum().backward()
            state = ddp.module[1].state_dict()
            seen.append((state["running_mean"].item(), state["num_batches_tracked"].item()))
        return seen

    assert run(2, program) == [[(pytest.approx(0.2), 1), (pytest.approx(0.38), 2)]] * 2


# -- policies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["mean", "rank0", "local", None])
def test_running_statistics_after_three_steps_on_two_shifted_halves(policy: str | None) -> None:
    def program(rank: int) -> float:
        ddp = DistributedDataParallel(nn.BatchNorm1d(1).double())
        if policy is not None:
            ddp.buffer_policy("running_*", policy)
        for step in range(3):
            ddp(halves(rank, step)).square().sum().backward()
        return ddp.module.running_mean.item()

    def after(parts: list[list[Tensor]]) -> float:
        mean = 0.0
        for part in parts:
            mean = 0.9 * mean + 0.1 * torch.cat(part).mean().item()
        return mean

    pooled = after([[halves(0, step), halves(1, step)] for step in range(3)])
    own = [after([[halves(rank, step)] for step in range(3)]) for rank in range(2)]
    # rank 0's are copied before a forward, so that the last step of each rank is its own.
    copied = [own[0], after([[halves(0, 0)], [halves(0, 1)], [halves(1, 2)]])]
    expected = {"mean": [pooled, pooled], "local": own}.get(policy, copied)
    assert run(2, program) == pytest.approx(expected, rel=1e-12)


def test_averages_are_over_the_ranks_that_took_part() -> None:
    """Rank 0 has no data, then rank 1 skips; a step that nobody took changes nothing."""

    def program(rank: int) -> list[float]:
        ddp = DistributedDataParallel(nn.BatchNorm1d(1).double())
        ddp.buffer_policy("running_*", "mean")
        means = []
        with ddp.join():
            for step in range(0 if rank == 0 else 3):
                if step == 2 or (step == 1 and rank == 1):
                    ddp.skip()
                else:
                    ddp(halves(rank, step)).square().sum().backward()
                means.append(ddp.module.running_mean.item())
        assert alike(ddp)
        return means

    first = 0.1 * (halves(1, 0).mean() + halves(2, 0).mean()).item() / 2
    second = 0.9 * first + 0.1 * halves(2, 1).mean().item()
    none, *others = run(3, program)
    assert none == [] and others == [pytest.approx([first, second, second])] * 2


def test_averages_when_all_that_counts_was_left_behind() -> None:
    def program(rank: int) -> bool:
        ddp = DistributedDataParallel(nn.BatchNorm1d(1).double())
        ddp.buffer_policy("running_*", "mean")
        with ddp.join():
            with ddp.no_sync():
                ddp(halves(rank, 0)).square().sum().backward()
        return bool(ddp.module.running_mean.isfinite()) and alike(ddp)

    assert run(2, program) == [True, True]


def test_policies_go_by_pattern_and_the_last_one_counts() -> None:
    def program(rank: int) -> tuple[list[float], ...]:
        ddp = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(1), nn.BatchNorm1d(1)).double())
        ddp.buffer_policy("*.running_*", "mean")
        ddp.buffer_policy("1.running_mean", "local")
        for step in range(2):
            ddp(halves(rank, step)).square().sum().backward()
        one, two = ddp.module
        return [one.running_mean.item()], [two.running_mean.item(), one.running_var.item()]

    (first, second), (other_first, other_second) = run(2, program)
    assert first == other_first and second[1] == other_second[1]
    assert second[0] == pytest.approx(other_second[0], abs=1e-9)  # what is normalised has a mean of zero


@pytest.mark.parametrize(
    ("pattern", "policy", "said"), [("runing_*", "mean", "matches no buffer"), ("running_*", "average", "rank0, mean")]
)
def test_policies_that_do_not_exist(pattern: str, policy: str, said: str) -> None:
    def program(rank: int) -> None:
        DistributedDataParallel(nn.BatchNorm1d(1)).buffer_policy(pattern, policy)

    for text in failures(run(2, program, raises=False), MisuseError):
        assert said in text and pattern in text
