"""Results that ranks share, and each rank's own: what a script sees of its gradients is the same, whatever it does."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx import clip_grad_norm_
from phalanx.reduce import memory
from phalanx.testing import run
from phalanx.testing.thread_world import generator, seeded
from phalanx.transport.common_results import CommonResults
from phalanx.transport.pieces import Cut
from phalanx.transport.shared_gradients import SharedGradients
from tests.threads.small_models import RandomScript, copied_gradients, ddp

IN_PIECES, AT_ONCE = Cut(4096, common=0, small=1024), Cut()
ACTIONS = ["clip", "clip together", "one clips", "keep", "leave", "zero", "numpy"]
ACTIONS += ["accumulate", "weigh", "skip", "branch", "join"]


def model_of(seed: int) -> Any:
    with seeded(seed):
        layers = nn.Sequential(nn.Linear(6, 70), nn.Tanh(), nn.Linear(70, 40), nn.Tanh(), nn.Linear(40, 3))
    return ddp(layers)


class Script(RandomScript):
    """A training loop that does `actions` at random, and what it has seen of its gradients."""

    def __init__(self, seed: int, actions: list[str], rank: int, size: int) -> None:
        super().__init__(model_of(seed), seed, actions, rank, size)
        self.seen: list[list[Tensor | None]] = []

    def run(self) -> list[list[Tensor | None]]:
        steps = 10 - (self.rank if "join" in self.actions else 0)
        with self.model.join(enable="join" in self.actions):
            for at in range(steps):
                self.step(at)
                self.seen.append(copied_gradients(self.model))
                self.afterwards()
        self.seen.append(copied_gradients(self.model))
        self.check_kept()
        return self.seen

    def step(self, at: int) -> None:
        if not self.does("leave"):
            self.model.zero_grad(set_to_none=not self.does("zero"))
        x = torch.randn(5, 6, generator=generator(1000 * self.seed + 10 * at + self.rank))
        if self.does("accumulate"):
            with self.model.no_sync():
                self.model(x + 1).square().mean().backward()
        skips, part, weighs = self.does("skip"), self.does("branch"), self.does("weigh") and "join" not in self.actions
        if skips and self.rank == at % self.size:
            self.model.skip()
            return
        y = self.model.module[:3](x) if part and self.rank == 0 else self.model(x)
        loss = y.square().mean()
        (self.model.weigh(loss, at % 3 + self.rank) if weighs else loss).backward()

    def afterwards(self) -> None:
        shown = [p.grad for p in self.model.module.parameters() if p.grad is not None]
        if self.does("keep"):
            self.kept += [(each.detach(), each.clone()) for each in shown[self.dice.randrange(4) :]]
        elif self.does("clip"):
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)
        elif self.does("clip together"):
            clip_grad_norm_(self.model.parameters(), 0.01 if self.does("clip together") else 1e3)
        elif self.does("one clips"):
            if self.rank == 1:
                torch._foreach_mul_(shown, 0.5)
        elif self.does("numpy"):
            for each in shown:
                each.numpy()[...] *= 2


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(30))
def test_what_a_script_sees_of_its_gradients(seed: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(seed)
    actions = dice.sample(ACTIONS, dice.randrange(1, 5)) if seed else []
    if "weigh" in actions:  # then everything would have to be weighed
        actions = [action for action in actions if action != "accumulate"]
    if "keep" in actions:  # these write to the gradient that is shown, and so to what was kept of it
        actions = [action for action in actions if action not in ("zero", "leave", "join")]

    def program(rank: int) -> list[list[Tensor | None]]:
        return Script(seed, actions, rank, size).run()

    monkeypatch.setattr(memory, "CUT", AT_ONCE)
    expected = run(size, program)
    monkeypatch.setattr(memory, "CUT", IN_PIECES)
    for theirs, ours in zip(expected, run(size, program), strict=True):
        for at, (a, b) in enumerate(zip(theirs, ours, strict=True)):
            assert [each is None for each in a] == [each is None for each in b], (actions, at)
            for x, y in zip(a, b, strict=True):
                assert x is None or y is None or torch.equal(x, y), (actions, at)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether the results of each reduction in pieces were shared, on rank 0."""
    found: list[bool] = []
    reduce = SharedGradients.reduce

    def spied(self: SharedGradients, *arguments: Any) -> None:
        if self.rank == 0:
            found.append(self.shares)
        reduce(self, *arguments)

    monkeypatch.setattr(memory, "CUT", IN_PIECES)
    monkeypatch.setattr(SharedGradients, "reduce", spied)
    yield found


Step = Callable[[Any, int, int], None]


def clip_in(step: int, of_rank: int) -> Step:
    def act(model: Any, rank: int, at: int) -> None:
        if at == step and rank == of_rank:
            model.module[4].bias.grad[0] = 5.0

    return act


def skip_in(model: Any, rank: int, at: int) -> None:
    if rank == 1 and at == 2:
        model.skip()


NOTHING: Step = lambda *_: None  # noqa: E731


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (NOTHING, NOTHING, [True] * 5),
        (NOTHING, clip_in(1, 0), [True] * 2 + [False] * 3),
        (NOTHING, clip_in(1, 1), [True] * 2 + [False] * 3),
        (skip_in, NOTHING, [True, True, False, True, True]),
    ],
    ids=["all", "one number written", "on the other rank", "a rank skips"],
)
def test_results_are_shared_until_somebody_writes_to_one(
    before: Step, after: Step, expected: list[bool], ways: list[bool]
) -> None:
    def program(rank: int) -> None:
        model = model_of(0)
        for at in range(5):
            model.zero_grad()
            before(model, rank, at)
            if not (before is skip_in and rank == 1 and at == 2):
                model(torch.ones(2, 6)).mean().backward()
            after(model, rank, at)

    run(2, program)
    assert ways == expected


