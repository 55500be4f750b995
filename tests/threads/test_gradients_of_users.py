"""What users do with gradients: set, zero, keep, replace, scale, clip, and modify in hooks."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx import DistributedDataParallel
from phalanx.reduce import memory
from phalanx.testing import generator, oracle, run
from phalanx.transport.pieces import Cut
from tests.threads.small_models import Branches, ddp, filled, one, same_on_all, values, x_of


def step(model: nn.Module, rank: int, scale: float = 1.0) -> float:
    model(scale * x_of(rank)).sum().backward()
    return values(model)["weight"]


# ------------------------------------------------------------------ p.grad between steps


def set_to_none(p: nn.Parameter) -> None:
    p.grad = None


def zeroed_in_place(p: nn.Parameter) -> None:
    p.grad.zero_()


def an_own_tensor(p: nn.Parameter) -> None:
    p.grad = torch.zeros_like(p)


def an_own_tensor_with_other_strides(p: nn.Parameter) -> None:
    p.grad = torch.zeros(3, 3)[:1, :1]


def replaced_data(p: nn.Parameter) -> None:
    p.grad.data = torch.zeros_like(p)


def multiplied_by_zero(p: nn.Parameter) -> None:
    p.grad *= 0


def a_copy(p: nn.Parameter) -> None:
    p.grad = p.grad.clone().zero_()


def deleted(p: nn.Parameter) -> None:
    del p.grad


WAYS = [
    set_to_none, zeroed_in_place, an_own_tensor, an_own_tensor_with_other_strides, replaced_data, multiplied_by_zero,
    a_copy, deleted,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_gradient_dropped_in_any_way_leaves_nothing_behind(way: Callable[[nn.Parameter], None], n: int):
    def program(rank: int) -> list:
        model, seen = ddp(one()), []
        for _ in range(3):
            seen.append(step(model, rank))
            way(model.module.weight)
        return seen

    mean = (n + 1) / 2
    assert same_on_all(n, program) == [mean] * 3


MIXED = [(set_to_none, an_own_tensor), (zeroed_in_place, set_to_none), (a_copy, zeroed_in_place)]


@pytest.mark.parametrize("ways", MIXED)
def test_ranks_may_drop_gradients_in_different_ways(ways: tuple):
    def program(rank: int) -> list:
        model, seen = ddp(one()), []
        for _ in range(3):
            seen.append(step(model, rank))
            ways[rank](model.module.weight)
        return seen

    assert same_on_all(2, program) == [1.5] * 3


def test_gradients_that_are_not_dropped_accumulate():
    def program(rank: int) -> list:
        model = ddp(one())
        return [step(model, rank) for _ in range(3)]

    assert same_on_all(2, program) == [1.5, 3.0, 4.5]


def test_an_own_tensor_is_added_to_and_stays_the_same_tensor():
    def program(rank: int) -> tuple:
        model = ddp(one())
        mine = torch.full((1, 1), 10.0)
        model.module.weight.grad = mine
        step(model, rank)
        return mine.item(), model.module.weight.grad is mine

    assert same_on_all(2, program) == (11.5, True)


def test_an_own_tensor_that_differs_between_ranks_is_averaged_as_in_torch():
    def program(rank: int) -> float:
        model = ddp(one())
        model.module.weight.grad = torch.full((1, 1), 10.0 * rank)
        return step(model, rank)

    assert same_on_all(2, program) == 6.5


def test_scaled_gradients_stay_scaled():
    def program(rank: int) -> list:
        model = ddp(one())
        step(model, rank)
        model.module.weight.grad.mul_(10)
        return [step(model, rank)]

    assert same_on_all(2, program) == [16.5]


class Storage:
    """The storage of a gradient, kept without any tensor."""

    def __init__(self, grad: Tensor) -> None:
        self.storage, self.offset, self.shape = grad.untyped_storage(), grad.storage_offset(), grad.shape


def seen_in(kept: object) -> Tensor:
    if isinstance(kept, Storage):
        return torch.empty(0).set_(kept.storage, kept.offset, kept.shape)
    return torch.as_tensor(kept)


KEPT: dict[str, Callable[[Tensor], object]] = {
    "tensor": lambda grad: grad,
    "detached": lambda grad: grad.detach(),
    "part": lambda grad: grad[0],
    "numpy": lambda grad: grad.numpy(),
    "numpy of a view": lambda grad: grad.view(-1).numpy(),
    "storage": Storage,
    "dlpack": lambda grad: np.from_dlpack(grad.detach()),
}


@pytest.mark.parametrize("how", KEPT)
@pytest.mark.parametrize("where", ["one piece", "pieces", "gloo"])
def test_what_is_kept_of_a_gradient_keeps_its_values(where: str, how: str, monkeypatch: pytest.MonkeyPatch):
    """In every step, of one layer in some and of all in others, as gradients are kept for a plot."""
    monkeypatch.setattr(memory, "CUT", Cut(64, common=0, small=0) if where == "pieces" else Cut())

    def program(rank: int) -> None:
        group = dist.new_group(backend="phalanx", pg_options="gloo") if where == "gloo" else None
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Linear(30, 2))
        model = DistributedDataParallel(layer, process_group=group)
        kept, copied = [], []
        for at in range(12):
            model.zero_grad()
            if at % 5 == 3:
                with model.no_sync():
                    model(torch.randn(3, 4, generator=generator(at + 50 * rank))).sum().backward()
            model(torch.randn(3, 4, generator=generator(at + 20 * rank))).sum().backward()
            for p in list(layer.parameters())[at % 4 :] if at < 8 else layer.parameters():
                kept.append(KEPT[how](p.grad))
                copied.append(seen_in(kept[-1]).clone())
        assert all(torch.equal(seen_in(each), copy) for each, copy in zip(kept, copied, strict=True))

    run(2, program)


@pytest.mark.parametrize("where", ["one piece", "pieces", "gloo"])
def test_a_gradient_transposed_in_place_of_itself_and_added_to(where: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "CUT", Cut(64, common=0, small=0) if where == "pieces" else Cut())
    rows = torch.arange(16.0).view(4, 4)

    def program(rank: int) -> Tensor:
        group = dist.new_group(backend="phalanx", pg_options="gloo") if where == "gloo" else None
        layer = nn.Linear(4, 4, bias=False)
        model = DistributedDataParallel(layer, process_group=group)
        for _ in range(2):
            model(rows[:1] + rank).sum().backward()
            layer.weight.grad = layer.weight.grad.t()
        model(rows[:1] + rank).sum().backward()
        return layer.weight.grad

    # What is accumulated is the same on all ranks, so its mean is itself.
    mean = (rows[:1] + 0.5).expand(4, 4)
    for found in run(2, program):
        assert torch.equal(found, (mean.t() + mean).t() + mean)


@pytest.mark.parametrize("change", [lambda grad: grad.t_(), lambda grad: grad.unsqueeze_(0)], ids=["t_", "unsqueeze_"])
@pytest.mark.parametrize("where", ["one piece", "pieces", "gloo"])
def test_a_gradient_given_another_form_in_place_leaves_the_next_ones_alone(
    where: str, change: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory, "CUT", Cut(64, common=0, small=0) if where == "pieces" else Cut())
    rows = torch.arange(16.0).view(4, 4)

    def program(rank: int) -> list[Tensor]:
        group = dist.new_group(backend="phalanx", pg_options="gloo") if where == "gloo" else None
        model, seen, kept = DistributedDataParallel(nn.Linear(4, 4, bias=False), process_group=group), [], []
        for at in range(7):
            model.zero_grad()
            model((at + 1) * (rows[:1] + rank)).sum().backward()
            seen.append(model.module.weight.grad.clone())
            changed = change(model.module.weight.grad)
            if at > 2:
                kept.append((changed, changed.clone()))
        assert all(torch.equal(gradient, copy) for gradient, copy in kept)
        return seen

    for found in run(2, program):
        for at, gradient in enumerate(found):
            assert torch.equal(gradient, (at + 1) * (rows[:1] + 0.5).expand(4, 4)), at


def test_gradients_that_are_kept_are_still_the_mean():
    def program(rank: int) -> list[float]:
        model, kept = ddp(Branches("ab")), []
        for at in range(9):
            model.zero_grad(set_to_none=at % 3 != 2)
            model(x_of(rank)).sum().backward()
            kept.append({name: p.grad.numpy() for name, p in model.module.named_parameters()})
        return [array.item() for each in kept for array in each.values()]

    # Where a gradient is zeroed in place, the arrays of the step before show the new one.
    assert same_on_all(2, program) == [1.5] * 18


def test_a_gradient_that_is_kept_after_another_one() -> None:
    def program(rank: int) -> list[float]:
        layer = nn.Linear(1, 1)
        model, kept = ddp(layer), []
        for at in range(6):
            model.zero_grad()
            model((at + 1) * x_of(rank)).sum().mul(at + 1).backward()
            kept.append((layer.weight, layer.bias)[at // 3].grad)
        return [gradient.item() for gradient in kept]

    assert same_on_all(2, program) == [1.5 * 1, 1.5 * 4, 1.5 * 9, 4, 5, 6]


def test_keeping_one_gradient_in_every_step_does_not_keep_all_memory():
    def program(rank: int) -> int:
        model = ddp(nn.Sequential(one(), nn.Linear(1, 700_000)))
        small, kept = model.module[0].weight, []
        before = psutil.Process().memory_info().rss
        for _ in range(20):
            model.zero_grad()
            model(x_of(rank)).mean().backward()
            kept.append(small.grad.numpy())
        return psutil.Process().memory_info().rss - before

    assert max(run(1, program)) < 60e6  # 5.6 MB of gradients, 20 times: 112 MB


def test_a_gradient_outlives_its_wrapper_and_its_group():
    def program(rank: int) -> Tensor:
        model = ddp(one())
        step(model, rank)
        grad = model.module.weight.grad
        del model
        gc.collect()
        dist.barrier()
        grad += 1
        return grad

    results = run(2, program)
    gc.collect()
    assert [grad.item() for grad in results] == [2.5, 2.5]


def test_a_gradient_pickles_and_copies_alone_not_with_all_shared_memory():
    def program(rank: int) -> tuple:
        model = ddp(nn.Sequential(one(), nn.Linear(500, 500)))
        model.module[0](x_of(rank)).sum().backward()
        grad = model.module[0].weight.grad
        return len(pickle.dumps(grad)) < 2000, copy.deepcopy(grad).untyped_storage().nbytes() <= 64, grad.item()

    assert same_on_all(2, program) == (True, True, 1.5)


@pytest.mark.parametrize("cut", [Cut(), Cut(64, common=0)], ids=["one piece", "pieces"])
def test_a_dropped_wrapper_is_freed_with_its_shared_memory_at_once(cut: Cut, holdings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "CUT", cut)

    def program(rank: int) -> int:
        for _ in range(5):
            model = ddp(nn.Linear(10, 10))
            model(torch.ones(1, 10)).sum().backward()
            del model
        dist.barrier()
        return sum("memfd:phalanx" in item for item in holdings.now().descriptors)

    gc.collect()
    gc.disable()
    try:
        assert max(run(2, program)) <= 2  # the group's own on each rank
    finally:
        gc.enable()


# ------------------------------------------------------------------ hooks of the user


def test_a_tensor_hook_that_changes_the_local_gradient_comes_before_the_mean():
    def program(rank: int) -> float:
        model = ddp(one())
        model.module.weight.register_hook(lambda grad: grad * (rank + 1))
        return step(model, rank)

    assert same_on_all(2, program) == (1 * 1 + 2 * 2) / 2


@pytest.mark.parametrize("before", [True, False])
def test_a_post_accumulate_hook_that_changes_the_gradient_in_place(before: bool):
    def program(rank: int) -> float:
        layer = one()

        def hook(p: nn.Parameter) -> None:
            p.grad *= 10

        if before:
            layer.weight.register_post_accumulate_grad_hook(hook)
        model = ddp(layer)
        if not before:
            layer.weight.register_post_accumulate_grad_hook(hook)
        return step(model, rank)

    assert same_on_all(2, program) == 15.0


def test_a_post_accumulate_hook_that_replaces_the_gradient():
    def program(rank: int) -> float:
        model = ddp(one())

        def hook(p: nn.Parameter) -> None:
            p.grad = p.grad + 100

        model.module.weight.register_post_accumulate_grad_hook(hook)
        return step(model, rank)

    assert same_on_all(2, program) == 101.5


def test_module_hooks_and_grads_of_the_input():
    def program(rank: int) -> tuple:
        layer, calls = one(), []
        layer.register_forward_hook(lambda *_: calls.append("forward"))
        layer.register_full_backward_hook(lambda *_: calls.append("backward"))
        model = ddp(layer)
        x = x_of(rank).requires_grad_()
        model(x).sum().backward()
        return values(model)["weight"], x.grad.item(), calls

    assert same_on_all(2, program) == (1.5, 1.0, ["forward", "backward"])


def test_the_optimizer_sees_synchronised_gradients_with_momentum_and_weight_decay():
    def train(model: nn.Module, batches: list[Tensor]) -> oracle.Gradients:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return oracle.parameters_of(model)

    def half(step: int, rank: int) -> Tensor:
        return torch.randn(2, 4, dtype=torch.float64, generator=generator(10 * step + rank))

    halves = [[half(step, rank) for step in range(5)] for rank in range(2)]
    together = [torch.cat(pair) for pair in zip(*halves, strict=True)]
    expected = train(filled(nn.Linear(4, 3).double()), together)
    for got in run(2, lambda rank: train(ddp(filled(nn.Linear(4, 3).double())), halves[rank])):
        oracle.assert_close(got, expected, rtol=1e-9)


def test_an_optimizer_leaves_a_parameter_alone_that_nobody_used():
    def program(rank: int) -> float:
        model = ddp(Branches("a"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
        model(x_of(rank)).sum().backward()
        optimizer.step()
        return model.module.b.weight.item()

    assert same_on_all(2, program) == 1.0


# ------------------------------------------------------------------ scaling, clipping


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_inf_or_nan_on_one_rank_reaches_all(bad: float):
    def program(rank: int) -> bool:
        model = ddp(one())
        model(torch.full((1, 1), bad) if rank else x_of(rank)).sum().backward()
        return bool(torch.isfinite(model.module.weight.grad).all())

    assert run(2, program) == [False, False]


def test_a_loss_scaler():
    def program(rank: int) -> tuple:
        model = ddp(one())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(model(x_of(rank)).sum()).backward()
        scaled = values(model)["weight"]
        scaler.unscale_(optimizer)
        unscaled = values(model)["weight"]
        scaler.step(optimizer)
        scaler.update()
        return scaled, unscaled, model.module.weight.item()

    assert same_on_all(2, program) == (1536.0, 1.5, -0.5)


def test_autocast_and_float32_parameters():
    def program(rank: int) -> tuple:
        model = ddp(one())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x_of(rank))
        out.float().sum().backward()
        return str(out.dtype), values(model)["weight"], str(model.module.weight.grad.dtype)

    assert same_on_all(2, program) == ("torch.bfloat16", 1.5, "torch.float32")
