"""Replicas that drift apart are named, and replicas that may differ are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, post_localSGD_hook

import phalanx
from phalanx import DistributedDataParallel, ReplicaDriftError
from phalanx.misuse import silenced
from phalanx.testing import generator, run
from tests.threads.small_models import filled

ODD = 1


@pytest.fixture(autouse=True)
def nothing_silenced():
    before = set(silenced)
    yield
    silenced.clear()
    silenced.update(before)


def net(width: int = 16) -> nn.Module:
    layers = nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    return filled(nn.Sequential(*layers))


class Training:
    """A wrapped model and its optimizer on one rank."""

    def __init__(self, rank: int, model: nn.Module | None = None, lr: float = 0.1, **keywords: Any) -> None:
        self.rank, self.random = rank, generator(rank)
        self.ddp = DistributedDataParallel(net() if model is None else model, **keywords)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=lr, momentum=0.9)

    def step(self, times: int = 1, updates: bool = True) -> None:
        for _ in range(times):
            self.optimizer.zero_grad()
            self.ddp(torch.randn(4, 8, generator=self.random)).square().mean().backward()
            if updates:
                self.optimizer.step()

    def steps_until_found(self, most: int) -> tuple[int, ReplicaDriftError]:
        for step in range(1, most + 1):
            try:
                self.step()
            except ReplicaDriftError as error:
                return step, error
        raise AssertionError(f"no drift was found in {most} steps")


def count_proofs(training: Training) -> list[int]:
    """A list that grows by one whenever digests have differed and everything is compared."""
    proofs, drift = [], training.ddp._guard.drift
    prove = drift._prove
    drift._prove = lambda *arguments: (proofs.append(1), prove(*arguments))
    return proofs


def loads_a_checkpoint(training: Training) -> None:
    training.ddp.module.load_state_dict({name: v + 0.5 for name, v in training.ddp.module.state_dict().items()})


def loads_past_the_counters(training: Training) -> None:
    for parameter in training.ddp.parameters():
        parameter.data.copy_(parameter.data + 0.5)


def replaces_the_data(training: Training) -> None:
    for parameter in training.ddp.parameters():
        parameter.data = parameter.data + 0.5


def steps_once_more(training: Training) -> None:
    training.optimizer.step()


def has_another_learning_rate(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] *= 1.001


def has_lost_its_momentum(training: Training) -> None:
    training.optimizer.state.clear()


HAPPENS = [loads_a_checkpoint, loads_past_the_counters, replaces_the_data, steps_once_more]
LATER = [has_another_learning_rate, has_lost_its_momentum]


@pytest.mark.parametrize(
    ("ranks", "happens"), [(2, each) for each in HAPPENS + LATER] + [(3, LATER[0]), (4, HAPPENS[0])]
)
def test_what_one_rank_does_alone_is_found_in_the_next_step(happens: Callable[[Training], None], ranks: int) -> None:
    def program(rank: int) -> tuple[int, ReplicaDriftError]:
        training = Training(rank)
        training.step(5)
        if rank == ODD:
            happens(training)
        return training.steps_until_found(3)

    for rank, (step, error) in enumerate(run(ranks, program)):
        assert step == (2 if happens in LATER else 1)  # an optimizer's own difference needs a step to show
        assert error.parameter == "0.weight"
        assert error.differing == ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]
        assert (error.rank, error.step) == (rank, 5 + step)
        assert 1 + step <= error.last_equal <= 4 + step  # there are four pieces
        others = [each for each in range(ranks) if each != ODD]
        assert error.groups == ([others, [ODD]] if ranks > 2 else [[0], [1]])
        assert error.odd == [ODD]
        assert "'0.weight' does" in str(error) and "phalanx.checkpoint.load" in str(error)
        assert ("written to in place" in str(error)) == (happens in (loads_a_checkpoint, steps_once_more))


@pytest.mark.parametrize(("ranks", "width", "begun"), [(2, 600, 3), (2, 16, 3), (4, 16, 66), (3, 200, 70)])
def test_a_flipped_bit_is_found_before_all_pieces_have_come_twice(ranks: int, width: int, begun: int) -> None:
    def program(rank: int) -> tuple[int, ReplicaDriftError]:
        training = Training(rank, net(width))
        training.step(begun)
        if rank == ODD:
            bytes_of = training.ddp.module[2].weight.data.view(torch.uint8).view(-1)
            bytes_of[bytes_of.numel() // 2] ^= 1
        for step in range(1, 65):
            try:
                training.step(updates=False)
            except ReplicaDriftError as error:
                return step, error
        raise AssertionError("not found")

    for step, error in run(ranks, program):
        assert step <= 64
        assert error.differing == ["2.weight"]
        assert error.odd == [ODD]
        assert error.last_equal <= begun < error.step == begun + step


def test_later_a_small_model_is_looked_at_in_every_fourth_step_only() -> None:
    def program(rank: int) -> int:
        training = Training(rank)
        training.step(64 + 3)
        if rank == ODD:
            loads_a_checkpoint(training)
        return training.steps_until_found(4)[1].step

    assert run(2, program) == [68, 68]


def test_a_difference_of_one_parameter_is_found_at_once_however_many_there_are() -> None:
    def program(rank: int) -> ReplicaDriftError:
        model = filled(nn.Sequential(*(nn.Linear(8, 8) for _ in range(20))))
        training = Training(rank, model, lr=1e-6)
        training.step(2)
        if rank == ODD:
            with torch.no_grad():
                model[11].bias.add_(1.0)
        return training.steps_until_found(1)[1]

    for error in run(2, program):
        assert error.differing == ["11.bias"]


def test_on_demand_it_is_found_without_a_step_and_frozen_parameters_too() -> None:
    def program(rank: int) -> None:
        model = net()
        model[2].requires_grad_(False)
        training = Training(rank, model)
        training.ddp.check_replicas()
        training.step(2)
        training.ddp.check_replicas()
        if rank == 2:
            model[2].bias.data[3] = float("nan")
        with pytest.raises(ReplicaDriftError, match=r"ranks 0-1: norm .*\n  rank 2: norm nan") as found:
            training.ddp.check_replicas()
        assert (found.value.differing, found.value.last_equal) == (["2.bias"], 2)

    run(3, program)


def test_before_the_first_step_it_was_equal_when_it_was_wrapped() -> None:
    def program(rank: int) -> None:
        training = Training(rank)
        if rank == ODD:
            loads_a_checkpoint(training)
        _, error = training.steps_until_found(1)
        assert (error.last_equal, error.step) == (0, 1)
        assert "when the model was wrapped" in str(error)

    run(2, program)


def test_models_that_were_not_made_equal_were_never_seen_equal() -> None:
    def program(rank: int) -> None:
        training = Training(rank, filled(nn.Linear(8, 1), seed=rank), init_sync=False)
        _, error = training.steps_until_found(1)
        assert error.last_equal == -1 and "has not been seen equal" in str(error)

    run(2, program)


# ------------------------------------------------------------------ what may differ


def quiet(ranks: int, program: Callable[[int], None]) -> None:
    """Run a program of `ranks`, which may not find any drift."""
    run(ranks, program)


def test_equal_nans_are_equal() -> None:
    def program(rank: int) -> None:
        training = Training(rank)
        with torch.no_grad():
            training.ddp.module[0].weight.fill_(float("nan"))
        training.step(4)
        training.ddp.check_replicas()

    quiet(2, program)


def test_ignored_parameters_may_differ() -> None:
    def program(rank: int) -> None:
        model = net()
        model._ddp_params_and_buffers_to_ignore = ["2.weight"]
        training = Training(rank, model)
        with torch.no_grad():
            model[2].weight.fill_(float(rank))
        training.step(4)
        training.ddp.check_replicas()

    quiet(2, program)


@pytest.mark.parametrize("policy", ["never", 2])
def test_parameters_under_a_policy_may_differ(policy: Any) -> None:
    def program(rank: int) -> None:
        training = Training(rank)
        training.step()
        training.optimizer.zero_grad()
        training.ddp.sync_policy("2", policy)
        proofs = count_proofs(training)
        training.step(6)
        assert not proofs
        training.ddp.check_replicas()
        if policy == "never":
            assert not _equal(training.ddp.module[2].weight)

    quiet(3, program)


def test_other_parameters_are_still_compared_beside_a_policy() -> None:
    def program(rank: int) -> None:
        training = Training(rank)
        training.ddp.sync_policy("0", "never")
        training.step(3)
        if rank == ODD:
            loads_a_checkpoint(training)
        assert training.steps_until_found(1)[1].parameter == "2.weight"

    run(2, program)


def test_parameters_that_were_stepped_while_they_were_local_may_differ() -> None:
    def program(rank: int) -> None:
        phalanx.silence("unsynchronised-step")
        training = Training(rank)
        for _ in range(3):
            training.optimizer.zero_grad()
            with training.ddp.no_sync("2"):
                training.step()
        training.step(3)
        training.ddp.check_replicas()
        assert not _equal(training.ddp.module[2].weight)

    quiet(2, program)


def test_local_steps_and_then_an_average_by_hand_may_differ_meanwhile() -> None:
    def program(rank: int) -> None:
        phalanx.silence("unsynchronised-step")
        training = Training(rank)
        training.step(2)
        with training.ddp.no_sync():
            training.step(2)
        training.step(2)

    quiet(2, program)


@pytest.mark.parametrize("kind", ["post_localSGD", "noop"])
def test_hooks_that_keep_replicas_apart_end_the_check_and_say_so(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    def program(rank: int) -> None:
        training = Training(rank)
        if kind == "noop":
            training.ddp.register_comm_hook(None, debugging_hooks.noop_hook)
        else:
            alone = dist.new_subgroups(1)[0]
            state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=2)
            training.ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        training.step(5)
        assert not _equal(training.ddp.module[2].weight)
        training.ddp.remove_comm_hook()
        training.step(2)
        with pytest.raises(ReplicaDriftError):
            training.ddp.check_replicas()

    quiet(2, program)
    assert sum("keeps replicas apart" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("way", ["broadcast", "off", "mean", "local"])
def test_buffers_may_differ_between_steps(way: str) -> None:
    def program(rank: int) -> None:
        model = filled(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
        training = Training(rank, model, forward_sync_buffers=way != "off")
        if way in ("mean", "local"):
            training.ddp.buffer_policy("*", way)
        training.step(4)
        training.ddp.check_replicas()
        if way == "mean":
            training.ddp.check_replicas(buffers=True)
        elif way == "local":
            training.ddp.check_replicas(buffers=True)
        else:
            with pytest.raises(ReplicaDriftError, match="1.running_mean"):
                training.ddp.check_replicas(buffers=True)

    quiet(2, program)


def test_weights_swapped_on_one_rank_for_its_evaluation_are_no_drift() -> None:
    def program(rank: int) -> None:
        training = Training(rank)
        for _ in range(8):
            training.step()
            if rank == 0:
                kept = {name: value.clone() for name, value in training.ddp.module.state_dict().items()}
                training.ddp.module.load_state_dict({name: value * 0 for name, value in kept.items()})
                training.ddp.module.load_state_dict(kept)
        if rank == ODD:
            loads_a_checkpoint(training)
        training.steps_until_found(1)

    run(2, program)


def test_strides_that_differ_are_no_drift_and_do_not_cost_a_proof_in_every_step() -> None:
    def program(rank: int) -> int:
        frozen = filled(nn.Conv2d(3, 4, 3)).requires_grad_(False)
        if rank:
            frozen.to(memory_format=torch.channels_last)
        training = Training(rank, nn.Sequential(frozen, filled(nn.Conv2d(4, 1, 1))))
        proofs = count_proofs(training)
        for _ in range(6):
            training.ddp(torch.ones(1, 3, 4, 4)).sum().backward()
        training.ddp.check_replicas()
        return len(proofs)

    assert run(2, program) == [1, 1]


def test_a_difference_of_writes_alone_is_looked_into_a_few_times_only() -> None:
    def program(rank: int) -> int:
        training = Training(rank)
        proofs = count_proofs(training)
        for _ in range(10):
            training.step()
            if rank == ODD:
                with torch.no_grad():
                    training.ddp.module[0].weight.mul_(1.0)
        return len(proofs)

    assert run(2, program) == [4, 4]


# ------------------------------------------------------------------ switching it off


@pytest.mark.parametrize("how", ["attribute", "silence"])
def test_it_can_be_switched_off_on_all_ranks(how: str) -> None:
    def program(rank: int) -> None:
        training = Training(rank)
        if how == "attribute":
            training.ddp.drift_check = False
        else:
            phalanx.silence("replica-drift")
        if rank == ODD:
            loads_a_checkpoint(training)
        training.step(3)
        with pytest.raises(ReplicaDriftError):
            training.ddp.check_replicas()

    run(2, program)


def test_switched_off_on_some_ranks_only_it_is_a_mismatch() -> None:
    def program(rank: int) -> None:
        training = Training(rank)
        training.ddp.drift_check = rank != 1
        with pytest.raises(phalanx.RankMismatchError, match="drift check") as found:
            training.step()
        assert found.value.calls[1] == "a step without the drift check"
        assert found.value.calls[2] == "a step with the drift check"

    run(3, program)


def test_models_that_differ_in_their_parameters_are_a_mismatch_on_demand() -> None:
    def program(rank: int) -> None:
        training = Training(rank)
        if rank:
            training.ddp.module[0].register_parameter("extra", nn.Parameter(torch.ones(1), requires_grad=False))
            training.ddp._remember_structure()
        with pytest.raises(phalanx.RankMismatchError, match="different parameters"):
            training.ddp.check_replicas()

    run(2, program)


def test_alone_there_is_nothing_to_compare() -> None:
    def program(rank: int) -> None:
        training = Training(rank)
        training.step(2)
        training.ddp.check_replicas(buffers=True)

    run(1, program)


def _equal(tensor: Tensor) -> bool:
    parts = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.detach())
    return all(torch.equal(parts[0], part) for part in parts)
