"""Sums begun while backward runs: gradients are those of sums begun when it has ended, whatever a script does."""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx import DistributedDataParallel
from phalanx.reduce import early
from phalanx.reduce.early import Early
from phalanx.testing import generator, run
from phalanx.testing.thread_world import seeded
from phalanx.transport import backend
from tests.threads.small_models import RandomScript, copied_gradients

ACTIONS = ["no_sync", "weigh", "skip", "branch", "join", "raise", "write", "freeze", "reenter", "keep", "leave", "grad"]
ACTIONS += ["policy", "hook", "replace", "change"]


@pytest.fixture(autouse=True)
def over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHALANX_TRANSPORT", "gloo")


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Of each synchronisation, how many sums rank 0 had begun in backward, and how many of all became results."""
    noted: list[tuple[int, int]] = []
    finish = Early._finish

    def spied(self: Early, *arguments: Any) -> list[Tensor]:
        begun = len(self._begun)
        totals = finish(self, *arguments)
        if self.backend._rank == 0:
            noted.append((begun, len(totals)))
        return totals

    monkeypatch.setattr(Early, "_finish", spied)
    yield noted


class Layers(nn.Module):
    """Three layers of about 3 KiB each; `part` leaves out the last."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(20, 30, bias), nn.Linear(30, 30, bias), nn.Linear(30, 20, bias)
        self.part = self.reenters = self.raises = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).tanh()
        if self.raises:
            x.register_hook(_raise)
        x = checkpoint(self.b, x, use_reentrant=True) if self.reenters else self.b(x)
        return x if self.part else self.c(x.tanh())


def _raise(gradient: Tensor) -> Tensor:
    raise ArithmeticError("in backward")


