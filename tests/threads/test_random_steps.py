"""Random training steps on 1 to 4 ranks: every gradient is what one process would have, None-ness included.

A sequence is made from its seed as plain data (`Plan`). Each rank runs it twice at once: on a wrapped model,
and on one plain copy of the model for each rank (`Truth`), whose gradients are averaged by hand where the
wrapped model synchronises. After each step every gradient of the wrapped model is compared.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx import DistributedDataParallel
from phalanx.reduce import memory
from phalanx.testing import generator, oracle, run
from phalanx.transport.pieces import Cut
from tests.threads.small_models import filled

LAYERS = "abcde"
SEQUENCES_PER_WORLD = 10
IN_CI, IN_FULL = 120, 1000

Route = tuple[tuple[str, str], ...]  # layers in order of use, each with the kind of its checkpoint


@dataclass(frozen=True)
class Step:
    """One step of all ranks; what is a tuple of `routes` is one per rank."""

    kind: str  # "plain", "two forwards", "retained", "raises", "penalty", "module"
    routes: tuple[Route, ...]
    others: tuple[Route, ...]  # of the second forward
    no_sync: str  # "", "forward", "backward", "both"
    frozen: frozenset[str]
    reset: str  # "none", "zero", "keep": what zero_grad does before it
    update: bool  # an optimizer step after a synchronised one
    grad_on: frozenset[int]  # ranks that also call autograd.grad


@dataclass(frozen=True)
class Plan:
    seed: int
    ranks: int
    steps: tuple[Step, ...]
    frozen_at_wrapping: frozenset[str]
    bucket_cap_mb: float
    flags: dict[str, bool] = field(default_factory=dict)


def make_plan(seed: int, ranks: int) -> Plan:
    draw = random.Random(seed)
    steps: list[Step] = []
    frozen = frozenset(name for name in LAYERS if draw.random() < 0.2)
    at_wrapping = frozen if len(frozen) < len(LAYERS) else frozenset()
    local = False
    for _ in range(draw.randint(3, 7)):
        if draw.random() < 0.3:
            frozen = frozenset(name for name in LAYERS if draw.random() < 0.25)
        if len(frozen) == len(LAYERS):
            frozen = frozen - {draw.choice(LAYERS)}
        kind = draw.choice(["plain"] * 5 + ["two forwards", "retained", "raises", "penalty", "module"])
        equal = draw.random() < 0.4
        routes = _routes(draw, ranks, equal)
        # A forward of the wrapper has seen what is frozen, and cleaned up after a backward that raised.
        followed = bool(steps) and steps[-1].frozen == frozen and steps[-1].kind != "raises"
        if kind == "module" and not (followed and all(_uses_some(route, frozen) for route in routes)):
            kind = "plain"
        raised = bool(steps) and steps[-1].kind == "raises"
        reset = "none" if raised else draw.choice(["none", "zero", "keep", "keep" if local else "none"])
        no_sync = draw.choice(["", "", "", "forward", "backward", "both"])
        steps.append(
            Step(
                kind,
                routes,
                _routes(draw, ranks, equal),
                no_sync if kind != "module" else "",
                frozen,
                reset,
                draw.random() < 0.3,
                frozenset(r for r in range(ranks) if draw.random() < 0.1),
            )  # fmt: skip
        )
        local = bool(no_sync)
    flags = {name: draw.random() < 0.2 for name in ("find_unused_parameters", "gradient_as_bucket_view")}
    return Plan(seed, ranks, tuple(steps), at_wrapping, draw.choice([25, 0.0001]), flags)


def _uses_some(route: Route, frozen: frozenset[str]) -> bool:
    return any(name not in frozen for name, _ in route)


def _routes(draw: random.Random, ranks: int, equal: bool) -> tuple[Route, ...]:
    def route() -> Route:
        names = draw.sample(LAYERS, draw.randint(1, len(LAYERS)))
        names += [draw.choice(names)] if draw.random() < 0.3 else []
        return tuple((name, draw.choice(["no", "no", "reentrant", "not reentrant"])) for name in names)

    one = route()
    return tuple(one if equal else route() for _ in range(ranks))


# ------------------------------------------------------------------ the model


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        raise ZeroDivisionError("on purpose")


class Routed(nn.Module):
    """Five layers of several kinds; forward goes by a route, and raises in backward where it says so."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.c, self.d = nn.PReLU(3), nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3))
        self.e = nn.Linear(3, 3)
        self.e.weight = self.b.weight  # tied

    def forward(self, x: Tensor, route: Route, fails: bool = False) -> Tensor:
        for number, (name, kind) in enumerate(route):
            layer = getattr(self, name)
            if kind == "no":
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=kind == "reentrant")
            if fails and number == 0:
                x = Fails.apply(x)
        return torch.tanh(x)


