"""Learning rates for large batches, and the total batch that they are for.

With k times the batch, the linear rule takes k times the learning rate (Goyal et al. 2017, "Accurate, Large
Minibatch SGD", for SGD with momentum), the square-root rule the square root of k times (Krizhevsky 2014, "One
weird trick for parallelizing convolutional neural networks"; Hoffer et al. 2017, "Train longer, generalize
better"; usual with Adam). Neither holds in the first steps, when weights change fast; so one begins with the
learning rate of the base batch and goes up to the scaled one in equal steps (Goyal et al., section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from phalanx.errors import MisuseError, RankMismatchError
from phalanx.group import world
from phalanx.train.exchange import tell_all

_RULES: dict[str, Callable[[float], float]] = {"linear": lambda ratio: ratio, "sqrt": math.sqrt}
_PLAN = "phalanx.batch_plan()"


class ScaledLR(LRScheduler):
    """Scale the optimizer's learning rates from a base batch to the total batch, with a warm-up.

        plan = phalanx.batch_plan(per_rank=32, accumulate=4)
        cosine = CosineAnnealingLR(optimizer, T_max=steps - 500)
        schedule = phalanx.ScaledLR(optimizer, 256, plan.total, "linear", warmup_steps=500, after=cosine)

    The optimizer is made with the learning rate for `base_batch` items per step. In the first `warmup_steps`
    steps it goes in equal steps from there to `factor` times as much, where `factor` is total_batch / base_batch
    or its square root; it goes down at once where `factor` is below 1. One `step()` per optimizer step.

    `after` is another scheduler of the same optimizer, made before this one, which takes over after the warm-up:
    from then on `step()` steps it too, and its learning rates count times `factor`. Do not step it yourself.
    Without `after` this scheduler multiplies what it finds, so that it can be stepped beside torch's chainable
    schedulers, in ChainedScheduler and in SequentialLR.

    Not collective; the same on all ranks. `state_dict` holds where the schedule is, `after` included, but not
    batches and rule: a run that is resumed with another total batch is scaled for that.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        base_batch: float,
        total_batch: float,
        rule: str = "linear",
        warmup_steps: int = 0,
        after: LRScheduler | None = None,
        last_epoch: int = -1,
    ) -> None:
        self.factor = _factor(base_batch, total_batch, rule)
        if not isinstance(warmup_steps, int) or warmup_steps < 0:
            raise MisuseError(f"ScaledLR(warmup_steps={warmup_steps!r})", "a number of optimizer steps, such as 500")
        _check_after(after, optimizer)
        self.warmup_steps, self.after = warmup_steps, after
        # Learning rates as set here, and what they are without the factor. To divide by the factor, and multiply
        # by it again, at each step, would add up rounding errors.
        self._plain: list[float] = []
        self._scaled: list[list[float]] = []  # as set here now, and as set before a checkpoint was loaded
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float]:  # type: ignore[override]  # numbers only
        """Return the learning rates of step `last_epoch`; torch calls it in `step`."""
        plain = self._without_factor()
        if self.after is not None and self.last_epoch > self.warmup_steps:
            self._set(plain)
            self.after.step()
            plain = [float(group["lr"]) for group in self.optimizer.param_groups]
        now = self._factor_at(self.last_epoch)
        self._plain, self._scaled = plain, [[lr * now for lr in plain]]
        return list(self._scaled[0])

    def _get_closed_form_lr(self) -> list[float]:
        """Return the learning rates of step `last_epoch` from nothing else; SequentialLR begins with step 0 so."""
        if self.after is not None and self.last_epoch > self.warmup_steps:
            raise MisuseError(f"ScaledLR(after=...).step({self.last_epoch})", "step() without an epoch")
        now = self._factor_at(self.last_epoch)
        self._plain = [float(lr) for lr in self.base_lrs]
        self._scaled = [[lr * now for lr in self._plain]]
        return list(self._scaled[0])

    def state_dict(self) -> dict[str, Any]:
        """Return where the schedule is, `after` included."""
        configuration = ("optimizer", "after", "factor", "warmup_steps")
        state = {key: value for key, value in self.__dict__.items() if key not in configuration}
        state["after"] = None if self.after is None else self.after.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where `state_dict` says; before or after the optimizer has loaded its own state."""
        state = dict(state_dict)
        after = state.pop("after")
        if (after is None) != (self.after is None):
            have, had = ("with", "without") if after is None else ("without", "with")
            raise MisuseError(
                f"ScaledLR {have} another scheduler after it cannot go on from the state of one {had}",
                f"ScaledLR(..., after={'None' if after is None else '...'})",
            )
        self.__dict__.update(state)
        if self.after is not None:
            self.after.load_state_dict(after)
        # With another total batch than before, the learning rates are others.
        now = self._factor_at(self.last_epoch)
        self._scaled = [[lr * now for lr in self._plain], self._scaled[0]]
        self._last_lr = list(self._scaled[0])
        self._set(self._scaled[0])

    def _factor_at(self, step: int) -> float:
        if step >= self.warmup_steps:
            return self.factor
        start = min(1.0, self.factor)
        return start + (self.factor - start) * step / self.warmup_steps

    def _without_factor(self) -> list[float]:
        """The learning rates as they would be without this scheduler."""
        lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        if self.last_epoch <= 0:
            return lrs
        before, known = self._factor_at(self.last_epoch - 1), len(self._plain)
        return [
            self._plain[i] if i < known and any(lr == lrs_set[i] for lrs_set in self._scaled) else lr / before
            for i, lr in enumerate(lrs)
        ]

    def _set(self, lrs: list[float]) -> None:
        for group, lr in zip(self.optimizer.param_groups, lrs, strict=False):
            if hasattr(group["lr"], "fill_"):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


def _factor(base_batch: float, total_batch: float, rule: str) -> float:
    if rule not in _RULES:
        raise MisuseError(f"ScaledLR(rule={rule!r})", 'rule="linear" (SGD) or rule="sqrt" (Adam)')
    for name, value in (("base_batch", base_batch), ("total_batch", total_batch)):
        if not 0 < value < math.inf:
            raise MisuseError(f"ScaledLR({name}={value!r})", "items per optimizer step, over all ranks")
    return _RULES[rule](total_batch / base_batch)


def _check_after(after: LRScheduler | None, optimizer: Optimizer) -> None:
    if isinstance(after, ReduceLROnPlateau):
        raise MisuseError(
            "ScaledLR(after=ReduceLROnPlateau(...)), which is stepped with a metric",
            "no after=, and plateau.step(metric) beside it: both multiply what they find",
        )
    if after is not None and after.optimizer is not optimizer:
        raise MisuseError("ScaledLR(after=...) with a scheduler of another optimizer", "both of one optimizer")


@dataclass(frozen=True)
class BatchPlan:
    """How many items one optimizer step sees; `str()` says it in words.

    `per_rank` is this rank's number of items per micro-batch, `total` the number over all ranks and micro-batches.
    """

    per_rank: int
    ranks: int
    accumulate: int
    total: int

    def __str__(self) -> str:
        of_all = self.total // self.accumulate
        even = of_all == self.per_rank * self.ranks
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        parts = [f"{self.per_rank} per rank x {ranks}" if even else f"{of_all} over {ranks} of different sizes"]
        parts += [f"{self.accumulate} micro-batches"] if self.accumulate > 1 else []
        return f"total batch {self.total} = " + " x ".join(parts)


def batch_plan(
    per_rank: int | None = None, accumulate: int | None = None, total: int | None = None, show: bool = True
) -> BatchPlan:
    """Compute the total batch, per-rank batch x ranks x micro-batches, and print it on rank 0.

    Of `per_rank`, `accumulate` (1 if neither it nor `total` is given) and `total` give all but one, which is
    computed from the others and must come out even. Ranks may have different `per_rank`; the total is over all.

    Collective: every rank, same order. Raises MisuseError for numbers that cannot be, RankMismatchError if the
    ranks accumulate differently.
    """
    ranks = world.world_size()
    if total is not None:
        per_rank, accumulate = _divided(per_rank, accumulate, total, ranks)
    if per_rank is None:
        raise MisuseError("phalanx.batch_plan() without per_rank", "batch_plan(per_rank=32, accumulate=4)")
    plan = BatchPlan(per_rank, ranks, 1 if accumulate is None else accumulate, 0)
    said = tell_all(_PLAN, [plan.per_rank, plan.accumulate])
    sizes = [each[0] for each in said if each is not None]
    rounds = {rank: each[1] for rank, each in enumerate(said) if each is not None}
    if min(min(sizes), min(rounds.values())) < 1:
        raise MisuseError(f"phalanx.batch_plan: per_rank {sizes}, accumulate {list(rounds.values())}, rank by rank",
                          "numbers of at least 1", world.rank())  # fmt: skip
    if len(set(rounds.values())) > 1:
        calls = {rank: f"phalanx.batch_plan(accumulate={k})" for rank, k in rounds.items()}
        raise RankMismatchError(calls, world.rank(), "Every rank must accumulate over as many micro-batches.")
    plan = BatchPlan(plan.per_rank, ranks, plan.accumulate, sum(sizes) * plan.accumulate)
    if show and world.is_main():
        print(plan, flush=True)
    return plan


def _divided(per_rank: int | None, accumulate: int | None, total: int, ranks: int) -> tuple[int, int]:
    """Compute the number that was not given; MisuseError if it does not come out even."""
    if per_rank is not None and accumulate is not None:
        if per_rank * ranks * accumulate == total:
            return per_rank, accumulate
    else:
        known = (per_rank or accumulate or 1) * ranks
        missing, rest = divmod(total, known)
        if missing and not rest:
            return (missing, accumulate or 1) if per_rank is None else (per_rank, missing)
    known = (per_rank or 1) * (accumulate or 1) * ranks
    near = max(known, total // known * known)
    named = (("total", total), ("per_rank", per_rank), ("accumulate", accumulate))
    given = ", ".join(f"{name}={value}" for name, value in named if value is not None)
    raise MisuseError(
        f"phalanx.batch_plan({given}) on {ranks} ranks does not come out even",
        f"total={near if per_rank is None or accumulate is None else known}",
        world.rank(),
    )
