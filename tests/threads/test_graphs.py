"""Graph shapes: variations of cases 6 to 13, against one process or figures known by heart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx.testing import oracle, run
from tests.threads.small_models import Branches, compare, ddp, filled, noise, one, same_on_all, squares, values, x_of

# ------------------------------------------------------------------ sharing, repetition, branches


class Tied(nn.Module):
    """One weight under two names, and one layer used several times."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head, self.block = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False), nn.Linear(4, 4)
        self.head.weight = self.table.weight

    def forward(self, rows: Tensor) -> Tensor:
        x = self.table(rows)
        for _ in range(3):
            x = torch.tanh(self.block(x))
        return self.head(x)


def test_tied_weights_and_a_layer_used_three_times():
    batches = [torch.tensor([rank, 1, 5]) for rank in range(3)]
    compare(lambda: Tied().double(), lambda model, rows: model(rows).square().mean(), batches)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_each_rank_its_own_branch_or_none_of_them(n: int):
    def program(rank: int) -> list:
        model, seen = ddp(Branches()), []
        for step in range(4):
            model.zero_grad()
            way = ["a", "b", "ab", "ba"][(rank + step) % n]
            model(x_of(rank), way).sum().backward()
            seen.append(values(model))
        return seen

    expected = []
    for step in range(4):
        used = [["a", "b", "ab", "ba"][(rank + step) % n] for rank in range(n)]
        expected.append(
            {
                f"{name}.weight": pytest.approx(sum(rank + 1 for rank in range(n) if name in used[rank]) / n)
                if any(name in way for way in used) else None
                for name in "ab"
            }
        )  # fmt: skip
    assert same_on_all(n, program) == expected