def freeze(model: nn.Module, frozen: frozenset[str]) -> None:
    """Freeze these layers and no others; the weight that b and e share is frozen if b is."""
    for name in reversed(LAYERS):
        for parameter in getattr(model, name).parameters():
            parameter.requires_grad_(name not in frozen)


# ------------------------------------------------------------------ a step, on the wrapped and on a plain model


def inputs_of(plan: Plan, number: int, rank: int) -> tuple[Tensor, Tensor]:
    random_numbers = generator(1000 * plan.seed + 10 * number + rank)
    first, second = torch.randn(2, 2, 3, dtype=torch.float64, generator=random_numbers)
    return first.requires_grad_(), second.requires_grad_()


def forwards(model: nn.Module, plan: Plan, number: int, rank: int) -> list[Tensor]:
    step = plan.steps[number]
    first, second = inputs_of(plan, number, rank)
    if step.kind == "penalty":
        # Reentrant checkpoints do not work with autograd.grad.
        route = tuple((name, "no") for name, _ in step.routes[rank])
        out = model(first, route)
        (slope,) = torch.autograd.grad(out.square().sum(), first, create_graph=True)
        return [out.square().mean() + slope.square().mean()]
    losses = [model(first, step.routes[rank], step.kind == "raises").square().mean()]
    if step.kind == "two forwards":
        losses.append(model(second, step.others[rank]).square().mean())
    return losses


def backwards(losses: list[Tensor], kind: str) -> None:
    if kind == "retained":
        losses[0].backward(retain_graph=True)
        (0.5 * losses[0]).backward()
    elif kind == "raises":
        with pytest.raises(ZeroDivisionError):
            losses[0].backward()
    else:
        for loss in reversed(losses):
            loss.backward()


def reset(model: nn.Module, how: str) -> None:
    if how != "keep":
        model.zero_grad(set_to_none=how == "none")


