"""Synchronisation per layer and buffer policies, over threads."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import phalanx
from phalanx import DistributedDataParallel, MisuseError
from phalanx.testing import run


class Two(nn.Module):
    """An encoder and a head of one weight each, both 1."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.encoder.weight)
        nn.init.ones_(self.head.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x) + self.head(x)


def wrapped() -> tuple[DistributedDataParallel, nn.Parameter, nn.Parameter]:
    ddp = DistributedDataParallel(Two())
    return ddp, ddp.module.encoder.weight, ddp.module.head.weight


def test_no_sync_with_a_pattern_keeps_these_local_and_loses_nothing() -> None:
    def program(rank: int) -> None:
        ddp, encoder, head = wrapped()
        x = torch.ones(1, 1) * (rank + 1)
        with ddp.no_sync("encoder.*"):
            ddp(x).sum().backward()
        assert encoder.grad.item() == rank + 1
        assert head.grad.item() == 1.5
        ddp(x).sum().backward()
        assert encoder.grad.item() == 3.0  # the mean of each rank's two steps
        assert head.grad.item() == 3.0  # 1.5 kept, and 1.5 more

    run(2, program)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_policy_holds_gradients_back_and_synchronises_their_sum(ranks: int) -> None:
    def program(rank: int) -> None:
        ddp, encoder, head = wrapped()
        ddp.sync_policy("encoder", every=3)
        mean = sum(range(1, ranks + 1)) / ranks
        for step in range(1, 10):
            ddp.zero_grad()
            ddp(torch.ones(1, 1) * (rank + 1) * step).sum().backward()
            assert head.grad.item() == pytest.approx(mean * step)
            if step % 3:
                assert encoder.grad is None
            else:
                assert encoder.grad.item() == pytest.approx(mean * (step + step - 1 + step - 2))

    run(ranks, program)


def test_a_held_gradient_is_weighed_by_all_items_it_holds() -> None:
    def program(rank: int) -> None:
        ddp, encoder, head = wrapped()
        ddp.sync_policy("encoder.*", every=2)
        counts = [[1, 2], [3, 5]]  # items by rank and step
        for step in range(2):
            ddp.zero_grad()
            items = torch.ones(counts[rank][step], 1) * (rank + 1) * (step + 1)
            ddp.weigh(ddp(items).mean(), len(items)).backward()
            here = [(counts[r][step], (r + 1) * (step + 1)) for r in range(2)]
            assert head.grad.item() == pytest.approx(sum(n * v for n, v in here) / sum(n for n, _ in here))
        every = [(counts[r][s], (r + 1) * (s + 1)) for r in range(2) for s in range(2)]
        assert encoder.grad.item() == pytest.approx(sum(n * v for n, v in every) / sum(n for n, _ in every))

    run(2, program)


def test_never_keeps_gradients_local_and_visible() -> None:
    def program(rank: int) -> None:
        ddp, encoder, head = wrapped()
        ddp.sync_policy("encoder", "never")
        ddp(torch.ones(1, 1) * (rank + 1)).sum().backward()
        assert (encoder.grad.item(), head.grad.item()) == (rank + 1, 1.5)

    run(2, program)


def test_ranks_that_disagree_about_a_policy_are_told_so() -> None:
    def program(rank: int) -> None:
        ddp, _, _ = wrapped()
        if rank == 0:
            ddp.sync_policy("encoder", every=2)
        with pytest.raises(phalanx.RankMismatchError, match="sync_policy"):
            ddp(torch.ones(1, 1)).sum().backward()

    run(2, program)


def test_explain_says_what_is_local_since_when() -> None:
    def program(rank: int) -> str:
        ddp, _, _ = wrapped()
        x = torch.ones(1, 1)
        ddp(x).sum().backward()
        with ddp.no_sync("head"):
            ddp(x).sum().backward()
            ddp(x).sum().backward()
        return ddp.explain()

    said = run(2, program)[0].splitlines()
    assert "encoder.weight" in said[1] and "synchronised, at synchronisation 3 of 3" in said[1]
    assert "head.weight" in said[2] and "local, holds 2 micro-steps since synchronisation 1" in said[2]


@pytest.mark.parametrize("pattern", ["*", "decoder"])
def test_a_policy_for_the_buffers_of_a_model_without_any_is_refused(pattern: str) -> None:
    def program(rank: int) -> None:
        ddp = DistributedDataParallel(nn.Linear(2, 1))
        with pytest.raises(phalanx.MisuseError, match="the model has none to keep equal\nInstead: no buffer_policy"):
            ddp.buffer_policy(pattern, "mean")

    run(2, program)