class Blocks(nn.Module):
    """Blocks under checkpoints of either kind, in any nesting."""

    def __init__(self, reentrant: bool, nested: int) -> None:
        super().__init__()
        self.head, self.tail = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.reentrant, self.nested = reentrant, nested

    def run_block(self, index: int, depth: int, x: Tensor) -> Tensor:
        if depth:
            x = checkpoint(self.run_block, index, depth - 1, x, use_reentrant=self.reentrant)
        return torch.tanh(self.blocks[index](x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        for index in (0, 1, 0, 2):
            x = checkpoint(self.run_block, index, self.nested, x, use_reentrant=self.reentrant)
        return self.tail(x)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("nested", [0, 1, 2])
@pytest.mark.parametrize("n", [2, 3])
def test_blocks_used_several_times_under_nested_checkpoints(reentrant: bool, nested: int, n: int):
    compare(lambda: Blocks(reentrant, nested).double(), squares, [noise(2, 4, seed=rank) for rank in range(n)])


def test_a_checkpoint_around_the_wrapped_model():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        return checkpoint(model, checkpoint(model, x, use_reentrant=True), use_reentrant=True).square().mean()

    compare(lambda: nn.Linear(4, 4).double(), loss, [noise(3, 4, seed=rank) for rank in range(2)])


def test_a_backward_inside_a_hook_of_the_graph():
    """Its gradients are part of the same synchronisation: the outermost backward ends it."""

    def program(rank: int) -> list:
        model, seen = ddp(Branches()), []
        for _ in range(2):
            model.zero_grad()
            inner = model(x_of(rank), "b").sum()
            outer = model(x_of(rank), "a")

            def hook(grad: Tensor, inner: Tensor = inner) -> None:
                inner.backward()

            outer.register_hook(hook)
            outer.sum().backward()
            seen.append(values(model))
        return seen

    assert same_on_all(2, program) == [{"a.weight": 1.5, "b.weight": 1.5}] * 2


# ------------------------------------------------------------------ several forwards, backwards, wrappers


def test_three_forwards_with_backwards_in_reverse_order():
    def program(rank: int) -> list:
        model, seen = ddp(one()), []
        losses = [model((k + 1) * x_of(rank)).sum() for k in range(3)]
        for loss in reversed(losses):
            loss.backward()
            seen.append(values(model)["weight"])
        return seen

    assert same_on_all(3, program) == pytest.approx([6.0, 10.0, 12.0])


def test_retained_graph_with_zero_grad_in_between():
    def program(rank: int) -> list:
        model, seen = ddp(one()), []
        loss = model(x_of(rank)).sum()
        for set_to_none in (True, False, True):
            loss.backward(retain_graph=True)
            seen.append(values(model)["weight"])
            model.zero_grad(set_to_none=set_to_none)
        return seen

    assert same_on_all(2, program) == [1.5, 1.5, 1.5]


def test_one_output_feeds_two_losses():
    def program(rank: int) -> float:
        model = ddp(one())
        out = model(x_of(rank))
        torch.autograd.backward([out.sum(), 2 * out.sum()])
        return values(model)["weight"]

    assert same_on_all(2, program) == 4.5


def test_a_model_fed_with_the_output_of_another_in_one_backward():
    def program(rank: int) -> tuple:
        first, second = ddp(one()), ddp(one())
        second(3 * first(x_of(rank))).sum().backward()
        return values(first)["weight"], values(second)["weight"]

    assert same_on_all(2, program) == (4.5, 4.5)


def test_a_wrapped_model_used_with_its_output_as_its_input():
    def program(rank: int) -> float:
        model = ddp(one())
        model(model(x_of(rank))).sum().backward()
        return values(model)["weight"]

    assert same_on_all(2, program) == 3.0


def test_generator_and_discriminator():
    """Two wrappers; each loss goes through both, and the optimizer of one ignores the other's gradients."""

    def build() -> tuple[nn.Module, nn.Module]:
        return filled(nn.Linear(3, 4).double(), 1), filled(nn.Linear(4, 1).double(), 2)

    def steps(g: nn.Module, d: nn.Module, inputs: list[Tensor], sync: Callable[[nn.Module], None]) -> list:
        seen = []
        for x in inputs:
            d.zero_grad()
            d(g(x).detach()).square().mean().backward()
            sync(d)
            seen.append(oracle.gradients_of(d))
            g.zero_grad()
            for p in d.parameters():
                p.requires_grad_(False)
            (-d(g(x)).mean()).backward()
            for p in d.parameters():
                p.requires_grad_(True)
            sync(g)
            seen.append(oracle.gradients_of(g))
        return seen

    def program(rank: int) -> list:
        g, d = build()
        return steps(ddp(g), ddp(d), [noise(2, 3, seed=10 * step + rank) for step in range(3)], lambda _: None)

    results = run(2, program)
    batches = [[noise(2, 3, seed=10 * step + rank) for step in range(3)] for rank in range(2)]
    alone = [steps(*build(), batches[rank], lambda _: None) for rank in range(2)]
    for seen in results:
        for number, gradients in enumerate(seen):
            mean = {name: (alone[0][number][name] + alone[1][number][name]) / 2 for name in gradients}
            oracle.assert_close(gradients, mean, rtol=1e-10)


def test_many_wrappers_in_one_loss():
    def program(rank: int) -> list:
        models = [ddp(one()) for _ in range(5)]
        sum(model((k + 1) * x_of(rank)).sum() for k, model in enumerate(models)).backward()
        return [values(model)["weight"] for model in models]

    assert same_on_all(3, program) == pytest.approx([2.0, 4.0, 6.0, 8.0, 10.0])


def test_a_wrapped_model_inside_a_module():
    def program(rank: int) -> dict:
        outer = nn.Sequential(one(), ddp(one()))
        outer(x_of(rank)).sum().backward()
        return values(outer)

    assert [v["1.module.weight"] for v in run(2, program)] == [1.5, 1.5]


# ------------------------------------------------------------------ derivatives


def test_grad_then_backward():
    def program(rank: int) -> dict:
        model = ddp(one(bias=True))
        x = x_of(rank).requires_grad_()
        out = model(x).sum()
        torch.autograd.grad(out, list(model.parameters()), retain_graph=True)
        assert set(values(model).values()) == {None}
        out.backward()
        return values(model)

    assert same_on_all(2, program) == {"weight": 1.5, "bias": 1.0}


def test_grad_on_one_rank_alone_is_no_collective():
    def program(rank: int) -> dict:
        model = ddp(one())
        if rank == 0:
            (local,) = torch.autograd.grad(model(x_of(rank)).sum(), model.module.weight)
            assert local.item() == 1.0
        model(x_of(rank)).sum().backward()
        return values(model)

    assert same_on_all(2, program, timeout=10) == {"weight": 1.5}


def test_backward_into_the_inputs_alone_leaves_the_parameters_alone():
    def program(rank: int) -> tuple:
        model = ddp(one(bias=True))
        x = x_of(rank).requires_grad_()
        if rank == 0:
            model(x).sum().backward(inputs=[x])
        assert set(values(model).values()) == {None}
        model(x_of(rank)).sum().backward(inputs=[model.module.weight])
        return values(model)["weight"], values(model)["bias"]

    assert same_on_all(2, program, timeout=10) == (1.5, None)


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return out.square().mean() + slope.square().mean()


@pytest.mark.parametrize("n", [2, 3])
def test_gradient_penalty(n: int):
    compare(
        lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double(),
        penalty, [noise(3, 4, seed=rank) for rank in range(n)],
    )  # fmt: skip


def test_a_backward_that_creates_a_graph_and_a_second_one_through_it():
    """The second goes through the local graph: the mean of what every rank has by itself."""

    def program(rank: int) -> tuple:
        model = ddp(one())
        (model(x_of(rank)) ** 3).sum().backward(create_graph=True)
        first = model.module.weight.grad
        value = first.detach().item()
        model.module.weight.grad = None
        first.sum().backward()
        second = values(model)["weight"]
        model.module.weight.grad = None
        return value, second

    # loss = (w x)^3: slope 3 w^2 x^3, its slope 6 w x^3; x = 1 | 2
    assert same_on_all(2, program) == (13.5, 27.0)
