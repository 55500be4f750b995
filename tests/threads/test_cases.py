"""Cases 1 to 17 from the field, by number, each with the exact right answer; the others are in test_cases_state.py.

Variations are in the files beside. The cases of processes that die are in procs/test_cases_processes.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx import RankMismatchError
from phalanx.testing import run
from tests.threads.small_models import Branches, ddp, one, same_on_all, values, x_of

# ------------------------------------------------------------------ accumulation and sync


def test_case_1_forward_outside_and_backward_inside_no_sync():
    def program(rank: int) -> tuple:
        model = ddp(one())
        loss = model(x_of(rank)).sum()
        with model.no_sync():
            loss.backward()
        local = values(model)["weight"]
        model(x_of(rank)).sum().backward()
        return local, values(model)["weight"]

    assert run(2, program) == [(1.0, 3.0), (2.0, 3.0)]


@pytest.mark.parametrize("static", [False, True], ids=["case_2", "case_3_static_graph"])
def test_cases_2_and_3_forward_and_backward_inside_no_sync(static: bool):
    def program(rank: int) -> float:
        model = ddp(one(), static_graph=static)
        with model.no_sync():
            model(x_of(rank)).sum().backward()
        model(x_of(rank)).sum().backward()
        return values(model)["weight"]

    assert run(2, program) == [3.0, 3.0]


def test_case_4_the_closing_micro_step_uses_another_layer():
    def program(rank: int) -> dict:
        model = ddp(Branches())
        with model.no_sync():
            model(x_of(rank), "a").sum().backward()
        model(x_of(rank), "b").sum().backward()
        return values(model)

    assert same_on_all(2, program) == {"a.weight": 1.5, "b.weight": 1.5}


@pytest.mark.parametrize(("weighed", "gradient"), [(True, 4.0), (False, 3.0)])
def test_case_5_uneven_batch_sizes(weighed: bool, gradient: float):
    def program(rank: int) -> float:
        model = ddp(one())
        batch = torch.tensor([[1.0]] if rank == 0 else [[5.0], [5.0], [5.0]])
        loss = model(batch).mean()
        before = loss.item()
        if weighed:
            loss = model.weigh(loss, len(batch))
        assert loss.item() == before
        loss.backward()
        return values(model)["weight"]

    assert run(2, program) == pytest.approx([gradient, gradient], rel=1e-6)


def test_case_6_two_backwards_on_one_forward():
    def program(rank: int) -> float:
        model = ddp(one())
        loss = model(x_of(rank)).sum()
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        return values(model)["weight"]

    assert run(2, program) == [4.5, 4.5]


def test_case_7_two_forwards_then_two_backwards():
    def program(rank: int) -> tuple:
        model = ddp(one())
        first, second = model(x_of(rank)).sum(), model(10 * x_of(rank)).sum()
        first.backward()
        middle = values(model)["weight"]
        second.backward()
        return middle, values(model)["weight"]

    assert same_on_all(2, program) == (1.5, 16.5)


# ------------------------------------------------------------------ graph shapes


def test_case_8_a_layer_that_the_loss_never_uses():
    def program(rank: int) -> list:
        model, seen = ddp(Branches("a")), []
        for _ in range(2):
            model.zero_grad()
            model(x_of(rank)).sum().backward()
            seen.append(values(model))
        return seen

    assert same_on_all(2, program) == [{"a.weight": 1.5, "b.weight": None}] * 2


def test_case_9_each_rank_its_branch():
    def program(rank: int) -> dict:
        model = ddp(Branches())
        model(x_of(rank), "ab"[rank]).sum().backward()
        return values(model)

    assert same_on_all(2, program) == {"a.weight": 0.5, "b.weight": 1.0}


class HeadThenBlockTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.block = one(), one()

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        return x


def test_case_10_one_block_twice_under_reentrant_checkpointing():
    def program(rank: int) -> list:
        model, seen = ddp(HeadThenBlockTwice()), []
        for _ in range(2):
            model.zero_grad()
            model(x_of(rank)).sum().backward()
            seen.append(values(model))
        return seen

    assert same_on_all(2, program) == [{"head.weight": 1.5, "block.weight": 3.0}] * 2


def test_case_11_two_forwards_through_different_branches_and_one_backward():
    def program(rank: int) -> dict:
        model = ddp(Branches(), find_unused_parameters=True)
        (model(x_of(rank), "a") + 2 * model(x_of(rank), "b")).sum().backward()
        return values(model)

    assert same_on_all(2, program) == {"a.weight": 1.5, "b.weight": 3.0}


class Output:
    """Of a class that nobody registered, without a __dict__."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class GivesOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = one()

    def forward(self, x: Tensor) -> Output:
        return Output(self.layer(x))