def test_a_refused_pattern_names_some_that_would_match() -> None:
    def program(rank: int) -> None:
        ddp = DistributedDataParallel(nn.Sequential(*[nn.BatchNorm1d(1) for _ in range(2)]))
        with pytest.raises(phalanx.MisuseError, match="some of 0.running_mean, .*, 1.running_mean, [.]{3}$"):
            ddp.buffer_policy("decoder", "mean")
        with pytest.raises(phalanx.MisuseError, match="some of 0.weight, 0.bias, 1.weight, 1.bias$"):
            ddp.sync_policy("decoder")

    run(2, program)


@pytest.mark.parametrize("call", ["no_sync", "sync_policy", "buffer_policy"])
def test_a_pattern_that_matches_nothing_is_refused(call: str) -> None:
    def program(rank: int) -> None:
        ddp, _, _ = wrapped()
        with pytest.raises(phalanx.MisuseError, match="'decoder' matches no"):
            if call == "no_sync":
                with ddp.no_sync("decoder"):
                    pass
            elif call == "sync_policy":
                ddp.sync_policy("decoder", every=2)
            else:
                ddp.buffer_policy("decoder", "mean")

    run(2, program)


def test_averaged_buffers_are_those_of_the_pooled_data() -> None:
    def program(rank: int) -> None:
        torch_one = nn.BatchNorm1d(2)
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        ddp = DistributedDataParallel(model)
        ddp.buffer_policy("*", "mean")
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            x = torch.randn(8, 2, generator=generator) + 3 * rank
            ddp(x).sum().backward()
            halves = [torch.zeros_like(x) for _ in range(2)]
            dist.all_gather(halves, x)
            torch_one(torch.cat(halves))
        assert torch.allclose(model[0].running_mean, torch_one.running_mean, atol=1e-6)
        assert model[0].num_batches_tracked.item() == 3
        both = [torch.zeros(2) for _ in range(2)]
        dist.all_gather(both, model[0].running_var)
        assert torch.equal(*both)

    run(2, program)


def test_by_default_buffers_are_those_of_rank_zero() -> None:
    def program(rank: int) -> None:
        model = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
        ddp = DistributedDataParallel(model)
        own = nn.BatchNorm1d(1)
        for step in range(2):
            x = torch.full((4, 1), float(rank + step)) + torch.arange(4.0)[:, None]
            if rank == 0:
                own(x)
            ddp(x).sum().backward()
        ddp(x)  # this forward brings the buffers in line before it updates them
        kept = [torch.zeros(1) for _ in range(2)]
        dist.all_gather(kept, own.running_mean)
        begun = kept[0] * 0.9 + 0.1 * x.mean()
        assert torch.allclose(model[0].running_mean, begun)

    run(2, program)


def test_a_rank_that_skips_a_step_follows_all_its_rounds() -> None:
    def program(rank: int) -> None:
        ddp, encoder, head = wrapped()
        ddp.sync_policy("encoder", every=2)
        for step in range(1, 7):
            ddp.zero_grad()
            skips = rank == 1 and step in (2, 3)
            if skips:
                ddp.skip()
            else:
                ddp(torch.ones(1, 1) * (rank + 1)).sum().backward()
            assert head.grad.item() == (1.0 if step in (2, 3) else 1.5)
            # What rank 1 has accumulated before it skips still counts.
            assert (encoder.grad is None) if step % 2 else encoder.grad.item() == {2: 2.0, 4: 2.0, 6: 3.0}[step]

    run(2, program)


def test_a_rank_that_skips_holds_back_what_it_has_accumulated() -> None:
    """Its optimizer would step on it, and that of no other rank."""

    def program(rank: int) -> None:
        ddp, encoder, head = wrapped()
        ddp.sync_policy("encoder", every=2)
        for step in range(1, 5):
            ddp.zero_grad()
            with ddp.no_sync():
                ddp(torch.ones(1, 1) * (rank + 1)).sum().backward()
            if rank == 0 and step == 1:
                ddp.skip()
            else:
                ddp(torch.ones(1, 1) * (rank + 1)).sum().backward()
            assert head.grad.item() == (2.5 if step == 1 else 3.0)
            assert (encoder.grad is None) if step % 2 else encoder.grad.item() == {2: 5.5, 4: 6.0}[step]

    run(2, program)