class Truth:
    """One plain model for each rank."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self.plan = plan
        self.models = [copy.deepcopy(model) for _ in range(plan.ranks)]

    def run(self, number: int) -> None:
        step = self.plan.steps[number]
        for rank, model in enumerate(self.models):
            freeze(model, step.frozen)
            reset(model, step.reset)
            backwards(forwards(model, self.plan, number, rank), step.kind)

    def synchronise(self) -> None:
        for parameters in zip(*(model.parameters() for model in self.models), strict=True):
            gradients = [p.grad for p in parameters if p.grad is not None]
            if gradients:
                mean = sum(gradients) / len(parameters)
                for p in parameters:
                    p.grad = mean.clone()


def update(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad


def run_plan(rank: int, plan: Plan) -> int:
    """Run one sequence; return the number of comparisons."""
    plain = filled(Routed().double(), plan.seed)
    truth = Truth(plan, plain)
    freeze(plain, plan.frozen_at_wrapping)
    model = DistributedDataParallel(plain, bucket_cap_mb=plan.bucket_cap_mb, **plan.flags)
    for number, step in enumerate(plan.steps):
        freeze(plain, step.frozen)
        reset(model, step.reset)
        run_step(model, plan, number, rank)
        truth.run(number)
        if not step.no_sync and step.kind != "raises":
            truth.synchronise()
        if step.kind == "raises":
            continue  # the next step drops all gradients
        try:
            oracle.assert_close(oracle.gradients_of(model), oracle.gradients_of(truth.models[rank]), 1e-9, 1e-12)
        except AssertionError as error:
            where = f"seed {plan.seed}, {plan.ranks} ranks, step {number}"
            raise AssertionError(f"{where}: {error}\n{describe(plan)}") from None
        if step.update and not step.no_sync:
            for each in (model, *truth.models):
                update(each)
    return len(plan.steps)


def run_step(model: DistributedDataParallel, plan: Plan, number: int, rank: int) -> None:
    step = plan.steps[number]
    if rank in step.grad_on:
        x, _ = inputs_of(plan, number, rank)
        torch.autograd.grad(model(x, (("a", "no"),)).sum(), x)
    called = model.module if step.kind == "module" else model
    if step.no_sync == "both":
        with model.no_sync():
            backwards(forwards(called, plan, number, rank), step.kind)
    elif step.no_sync == "forward":
        with model.no_sync():
            losses = forwards(called, plan, number, rank)
        backwards(losses, step.kind)
    elif step.no_sync == "backward":
        losses = forwards(called, plan, number, rank)
        with model.no_sync():
            backwards(losses, step.kind)
    else:
        backwards(forwards(called, plan, number, rank), step.kind)


def describe(plan: Plan) -> str:
    lines = [f"frozen when wrapped: {sorted(plan.frozen_at_wrapping)}, {plan.flags}"]
    lines += [f"step {number}: {step}" for number, step in enumerate(plan.steps)]
    return "\n".join(lines)


def run_all(rank: int, plans: list[Plan]) -> int:
    done = 0
    for plan in plans:
        try:
            done += run_plan(rank, plan)
        except AssertionError:
            raise
        except Exception as error:
            raise RuntimeError(f"seed {plan.seed}, {plan.ranks} ranks: {error}\n{describe(plan)}") from error
    return done


def world_of(first_seed: int) -> tuple[int, list[Plan]]:
    ranks = first_seed // SEQUENCES_PER_WORLD % 4 + 1
    return ranks, [make_plan(seed, ranks) for seed in range(first_seed, first_seed + SEQUENCES_PER_WORLD)]


def check(first_seed: int) -> None:
    ranks, plans = world_of(first_seed)
    counts = run(ranks, run_all, plans, timeout=60)
    assert counts == [sum(len(plan.steps) for plan in plans)] * ranks


CUTS = {"pieces": Cut(128), "segments": Cut(128, direct=1), "shared": Cut(128, common=0, small=32)}


@pytest.fixture(params=CUTS.values(), ids=CUTS.keys())
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Cut:
    """How gradients are cut: by default such small ones are one piece."""
    monkeypatch.setattr(memory, "CUT", request.param)
    return request.param


@pytest.mark.parametrize("first_seed", range(0, IN_CI, SEQUENCES_PER_WORLD))
def test_random_steps(first_seed: int):
    check(first_seed)


@pytest.mark.parametrize("first_seed", range(0, IN_CI, 8 * SEQUENCES_PER_WORLD))
def test_random_steps_in_pieces(first_seed: int, cut: Cut):
    check(first_seed + SEQUENCES_PER_WORLD)  # of two ranks
    check(first_seed + 3 * SEQUENCES_PER_WORLD)  # of four


@pytest.mark.full
@pytest.mark.parametrize("first_seed", range(IN_CI, IN_FULL, SEQUENCES_PER_WORLD))
def test_more_random_steps(first_seed: int):
    check(first_seed)


def test_the_sequences_contain_what_they_should():
    plans = [plan for first in range(0, IN_CI, SEQUENCES_PER_WORLD) for plan in world_of(first)[1]]
    steps = [step for plan in plans for step in plan.steps]
    assert {plan.ranks for plan in plans} == {1, 2, 3, 4}
    assert {step.kind for step in steps} == {"plain", "two forwards", "retained", "raises", "penalty", "module"}
    assert {step.no_sync for step in steps} == {"", "forward", "backward", "both"}
    assert {step.reset for step in steps} == {"none", "zero", "keep"}
    assert any(step.frozen for step in steps) and any(step.grad_on for step in steps)
    assert any(len(set(step.routes)) > 1 for step in steps)


def test_a_wrong_gradient_is_found():
    """The comparison sees a rank that misses one synchronisation."""
    plan = make_plan(15, 2)
    plain = replace(plan.steps[0], kind="plain", no_sync="", reset="none", grad_on=frozenset())
    wrong = replace(plan, steps=(plain,), frozen_at_wrapping=frozenset())

    def program(rank: int) -> None:
        truth = Truth(wrong, filled(Routed().double(), wrong.seed))
        model = DistributedDataParallel(filled(Routed().double(), wrong.seed))
        freeze(model.module, wrong.steps[0].frozen)
        with model.no_sync():
            run_step(model, wrong, 0, rank)
        truth.run(0)
        truth.synchronise()
        with pytest.raises(AssertionError):
            oracle.assert_close(oracle.gradients_of(model), oracle.gradients_of(truth.models[rank]), 1e-9, 1e-12)

    run(2, program)
