"""Layers frozen, unfrozen, replaced and added after wrapping, and sparse gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from phalanx.reduce import memory
from phalanx.testing import oracle, run
from phalanx.transport.pieces import Cut
from tests.threads.small_models import Branches, ddp, filled, one, same_on_all, values, x_of

# ------------------------------------------------------------------ frozen, replaced, added


ORDERS = [("a", "b", ""), ("b", "a", "ab"), ("", "ab", "a"), ("ab", "", "b")]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("n", [2, 3])
def test_layers_frozen_and_unfrozen_in_any_order(order: tuple[str, ...], n: int):
    """`order[k]` is frozen in step k; c never is."""

    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = one(), one(), one()

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x) + self.c(x)

    def program(rank: int) -> list:
        plain, seen = Three(), []
        set_frozen(plain, order[0])
        model = ddp(plain)
        for frozen in order:
            set_frozen(plain, frozen)
            model.zero_grad()
            model(x_of(rank)).sum().backward()
            seen.append(values(model))
        return seen

    def set_frozen(module: nn.Module, frozen: str) -> None:
        for name in "abc":
            getattr(module, name).weight.requires_grad_(name not in frozen)

    mean = (n + 1) / 2
    expected = [{f"{name}.weight": None if name in frozen else mean for name in "abc"} for frozen in order]
    assert same_on_all(n, program) == expected


@pytest.mark.parametrize("use", ["a", ""])
@pytest.mark.parametrize("forward", [True, False], ids=["model(x)", "model.module(x)"])
@pytest.mark.parametrize("local", [None, "no_sync", "no_sync of c"])
def test_unfreezing_gives_no_gradient_to_another_layer(use: str, forward: bool, local: str | None):
    """Layers are numbered anew when one is unfrozen, whether it is used in that step or not."""

    def program(rank: int) -> dict:
        plain = Branches()
        plain.c = one()
        plain.a.weight.requires_grad_(False)
        model = ddp(plain)
        model(x_of(rank), "bc").sum().backward()
        model.zero_grad()
        plain.a.weight.requires_grad_(True)
        call = model if forward else model.module
        with {None: nullcontext, "no_sync": model.no_sync, "no_sync of c": partial(model.no_sync, "c.*")}[local]():
            call(x_of(rank), use + "bc").sum().backward()
        if local:
            (model.module if use and not forward else call)(x_of(rank), use + "bc").sum().backward()
        return values(model)

    mean = 1.5 * (2 if local else 1)
    assert same_on_all(2, program) == {"a.weight": mean if use else None, "b.weight": mean, "c.weight": mean}


def test_a_layer_frozen_between_a_local_backward_and_the_synchronised_one():
    """What it has accumulated is synchronised all the same, and an unfrozen one beside it makes no difference."""

    def program(rank: int) -> dict:
        plain = Branches("ab")
        plain.b.weight.requires_grad_(False)
        model = ddp(plain)
        with model.no_sync():
            model(x_of(rank)).sum().backward()
        plain.a.weight.requires_grad_(False)
        plain.b.weight.requires_grad_(True)
        model(x_of(rank)).sum().backward()
        return values(model)

    assert same_on_all(2, program) == {"a.weight": 1.5, "b.weight": 1.5}


def test_unfreezing_during_accumulation_keeps_what_has_accumulated():
    def program(rank: int) -> dict:
        plain = Branches("ab")
        plain.b.weight.requires_grad_(False)
        model = ddp(plain)
        with model.no_sync():
            model(x_of(rank)).sum().backward()
            plain.b.weight.requires_grad_(True)
            model(x_of(rank)).sum().backward()
        model(x_of(rank)).sum().backward()
        return values(model)

    assert same_on_all(2, program) == {"a.weight": 4.5, "b.weight": 3.0}


def replace_weight(model: Branches) -> None:
    model.a.weight = nn.Parameter(torch.full((1, 1), 2.0))


def replace_layer(model: Branches) -> None:
    model.a = nn.Linear(1, 1, bias=True)
    nn.init.ones_(model.a.weight), nn.init.zeros_(model.a.bias)


def swap_tensors(model: Branches) -> None:
    torch.utils.swap_tensors(model.a.weight, nn.Parameter(torch.full((1, 1), 3.0)))


def add_layer(model: Branches) -> None:
    model.extra = one()
    model.a = nn.Sequential(model.a, model.extra)


def convert(model: Branches) -> None:
    model.double()


def norm_weight(model: Branches) -> None:
    nn.utils.parametrizations.weight_norm(model.a)


CHANGES = [replace_weight, replace_layer, swap_tensors, add_layer, convert, norm_weight]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("before", [False, True], ids=["before the first step", "between two steps"])
def test_parameters_replaced_or_added_after_wrapping(change: Callable[[Branches], None], before: bool):
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        dtype = next(model.parameters()).dtype
        return model(x.to(dtype), "ab").square().sum()

    def program(rank: int) -> oracle.Gradients:
        plain = Branches("ab")
        model = ddp(plain)
        if before:
            loss(model, x_of(rank)).backward()
            model.zero_grad()
        change(plain)
        loss(model, x_of(rank)).backward()
        assert oracle.gradients_of(model).keys() == oracle.gradients_of(plain).keys()
        return oracle.gradients_of(model)

    truth = Branches("ab")
    change(truth)
    expected = oracle.gradients(truth, loss, [[x_of(rank)] for rank in range(3)])
    for gradients in run(3, program):
        oracle.assert_close(gradients, expected)


def test_all_parameters_but_one_are_deleted():
    def program(rank: int) -> dict:
        plain = Branches("ab")
        model = ddp(plain)
        model(x_of(rank)).sum().backward()
        model.zero_grad()
        del plain.b
        model(x_of(rank), "a").sum().backward()
        return values(model)

    assert same_on_all(2, program) == {"a.weight": 1.5}


def test_a_copy_of_the_inner_module_is_not_the_wrapped_one():
    def program(rank: int) -> tuple:
        model = ddp(one())
        twin = copy.deepcopy(model.module)
        if rank == 0:
            twin(x_of(rank)).sum().backward()  # no collective
        model(x_of(rank)).sum().backward()
        return values(model)["weight"], values(twin)["weight"]

    assert run(2, program, timeout=10) == [(1.5, 1.0), (1.5, None)]


# ------------------------------------------------------------------ sparse


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("bag", [False, True])
def test_sparse_embeddings_with_other_rows_on_each_rank(n: int, bag: bool):
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kind = nn.EmbeddingBag if bag else nn.Embedding
            self.table, self.head = kind(7, 3, sparse=True), nn.Linear(3, 2)

        def forward(self, rows: Tensor) -> Tensor:
            return self.head(self.table(rows))

    batches = [torch.tensor([[rank, rank, 6], [2, 3, rank]]) for rank in range(n)]

    def program(rank: int) -> oracle.Gradients:
        model = ddp(filled(Rows()))
        for _ in range(2):
            model.zero_grad()
            model(batches[rank]).square().mean().backward()
        assert model.module.table.weight.grad.is_sparse
        return oracle.gradients_of(model)

    expected = oracle.gradients(filled(Rows()), lambda model, rows: model(rows).square().mean(), [[b] for b in batches])
    for gradients in run(n, program):
        oracle.assert_close(gradients, expected)


def test_a_sparse_embedding_that_one_rank_alone_uses_and_accumulates():
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(3, 1, sparse=True), one()

        def forward(self, x: Tensor, rows: list[int]) -> Tensor:
            return self.layer(x).sum() + (self.table(torch.tensor(rows)).sum() if rows else 0)

    def program(rank: int) -> dict:
        model = ddp(Rows())
        with model.no_sync():
            model(x_of(rank), [1] if rank else []).backward()
        model(x_of(rank), [0, 1] if rank else []).backward()
        return values(model)

    assert same_on_all(2, program) == {"table.weight": [[0.5], [1.0], [0.0]], "layer.weight": 3.0}


CUTS = {"one piece": Cut(), "pieces": Cut(64), "halves": Cut(64, common=0, small=0), "small": Cut(64, common=0)}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("hook", [False, True], ids=["memory of ours", "communication hook"])
@pytest.mark.parametrize("n", [2, 3])
def test_a_sparse_gradient_of_a_parameter_that_is_no_sparse_embedding(
    n: int, hook: bool, cut: Cut, monkeypatch: pytest.MonkeyPatch
):
    """It has its place like any other; what all ranks have is handed out there."""
    monkeypatch.setattr(memory, "CUT", cut)

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Parameter(torch.ones(20, 4)), nn.Linear(4, 2)

        def forward(self, rows: Tensor) -> Tensor:
            return self.head(nn.functional.embedding(rows, self.table, sparse=True))

    batches = [torch.tensor([[rank, rank, 6], [2, 3, rank]]) for rank in range(n)]

    def program(rank: int) -> oracle.Gradients:
        model = ddp(filled(Rows()))
        if hook:
            model.register_comm_hook(None, allreduce_hook)
        for _ in range(3):
            model.zero_grad()
            model(batches[rank]).square().mean().backward()
        return oracle.gradients_of(model)

    expected = oracle.gradients(filled(Rows()), lambda model, rows: model(rows).square().mean(), [[b] for b in batches])
    for gradients in run(n, program):
        oracle.assert_close(gradients, expected)