def test_results_are_shared_though_they_are_clipped(ways: list[bool]) -> None:
    def program(rank: int) -> None:
        model = model_of(0)
        for at in range(5):
            model.zero_grad()
            model(torch.ones(2, 6)).mean().backward()
            clip_grad_norm_(model.parameters(), 1e-3 if at == 2 else 1e3)

    run(2, program)
    assert ways == [True] * 5


@pytest.mark.parametrize("steps", [(2, 2), (1, 3), (3, 1)], ids=["even", "uneven", "the other way"])
def test_after_join_results_are_shared_and_what_a_rank_has_kept_of_its_last_step_has_not_changed(
    steps: tuple[int, int], ways: list[bool]
) -> None:
    def program(rank: int) -> Tensor:
        model = model_of(0)
        weight = model.module[2].weight

        def step(at: int) -> None:
            model.zero_grad()
            model(torch.full((2, 6), at + 1.0)).square().mean().backward()

        with model.join():
            for at in range(steps[rank]):
                step(at)
            kept, copy = weight.grad, weight.grad.clone()
        assert torch.equal(kept, copy)
        last = weight.grad.clone()
        step(9)
        step(10)
        return last

    first, second = run(2, program)
    assert torch.equal(first, second)
    assert ways[-2:] == [True, True]


def test_two_ranks_post_the_first_piece_as_it_was_right_before_and_again_where_that_was_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "CUT", IN_PIECES)

    def program(rank: int) -> list[list[str]]:
        model = model_of(0)
        model.zero_grad()
        model(torch.ones(2, 6)).mean().backward()  # shared for the first time
        shared, posted = model._reducer.places.memory.shared, []

        def noting(name: str, post: Callable[[int, int, float], None]) -> Callable[[int, int, float], None]:
            def noted(piece: int, turn: int, factor: float) -> None:
                if not piece:
                    posted[-1].append(name)
                post(piece, turn, factor)

            return noted

        shared.post, shared.halves.post = noting("whole", shared.post), noting("half", shared.halves.post)
        for weights in ((1, 1), (1, 1), (1, 3), (1, 3), (2, 2), (2, 2)):
            posted.append([])
            model.zero_grad()
            loss = model(torch.full((2, 6), rank + 1.0)).mean()
            model.weigh(loss, weights[rank]).backward()
        return posted

    expected = [["half"], ["half"], ["half", "whole"], ["whole"], ["whole"], ["half"]]
    assert run(2, program) == [expected] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_halves_of_other_dtypes_are_the_same_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(rank: int) -> list[Tensor | None]:
        model = ddp(model_of(3).module.to(dtype))
        for at in range(2):
            model.zero_grad()
            model(torch.randn(4, 6, generator=generator(at + rank)).to(dtype)).square().mean().backward()
        shared = model._reducer.places.memory.shared
        assert shared.shares == (shared._ahead is not None) == (memory.CUT is IN_PIECES)
        return copied_gradients(model)

    monkeypatch.setattr(memory, "CUT", AT_ONCE)
    expected = run(2, program)
    monkeypatch.setattr(memory, "CUT", IN_PIECES)
    for theirs, ours in zip(expected, run(2, program), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))


def test_where_the_system_does_not_tell_what_was_written_nothing_is_shared(
    ways: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(rank: int) -> list[Tensor | None]:
        model = model_of(0)
        for _ in range(2):
            model.zero_grad()
            model(torch.ones(2, 6) * rank).mean().backward()
        return copied_gradients(model)

    expected = run(2, program)
    assert ways == [True, True]
    monkeypatch.setattr(CommonResults, "_pages", CommonResults._pages.with_name("nothing"))
    for theirs, ours in zip(expected, run(2, program), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))
    assert ways == [True, True, False, False]


def test_a_forked_process_keeps_the_gradients_that_it_has_found(ways: list[bool]) -> None:
    def program(rank: int) -> None:
        model, (ready, go) = model_of(0), os.pipe()

        def train(at: int) -> None:
            model.zero_grad()
            model(torch.ones(2, 6) * at).mean().backward()

        train(1)
        train(2)
        expected = model.module[2].weight.grad.clone().numpy().tobytes()[:400]
        shown = memoryview(model.module[2].weight.grad.numpy()).cast("B")[:400]
        told, tell = os.pipe()
        child = os.fork() if rank == 0 else -1
        if not child:  # nothing that takes locks: this process was forked from one with threads
            os.read(ready, 1)
            os.write(tell, shown)
            os._exit(0)
        del shown
        train(3)
        train(4)
        assert model.module[2].weight.grad.numpy().tobytes()[:400] != expected
        if rank == 0:
            os.write(go, b".")
            assert os.read(told, 400) == expected
            assert os.waitpid(child, 0)[1] == 0
        for each in (ready, go, told, tell):
            os.close(each)

    run(2, program)
    assert ways == [True] * 4


def test_weights_that_are_new_in_each_step_leave_little_behind() -> None:
    def program(rank: int) -> int:
        model = model_of(0)
        for at in range(20):
            model.zero_grad()
            model.weigh(model(torch.ones(2, 6)).mean(), at + 3 * rank + 1).backward()
        return len(model._reducer.places.memory.shared._programs)

    assert max(run(2, program)) <= 3