@pytest.mark.parametrize("transport", ["auto", "gloo"])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("raises", [True, False])
def test_what_is_thrown_away_between_leaves_what_is_held_back(
    raises: bool, to_none: bool, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward of 10 raises half way or stays local, and is zeroed; that of 1 was held back."""
    monkeypatch.setenv("PHALANX_TRANSPORT", transport)

    def program(rank: int) -> float:
        ddp, encoder, head = wrapped()
        ddp.sync_policy("encoder", every=2)
        ddp(torch.full((1, 1), rank + 1.0)).sum().backward()
        ddp.zero_grad(set_to_none=to_none)
        if raises:
            handle = head.register_hook(lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                ddp(torch.full((1, 1), 10.0)).sum().backward()
            handle.remove()
        else:
            with ddp.no_sync():
                ddp(torch.full((1, 1), 10.0)).sum().backward()
        ddp.zero_grad(set_to_none=to_none)
        ddp(torch.full((1, 1), 100.0)).sum().backward()
        assert head.grad.item() == 100.0
        return encoder.grad.item()

    assert run(2, program) == [101.5, 101.5]


def test_what_stays_local_on_top_of_what_is_held_back_is_exchanged_with_it() -> None:
    def program(rank: int) -> float:
        ddp, encoder, _ = wrapped()
        ddp.sync_policy("encoder", every=2)
        ddp(torch.full((1, 1), rank + 1.0)).sum().backward()
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(torch.full((1, 1), 10.0)).sum().backward()
        with ddp.no_sync("encoder"):
            ddp(torch.full((1, 1), 20.0)).sum().backward()
        assert encoder.grad.item() == 30.0  # this was the second step, which would have exchanged it
        for value in (100.0, 1000.0):
            ddp(torch.full((1, 1), value)).sum().backward()
        return encoder.grad.item()

    assert run(2, program) == [1131.5, 1131.5]


def test_weighing_with_some_layers_local_is_an_error_that_leaves_nothing_behind() -> None:
    def program(rank: int) -> float:
        ddp, encoder, _ = wrapped()
        with ddp.no_sync("encoder"), pytest.raises(MisuseError, match="sync_policy"):
            ddp.weigh(ddp(torch.ones(2, 1)).mean(), 2).backward()
        ddp.zero_grad()
        ddp.weigh(ddp(torch.full((1 + rank, 1), rank + 1.0)).mean(), 1 + rank).backward()
        return encoder.grad.item()

    assert run(2, program) == pytest.approx([5 / 3, 5 / 3])


def test_a_rank_that_skips_does_not_wait_for_a_round_that_is_kept_local() -> None:
    def program(rank: int) -> None:
        ddp, encoder, head = wrapped()
        ddp.sync_policy("encoder", every=2)
        for step in range(1, 3):
            with ddp.no_sync("encoder") if step == 2 else nullcontext():
                ddp.skip() if rank == 0 else ddp(torch.ones(1, 1)).sum().backward()
            assert head.grad.item() == step

    run(2, program)


@pytest.mark.parametrize("uses", [(True, False), (False, True)])
def test_a_layer_synchronised_every_second_step_is_weighed_by_the_items_of_both(uses: tuple[bool, bool]) -> None:
    def program(rank: int) -> float:
        ddp, encoder, _ = wrapped()
        ddp.sync_policy("encoder", every=2)
        for used in uses:
            ddp.zero_grad()
            x = torch.ones(4, 1)
            out = ddp(x) if used else ddp.module.head(x) + 0 * ddp(x).detach()
            ddp.weigh(out.mean(), 4).backward()
        return encoder.grad.item()

    assert run(2, program) == [0.5, 0.5]


def test_what_a_joined_rank_holds_back_is_weighed_by_its_items() -> None:
    def program(rank: int) -> list[float]:
        ddp, encoder, _ = wrapped()
        ddp.sync_policy("encoder", every=2)
        with ddp.join():
            for value in ([1.0], [3.0, 5.0])[rank]:
                ddp.zero_grad()
                ddp.weigh(ddp(torch.full((2, 1), value)).mean(), 2).backward()
                seen = encoder.grad.item() if encoder.grad is not None else None
        return seen

    assert run(2, program) == [None, 3.0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_communication_hook_in_a_step_of_several_rounds(ranks: int) -> None:
    def average(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / ranks)

    def program(rank: int) -> None:
        ddp, encoder, head = wrapped()
        ddp.register_comm_hook(None, average)
        ddp.sync_policy("encoder", every=2)
        mean = (ranks + 1) / 2
        for step in range(1, 5):
            ddp.zero_grad()
            ddp(torch.ones(1, 1) * (rank + 1)).sum().backward()
            assert head.grad.item() == mean
            assert (encoder.grad is None) if step % 2 else encoder.grad.item() == 2 * mean

    run(ranks, program)


def test_what_ranks_have_left_when_all_skip_is_synchronised_round_by_round() -> None:
    """One rank has joined, the others skip, and one of these has accumulated before."""

    def program(rank: int) -> list[tuple[float, float | None]]:
        ddp, encoder, head = wrapped()
        ddp.sync_policy("encoder", every=2)
        seen = []
        with ddp.join():
            for step in range(1 if rank == 2 else 3):
                ddp.zero_grad()
                if step != 1:
                    ddp(torch.ones(1, 1)).sum().backward()
                elif rank == 0:
                    with ddp.no_sync():
                        ddp(torch.full((1, 1), 6.0)).sum().backward()
                if step == 1:
                    ddp.skip()
                seen.append((head.grad.item(), None if encoder.grad is None else encoder.grad.item()))
        return seen

    both = [(1.0, None), (2.0, 3.0), (pytest.approx(2 / 3), None)]
    assert run(3, program) == [both, both, both[:1]]