def test_case_12_an_output_of_an_unregistered_class():
    def program(rank: int) -> float:
        model = ddp(GivesOutput())
        model(x_of(rank)).value.sum().backward()
        return values(model)["layer.weight"]

    assert run(2, program) == [1.5, 1.5]


def test_case_13_a_penalty_only_loss():
    def program(rank: int) -> dict:
        model = ddp(one(bias=True))
        x = x_of(rank).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        assert set(values(model).values()) == {None}
        (slope * x.detach()).sum().backward()
        return values(model)

    assert same_on_all(2, program) == {"weight": 1.5, "bias": None}


def test_case_14_freeze_after_wrapping_and_unfreeze_what_was_frozen_at_wrapping():
    def program(rank: int) -> list:
        model = ddp(Branches("ab"))
        model.module.a.weight.requires_grad_(False)
        model(x_of(rank)).sum().backward()
        seen = [values(model)]
        plain = Branches("ab")
        plain.b.weight.requires_grad_(False)
        model = ddp(plain)
        model(x_of(rank)).sum().backward()
        seen.append(values(model))
        plain.b.weight.requires_grad_(True)
        model.zero_grad()
        model(x_of(rank)).sum().backward()
        return [*seen, values(model)]

    assert same_on_all(2, program) == [
        {"a.weight": None, "b.weight": 1.5},
        {"a.weight": 1.5, "b.weight": None},
        {"a.weight": 1.5, "b.weight": 1.5},
    ]


class WithAnotherMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = one()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def encode(self, x: Tensor) -> Tensor:
        return 3 * self.layer(x)


def test_case_15_the_module_itself_or_another_method_of_it():
    def program(rank: int) -> list:
        model, seen = ddp(WithAnotherMethod()), []
        for call in (model.module, model.module.encode, model.encode):
            model.zero_grad()
            call(x_of(rank)).sum().backward()
            seen.append(values(model)["layer.weight"])
        return seen

    assert same_on_all(2, program) == [1.5, 4.5, 4.5]


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(5, 2, sparse=True), one()

    def forward(self, x: Tensor, rows: Tensor | None = None) -> Tensor:
        out = self.layer(x).sum()
        return out if rows is None else out + self.table(rows).sum()


def test_case_16_a_sparse_embedding_that_is_not_used_this_step():
    def program(rank: int) -> list:
        model, seen = ddp(Lookup()), []
        for rows in (None, torch.tensor([rank, 4]), None):
            model.zero_grad()
            model(x_of(rank), rows).backward()
            grad = model.module.table.weight.grad
            assert grad is None or grad.is_sparse
            seen.append(values(model))
        return seen

    unused = {"table.weight": None, "layer.weight": 1.5}
    rows = [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    assert same_on_all(2, program) == [unused, {"table.weight": rows, "layer.weight": 1.5}, unused]


def test_case_17_two_models_whose_backwards_come_in_another_order_on_each_rank():
    def program(rank: int) -> None:
        models = ddp(one()), ddp(one())
        losses = models[0](x_of(rank)).sum(), models[1](10 * x_of(rank)).sum()
        for index in (0, 1) if rank == 0 else (1, 0):
            losses[index].backward()

    outcomes = run(2, program, raises=False)
    for outcome in outcomes:
        assert isinstance(outcome.error, RankMismatchError)
        assert set(outcome.error.calls) == {0, 1}
        assert all("gradient synchronisation" in call for call in outcome.error.calls.values())
