"""Time whole training steps of one model under several variants, in turn, in the same processes.

A step is what people write: zero_grad, forward, loss, backward, perhaps clipping, optimizer step (plain SGD). Each
variant trains its own copy of the model from the same weights on the same batches. First it is
checked that they compute the mean gradient over the ranks; a fast wrong result is not a result.
Then come rounds: in each, every variant runs one block of steps, from a common start line, after
one untimed step that brings its weights into the caches. A block costs what its slowest rank took.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from phalanx.errors import InternalError
from phalanx.observe.bench_figures import differences, order_of_round, ratio, spread
from phalanx.observe.bench_models import Workload, count_parameters
from phalanx.observe.bench_ranks import Ranks
from phalanx.observe.bench_variants import BASELINE, LOCAL, Variant

SEED = 20
CHECKED_STEPS = 3
TOLERANCE = 1e-5  # largest difference of a gradient, relative to that gradient's largest element
WARM_UP = 2  # blocks of each variant that are not counted


class Trainer:
    """One copy of a workload's model in training under one variant."""

    def __init__(self, workload: Workload, variant: Variant, ranks: Ranks) -> None:
        self.variant = variant
        self.plain = workload.build(SEED)
        self.model = variant.wrap(self.plain, ranks.group(variant.backend))
        self.loss = workload.loss
        self.inputs, self.targets = workload.batch(SEED + 1 + ranks.rank)
        self.optimizer = SGD(self.model.parameters(), workload.learning_rate, foreach=True)
        self.max_norm = workload.max_norm

    def step(self) -> None:
        """Take one training step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(self.model(self.inputs), self.targets).backward()
        if self.max_norm is not None:
            self.variant.clip(self.model.parameters(), self.max_norm)
        self.optimizer.step()

    def block(self, steps: int, ranks: Ranks) -> float:
        """Take one untimed step and `steps` timed ones; return seconds per step. Collective."""
        self.step()
        ranks.start_line()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        return (time.perf_counter() - begin) / steps


class Reference:
    """The same training by hand: every gradient averaged over the ranks, one by one."""

    def __init__(self, workload: Workload, ranks: Ranks) -> None:
        self.model = workload.build(SEED)
        self.loss = workload.loss
        self.inputs, self.targets = workload.batch(SEED + 1 + ranks.rank)
        self.optimizer = SGD(self.model.parameters(), workload.learning_rate, foreach=True)
        self.max_norm, self.ranks = workload.max_norm, ranks

    def step(self) -> None:
        """Take one training step. Collective."""
        group = self.ranks.group("gloo")
        for buffer in self.model.buffers():
            dist.broadcast(buffer, src=0, group=group)
        self.optimizer.zero_grad(set_to_none=True)
        self.loss(self.model(self.inputs), self.targets).backward()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= self.ranks.size
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()


def measure_steps(
    ranks: Ranks, workloads: Sequence[Workload], variants: Sequence[Variant], quick: bool
) -> list[dict[str, Any]]:
    """Measure workloads under `variants` and return a JSON entry for each. Collective."""
    return [_measure_workload(ranks, workload, variants, quick) for workload in workloads]


def _measure_workload(ranks: Ranks, workload: Workload, variants: Sequence[Variant], quick: bool) -> dict[str, Any]:
    ranks.say(f"step time: {workload.name}")
    trainers = [Trainer(workload, variant, ranks) for variant in variants]
    agreement = _check(ranks, workload, trainers)
    block, rounds = (2, 3) if quick else (workload.block, workload.rounds)
    for trainer in trainers:
        for _ in range(WARM_UP):
            trainer.block(block, ranks)
    times = _rounds(ranks, trainers, block, rounds)
    return {
        "model": workload.name,
        "title": workload.title,
        "parameters": count_parameters(trainers[0].plain),
        "batch_per_rank": len(trainers[0].inputs),
        "steps_per_block": block,
        "rounds": rounds,
        "difference_from_reference": agreement,
        **_figures(times),
    }


def _rounds(ranks: Ranks, trainers: Sequence[Trainer], block: int, rounds: int) -> dict[str, list[float]]:
    mine: dict[str, list[float]] = {t.variant.name: [] for t in trainers}
    for number in range(rounds):
        for place in order_of_round(number, len(trainers)):
            trainer = trainers[place]
            mine[trainer.variant.name].append(trainer.block(block, ranks))
    return {name: ranks.slowest(seconds) for name, seconds in mine.items()}


def _figures(times: dict[str, list[float]]) -> dict[str, Any]:
    """Reduce seconds per step by variant and round to the entry's figures."""
    figures: dict[str, Any] = {"step_seconds": {}, "sync_seconds": {}, "step_ratio": {}, "sync_ratio": {}}
    figures["step_seconds"] = {name: spread(seconds) for name, seconds in times.items()}
    synced = {n: differences(s, times[LOCAL]) for n, s in times.items() if n != LOCAL}
    figures["sync_seconds"] = {name: spread(seconds) for name, seconds in synced.items()}
    for name in synced:
        if name != BASELINE:
            figures["step_ratio"][name] = ratio(times[name], times[BASELINE])
            figures["sync_ratio"][name] = ratio(synced[name], synced[BASELINE])
    return figures


def _check(ranks: Ranks, workload: Workload, trainers: Sequence[Trainer]) -> dict[str, float]:
    """Compare each variant's gradients and final state with the reference's. Collective.

    Every step begins from the reference's state: on three ranks sums round differently by their order,
    and the residual network makes 0.2 of 1e-7 in three steps. Returns the largest difference on any
    rank. Raises InternalError, on every rank, if a variant that synchronises is further away than
    `TOLERANCE`.
    """
    reference = Reference(workload, ranks)
    worst = [0.0] * len(trainers)
    for _ in range(CHECKED_STEPS):
        for trainer in trainers:
            _copy_state(reference.model, trainer.plain)
        reference.step()
        for place, trainer in enumerate(trainers):
            trainer.step()
            worst[place] = max(worst[place], _distance(trainer.plain, reference.model))
    found = dict(zip((t.variant.name for t in trainers), ranks.slowest(worst), strict=True))
    for trainer in trainers:
        name = trainer.variant.name
        if trainer.variant.synchronises and not found[name] <= TOLERANCE:
            raise InternalError(
                f"[rank {ranks.rank}] {name} on {workload.name}: in {CHECKED_STEPS} steps gradients or state "
                f"differ from the mean over the ranks by up to {found[name]:.2g} (relative; "
                f"{TOLERANCE:g} is allowed), so its speed means nothing"
            )
    return found


@torch.no_grad()
def _copy_state(source: nn.Module, target: nn.Module) -> None:
    for theirs, ours in zip(source.state_dict().values(), target.state_dict().values(), strict=True):
        ours.copy_(theirs)


def _distance(model: nn.Module, reference: nn.Module) -> float:
    gradients = _relative(
        [p.grad for p in model.parameters() if p.grad is not None],
        [p.grad for p in reference.parameters() if p.grad is not None],
    )
    state = _relative(list(model.state_dict().values()), list(reference.state_dict().values()))
    return max(gradients, state)


def _relative(found: Sequence[Tensor | None], expected: Sequence[Tensor]) -> float:
    """Return the largest difference of a tensor, relative to the largest expected element of it.

    A missing tensor and NaN count as infinitely far.
    """
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if a is None:
            return float("inf")
        size = max(b.abs().max().item(), torch.finfo(torch.float32).tiny)
        away = (a - b).abs().max().item() / size
        worst = max(worst, away if away == away else float("inf"))
    return worst