def _double(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(2)


def model_of(seed: int = 0, bias: bool = True) -> Any:
    with seeded(seed):
        layers = Layers(bias)
    return DistributedDataParallel(layers, bucket_cap_mb=0.002)  # a bucket for each layer


class Script(RandomScript):
    """A training loop that does `actions` at random, and what it has seen of its gradients."""

    chance = 0.3

    def __init__(self, seed: int, actions: list[str], rank: int, size: int) -> None:
        super().__init__(model_of(seed), seed, actions, rank, size)

    def run(self) -> list[list[Tensor | None]]:
        seen = []
        with self.model.join(enable="join" in self.actions):
            for at in range(12 - (self.rank if "join" in self.actions else 0)):
                self.step(at)
                seen.append(copied_gradients(self.model))
        self.check_kept()
        return seen

    def backward(self, x: Tensor) -> None:
        loss = self.model(x).square().mean()
        (self.model.weigh(loss, 1 + self.rank) if "weigh" in self.actions else loss).backward()

    def step(self, at: int) -> None:
        model, module = self.model, self.model.module
        one = at % self.size == self.rank
        if not self.does("leave"):
            model.zero_grad()
        x = torch.randn(5, 20, generator=generator(1000 * self.seed + 10 * at + self.rank))
        if self.does("change"):
            with seeded(at):
                module.b = nn.Linear(30, 30)
        if self.does("freeze"):
            module.b.requires_grad_(not module.b.weight.requires_grad)
        if self.does("policy"):
            self.actions = [action for action in self.actions if action != "policy"]
            model.sync_policy("a", every=2)
        if self.does("hook"):
            model.register_comm_hook(None, halving) if at % 2 else model.remove_comm_hook()
        module.reenters = self.does("reenter")
        module.part = self.does("branch") and one
        if self.does("raise") and one:
            module.raises = True
            with pytest.raises(ArithmeticError):
                self.backward(x)
            module.raises = False
            model.zero_grad()
        if self.does("no_sync"):
            with model.no_sync():
                self.backward(x + 1)
        if self.does("grad"):
            torch.autograd.grad(model(x).sum(), [module.c.weight, module.a.bias])
        handle = None
        if self.does("write") and one:
            handle = module.c.bias.register_post_accumulate_grad_hook(_double)
        if self.does("skip") and one:
            model.skip()
        else:
            self.backward(x)
        if handle is not None:
            handle.remove()
        if self.does("keep"):
            self.kept += [(p.grad.detach(), p.grad.clone()) for p in module.parameters() if p.grad is not None]
        if self.does("replace") and one and module.a.weight.grad is not None:
            module.a.weight.grad = module.a.weight.grad.clone()


def halving(state, bucket):  # noqa: ANN001, ANN201  # torch refuses other annotations than its own
    future = torch.futures.Future()
    future.set_result(bucket.buffer() / 2)
    return future


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seed", range(40))
def test_what_a_script_sees_of_its_gradients(seed: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(seed)
    actions = dice.sample(ACTIONS, dice.randrange(1, 5)) if seed else []
    if "join" in actions:  # these need all ranks
        actions = [action for action in actions if action not in ("change", "freeze", "replace")]
    if "weigh" in actions or "join" in actions:
        actions = [action for action in actions if action not in ("skip", "raise", "policy", "hook")]
    if "keep" in actions:
        actions = [action for action in actions if action not in ("leave", "join", "write")]

    def program(rank: int) -> list[list[Tensor | None]]:
        return Script(seed, actions, rank, size).run()

    found = run(size, program)
    monkeypatch.setattr(early, "made_for", lambda *arguments: early.Late())
    for theirs, ours in zip(run(size, program), found, strict=True):
        for at, (a, b) in enumerate(zip(theirs, ours, strict=True)):
            assert [each is None for each in a] == [each is None for each in b], (actions, at)
            for x, y in zip(a, b, strict=True):
                assert x is None or torch.allclose(x, y, rtol=1e-5, atol=1e-7), (actions, at)


def steps(rank: int, model: Any, count: int, before: Any = None) -> list[list[Tensor | None]]:
    seen = []
    for at in range(count):
        model.zero_grad()
        x = torch.randn(5, 20, generator=generator(10 * at + rank))
        if before is None or not before(model, rank, at, x):
            model(x).square().mean().backward()
        seen.append(copied_gradients(model))
    return seen


def test_from_the_second_step_on_all_buckets_are_begun_in_backward(finished: list[tuple[int, int]]) -> None:
    first, second = run(2, lambda rank: steps(rank, model_of(), 5))
    assert finished == [(0, 0)] + 4 * [(3, 3)]
    for a, b in zip(first, second, strict=True):
        assert all(map(torch.equal, a, b))


def test_in_join_too_while_all_ranks_run(finished: list[tuple[int, int]]) -> None:
    def program(rank: int) -> list[list[Tensor | None]]:
        model = model_of()
        with model.join():
            return steps(rank, model, 5 - rank)

    first, second = run(2, program)
    assert finished == [(0, 0)] + 3 * [(3, 3)] + [(3, 0)]
    for a, b in zip(first, second, strict=False):
        assert all(map(torch.equal, a, b))


def skipped(model: Any, rank: int, at: int, x: Tensor) -> bool:
    if at == 2 and rank == 1:
        model.skip()
    return at == 2 and rank == 1


def raised(model: Any, rank: int, at: int, x: Tensor) -> bool:
    if at == 2 and rank == 0:
        model.module.raises = True
        with pytest.raises(ArithmeticError):
            model(x).square().mean().backward()
        model.module.raises = False
        model.zero_grad()
    return False


def local_around_backward(model: Any, rank: int, at: int, x: Tensor) -> bool:
    if at == 2:
        with model.no_sync():
            model(x).square().mean().backward()
        model.zero_grad()
    return False


def rewritten(model: Any, rank: int, at: int, x: Tensor) -> bool:
    if at == 2 and rank == 1:
        last = model.module.c.bias

        def hook(gradient: Tensor) -> None:  # after the bucket of layer c has been begun
            last.grad.mul_(3)

        handle = model.module.a.bias.register_hook(hook)
        model(x).square().mean().backward()
        handle.remove()
    return at == 2 and rank == 1


def replaced(model: Any, rank: int, at: int, x: Tensor) -> bool:
    if at == 2 and rank == 1:

        def hook(gradient: Tensor) -> None:
            model.module.c.weight.grad = torch.ones(20, 30)

        handle = model.module.a.bias.register_hook(hook)
        model(x).square().mean().backward()
        handle.remove()
    return at == 2 and rank == 1


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (skipped, [(0, 0), (3, 3), (3, 0), (0, 0), (3, 3), (3, 3)]),
        (raised, [(0, 0), (3, 3), (1, 0), (0, 0), (3, 3), (3, 3)]),
        (local_around_backward, [(0, 0)] + 5 * [(3, 3)]),
        (rewritten, [(0, 0), (3, 3), (3, 0), (0, 0), (3, 3), (3, 3)]),
        (replaced, [(0, 0), (3, 3), (3, 0), (0, 0), (3, 3), (3, 3)]),
    ],
)
def test_what_was_begun_for_nothing(
    before: Any, expected: list[tuple[int, int]], finished: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(2, lambda rank: steps(rank, model_of(), 6, before))
    assert finished == expected
    monkeypatch.setattr(early, "made_for", lambda *arguments: early.Late())
    for ours, theirs in zip(found, run(2, lambda rank: steps(rank, model_of(), 6, before)), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert all(map(torch.equal, a, b))


@pytest.mark.parametrize("bias", [True, False])  # without, each bucket is one parameter
@pytest.mark.parametrize("through", ["data", "numpy"])
def test_what_a_hook_of_a_parameter_writes_without_a_trace(
    through: str, bias: bool, finished: list[tuple[int, int]]
) -> None:
    def halve(parameter: nn.Parameter) -> None:
        if through == "data":
            parameter.grad.data.mul_(0.5)
        else:
            parameter.grad.numpy()[...] *= 0.5

    def program(rank: int, hooked: bool) -> list[list[Tensor | None]]:
        model = model_of(bias=bias)
        first = steps(rank, model, 2)
        for parameter in model.parameters() if hooked else ():  # behind the hooks of Phalanx
            parameter.register_post_accumulate_grad_hook(halve)
        return first + steps(rank, model, 3)

    plain = run(2, program, False)
    for ours, theirs in zip(run(2, program, True), plain, strict=True):
        for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert all(torch.equal(x, y * 0.5 if at >= 2 else y) for x, y in zip(a, b, strict=True))
    assert finished[-1] == (3, 3)


def test_a_wrapper_is_dropped_at_once_though_others_have_not_begun_what_it_has() -> None:
    def program(rank: int) -> float:
        model = model_of()
        steps(rank, model, 2)
        if rank == 0:
            model.module.raises = True
            with pytest.raises(ArithmeticError):
                model(torch.ones(5, 20)).sum().backward()
        began = time.perf_counter()
        watch = weakref.ref(model._reducer.watch)
        del model
        gc.collect()
        assert watch() is None
        return time.perf_counter() - began

    assert max(run(2, program)) < 2
    assert len(backend._unclosed) == 1
    backend._unclosed.pop().shutdown()  # rank 1 is not waited for any more: it has closed its own


def test_a_model_that_changes_after_a_backward_that_raised(finished: list[tuple[int, int]]) -> None:
    def change(model: Any, rank: int, at: int, x: Tensor) -> bool:
        raised(model, rank, at, x)
        if at == 2:
            with seeded(7):
                model.module.b = nn.Linear(30, 30)
        return False

    first, second = run(2, lambda rank: steps(rank, model_of(), 6, change))
    assert finished == [(0, 0), (3, 3), (1, 0), (0, 0), (3, 3), (3, 3), (3, 3)]
    for a, b in zip(first, second, strict=True):
        assert all(map(torch.equal, a, b))


def test_two_models_in_one_backward_in_different_orders(finished: list[tuple[int, int]]) -> None:
    def program(rank: int) -> list[list[Tensor | None]]:
        models = [model_of(1), model_of(2)]
        seen = []
        for at in range(5):
            x = torch.randn(5, 20, generator=generator(10 * at + rank))
            losses = [model(x).square().mean() for model in (models if (rank + at) % 2 else models[::-1])]
            for model in models:
                model.zero_grad()
            sum(losses).backward()
            seen += [copied_gradients(model) for model in models]
        return seen

    first, second = run(2, program)
    assert finished.count((3, 3)) == 8
    for a, b in zip(first, second, strict=True):
        assert all(map(torch.equal, a, b))


def test_a_rank_that_never_begins_makes_the_others_stop_beginning(finished: list[tuple[int, int]]) -> None:
    def program(rank: int) -> None:
        model = model_of()
        if rank == 1:
            model._reducer._early._may_begin = lambda: False
        steps(rank, model, 20)

    run(2, program)
    assert [begun for begun, _ in finished].count(3) <= 5
    assert all(results == 0 for _, results in finished)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_dtypes(dtype: torch.dtype, finished: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    def program(rank: int) -> list[Tensor | None]:
        with seeded(0):
            layer = nn.Linear(20, 30, dtype=dtype)
        model = DistributedDataParallel(layer)
        for at in range(3):
            model.zero_grad()
            x = torch.randn(5, 20, generator=generator(10 * at + rank)).to(dtype)
            model(x).abs().square().mean().backward()
        return copied_gradients(model)

    found = run(2, program)
    assert finished[-1] == (1, 1)
    monkeypatch.setattr(early, "made_for", lambda *arguments: early.Late())
    for ours, theirs in zip(found, run(2, program), strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_where_ranks_share_memory_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHALANX_TRANSPORT")
    assert run(2, lambda rank: type(model_of()._reducer._early).__name__) == ["Late", "Late"]
