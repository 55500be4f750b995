"""Wrong uses are named where they happen, right ones are not: what docs/misuse.md promises."""

from __future__ import annotations

import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler as TorchSampler

import phalanx
from phalanx import DistributedDataParallel, DistributedSampler, MisuseError, MisuseWarning
from phalanx.misuse import silenced
from phalanx.parallel.seeds import compare_seeds, expect_different_seeds
from phalanx.testing import run
from tests.threads.small_models import filled

Program = Callable[[int], Any]


@pytest.fixture(autouse=True)
def nothing_silenced() -> Iterator[None]:
    before = set(silenced)
    yield
    silenced.clear()
    silenced.update(before)
    expect_different_seeds(False)


def model_and_optimizer(**keywords: Any) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    model = filled(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    ddp = DistributedDataParallel(model, **keywords)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)


def backward(ddp: nn.Module, rank: int = 0) -> None:
    ddp(torch.ones(2, 3) * (rank + 1)).square().mean().backward()


def warned(ranks: int, program: Program) -> list[MisuseWarning]:
    """Run a program and return what it was warned of, in order of rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(ranks, program)
    found = [each.message for each in caught if isinstance(each.message, MisuseWarning)]
    assert all(each.filename == __file__ for each in caught if isinstance(each.message, MisuseWarning))
    return sorted(found, key=lambda warning: warning.rank)


def named(ranks: int, program: Program) -> list[tuple[str, int | None]]:
    return [(warning.name, warning.rank) for warning in warned(ranks, program)]


# ------------------------------------------------------------------ clip-before-sync


def clips(ddp: DistributedDataParallel) -> None:
    clip_grad_norm_(ddp.parameters(), 1e-3)


def unscales(ddp: DistributedDataParallel) -> None:
    for parameter in ddp.parameters():
        parameter.grad.div_(1024.0)


def zeroes(ddp: DistributedDataParallel) -> None:
    ddp.zero_grad(set_to_none=False)


def drops(ddp: DistributedDataParallel) -> None:
    ddp.zero_grad()


def copies(ddp: DistributedDataParallel) -> None:
    for parameter in ddp.parameters():
        parameter.grad = parameter.grad.clone()


def looks(ddp: DistributedDataParallel) -> None:
    assert all(parameter.grad.norm() > 0 for parameter in ddp.parameters())


def accumulating(between: Callable[[DistributedDataParallel], None], again: int = 2) -> Program:
    def program(rank: int) -> None:
        ddp, optimizer = model_and_optimizer()
        for _ in range(again):
            with ddp.no_sync():
                backward(ddp, rank)
            between(ddp)
            backward(ddp, rank)
            clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return program


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("between", [clips, unscales])
def test_gradients_changed_before_their_synchronisation_are_named_once(between: Any, ranks: int) -> None:
    found = warned(ranks, accumulating(between))
    assert [(each.name, each.rank) for each in found] == [("clip-before-sync", rank) for rank in range(ranks)]
    assert "0.weight" in found[0].what or "2.weight" in found[0].what
    assert "ddp.accumulate(every=k)" in str(found[0])


@pytest.mark.parametrize("between", [zeroes, drops, looks, copies])
def test_gradients_that_are_dropped_or_looked_at_are_no_misuse(between: Any) -> None:
    assert named(2, accumulating(between)) == []


def test_a_backward_that_reaches_the_parameters_without_the_wrapper_is_no_clipping() -> None:
    def program(rank: int) -> None:
        ddp, _ = model_and_optimizer()
        for _ in range(3):
            with ddp.no_sync():
                ddp.module(torch.ones(2, 3)).mean().backward()
        backward(ddp)

    assert named(2, program) == []


def test_a_skipped_step_between_micro_batches_is_no_clipping() -> None:
    def program(rank: int) -> None:
        ddp, optimizer = model_and_optimizer()
        for step in range(4):
            for _ in range(1 + step):
                with ddp.no_sync():
                    backward(ddp, rank)
            if rank == step % 2:
                ddp.skip()
            else:
                backward(ddp, rank)
            optimizer.step()

    assert named(2, program) == []


# ------------------------------------------------------------------ unsynchronised-step, step-in-backward


def test_a_step_on_gradients_that_are_local_is_named_once_with_its_parameters() -> None:
    def program(rank: int) -> None:
        ddp, optimizer = model_and_optimizer()
        for _ in range(2):
            with ddp.no_sync():
                backward(ddp, rank)
            optimizer.step()
            optimizer.zero_grad()

    found = warned(2, program)
    assert [(each.name, each.rank) for each in found] == [("unsynchronised-step", rank) for rank in range(2)]
    assert "SGD.step()" in found[0].what and "0.weight, 0.bias, 2.weight and 1 more" in found[0].what


def test_a_step_on_local_gradients_that_were_zeroed_is_no_misuse() -> None:
    def program(rank: int) -> None:
        ddp, optimizer = model_and_optimizer()
        with ddp.no_sync():
            backward(ddp, rank)
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()

    assert named(2, program) == []


def test_a_step_on_layers_that_are_local_names_these() -> None:
    def program(rank: int) -> None:
        ddp, optimizer = model_and_optimizer()
        with ddp.no_sync("2"):
            backward(ddp, rank)
        optimizer.step()

    found = warned(2, program)
    assert len(found) == 2 and "(2.weight, 2.bias)" in found[0].what


def test_a_step_after_a_backward_that_raised_is_named() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            raise MemoryError("no room")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(Fails.apply(self.first(x)))

    def program(rank: int) -> None:
        ddp = DistributedDataParallel(Model())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with pytest.raises(MemoryError):
            ddp(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    found = warned(2, program)
    assert len(found) == 2 and "last.weight" in found[0].what and "first" not in found[0].what


def steps_of_another_model(rank: int) -> None:
    ddp, _ = model_and_optimizer()
    _, other = model_and_optimizer()
    with ddp.no_sync():
        backward(ddp, rank)
    other.step()
    backward(ddp, rank)


def steps_with_held_gradients(rank: int) -> None:
    ddp, optimizer = model_and_optimizer()
    ddp.sync_policy("0", every=2)
    ddp.sync_policy("2", "never")
    for _ in range(4):
        backward(ddp, rank)
        optimizer.step()
        optimizer.zero_grad()


def steps_after_dropping(rank: int) -> None:
    ddp, optimizer = model_and_optimizer()
    with ddp.no_sync():
        backward(ddp, rank)
    optimizer.zero_grad()
    optimizer.step()


def steps_in_backward_by_torchs_way(rank: int) -> None:
    ddp, _ = model_and_optimizer()
    _apply_optimizer_in_backward(torch.optim.SGD, ddp.parameters(), {"lr": 0.1})
    for _ in range(2):
        backward(ddp, rank)
    ddp.check_replicas()


def steps_alone(rank: int) -> None:
    alone = dist.new_subgroups(1)[0]
    ddp, optimizer = model_and_optimizer(process_group=alone)
    with ddp.no_sync():
        backward(ddp)
    optimizer.step()


RIGHT = [
    steps_of_another_model, steps_with_held_gradients, steps_after_dropping, steps_in_backward_by_torchs_way,
    steps_alone,
]  # fmt: skip


@pytest.mark.parametrize("program", RIGHT)
def test_steps_that_are_right_are_no_misuse(program: Program) -> None:
    assert named(2, program) == []


def test_a_step_inside_backward_is_an_error_unless_silenced() -> None:
    def program(rank: int) -> None:
        ddp, optimizer = model_and_optimizer()
        first = next(ddp.parameters())
        handle = first.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        with pytest.raises(MisuseError, match=r"SGD.step\(\) while backward is running") as found:
            backward(ddp, rank)
        assert "_apply_optimizer_in_backward" in found.value.instead
        ddp.drift_check = False
        dist.barrier()  # ranks that are threads are silenced together
        phalanx.silence("step-in-backward", "unsynchronised-step")
        backward(ddp, rank)
        handle.remove()

    run(2, program)


# ------------------------------------------------------------------ threads, devices, wrapping


@pytest.mark.parametrize("call", ["backward", "forward"])
def test_a_second_thread_in_the_same_model_is_an_error_there(call: str) -> None:
    entered = threading.Event()

    def program(rank: int) -> Tensor:
        ddp, _ = model_and_optimizer()
        losses = [ddp(torch.ones(2, 3)).sum() for _ in range(2)]
        if rank == 1:
            entered.wait()
            losses[0].backward()
            return next(ddp.parameters()).grad
        ddp._reducer.group.drain = lambda: started.set()
        started = threading.Event()
        first = threading.Thread(target=losses[0].backward, name="first")
        first.start()
        started.wait()
        try:
            with pytest.raises(MisuseError, match=f"{call} .*thread 'rank 0', while thread 'first' is in its backward"):
                losses[1].backward() if call == "backward" else ddp(torch.ones(2, 3))
        finally:
            entered.set()
            first.join()
        return next(ddp.parameters()).grad

    zero, one = run(2, program)
    assert torch.equal(zero, one)


def test_one_thread_after_the_other_is_no_misuse() -> None:
    def program(rank: int) -> None:
        ddp, _ = model_and_optimizer()
        for _ in range(2):
            thread = threading.Thread(target=backward, args=(ddp, rank))
            thread.start()
            thread.join()
            backward(ddp, rank)

    assert named(2, program) == []


def test_parameters_on_devices_of_different_types_are_told_apart_by_name() -> None:
    def program(rank: int) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
        with pytest.raises(ValueError, match="must be on the same type of devices") as found:
            DistributedDataParallel(model)
        assert "on cpu: 0.weight, 0.bias\n  on meta: 1.weight, 1.bias" in str(found.value)
        with pytest.raises(MisuseError, match="to_empty"):
            DistributedDataParallel(nn.Linear(2, 2, device="meta"))

    run(2, program)


def test_a_wrapped_model_inside_another_is_named() -> None:
    def program(rank: int) -> Tensor:
        inner = DistributedDataParallel(filled(nn.Linear(3, 4)))
        outer = DistributedDataParallel(nn.Sequential(inner, filled(nn.Linear(4, 1))))
        backward(outer, rank)
        return inner.module.weight.grad

    found = warned(2, program)
    assert {(each.name, each.rank) for each in found} == {("wrapped-twice", 0), ("wrapped-twice", 1)}
    assert "0.module.weight" in found[0].what


def test_the_same_parameters_in_two_living_wrappers_are_named_and_in_one_after_another_are_not() -> None:
    def twice(rank: int) -> None:
        model = filled(nn.Linear(3, 1))
        first, second = DistributedDataParallel(model), DistributedDataParallel(model)
        backward(second, rank)
        backward(second, rank)
        assert first.module is second.module

    def in_turn(rank: int) -> None:
        model = filled(nn.Linear(3, 1))
        backward(DistributedDataParallel(model), rank)
        backward(DistributedDataParallel(model), rank)

    assert named(2, twice) == [("wrapped-twice", 0), ("wrapped-twice", 1)]
    assert named(2, in_turn) == []


# ------------------------------------------------------------------ seeds, epochs, rank 0


@pytest.mark.parametrize("wanted", [True, False])
def test_one_seed_where_different_ones_were_asked_for_is_named(wanted: bool) -> None:
    expect_different_seeds(wanted)  # threads share their generator, and so its seed

    def program(rank: int) -> None:
        ddp, _ = model_and_optimizer()
        for _ in range(2):
            backward(ddp, rank)

    assert named(3, program) == ([("same-seed", 0)] if wanted else [])


@pytest.mark.parametrize(
    ("others", "found"), [([0, 0], 1), ([0, 1], 0), ([], 0), ([None, None], 0), ([None, 0], 1)], ids=str
)
def test_ranks_that_draw_apart_are_right_and_those_that_follow_do_not_count(others: list, found: int) -> None:
    class Core:
        rank = 0

        def exchange(self, mine: bytes, _: str) -> list[bytes]:
            own = struct.unpack("<?Q", mine)[1]
            return [mine] + [b"" if each is None else struct.pack("<?Q", False, own + each) for each in others]

    expect_different_seeds()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compare_seeds(Core())
    assert len(caught) == found


def passes(loader: DataLoader, how: str, before: Callable[[int], Any] = id) -> list[MisuseWarning]:
    def program(rank: int) -> None:
        ddp, _ = model_and_optimizer()
        for epoch in range(3):
            before(epoch)
            for _ in phalanx.progress(loader) if how == "progress" else ddp.micro_batches(loader, every=2):
                pass

    return warned(1, program)


def loader_of(sampler: Any) -> DataLoader:
    return DataLoader(range(8), batch_size=2, sampler=sampler)


@pytest.mark.parametrize("how", ["progress", "micro_batches"])
def test_a_second_pass_in_the_same_epoch_is_named_once(how: str) -> None:
    (found,) = passes(loader_of(TorchSampler(range(8), 2, 0)), how)
    assert found.name == "no-set-epoch" and "sampler.set_epoch(epoch)" in found.instead


@pytest.mark.parametrize("how", ["progress", "micro_batches"])
def test_passes_that_are_right_are_no_misuse(how: str) -> None:
    sampler = TorchSampler(range(8), 2, 0)
    assert passes(loader_of(sampler), how, sampler.set_epoch) == []
    assert passes(loader_of(TorchSampler(range(8), 2, 0, shuffle=False)), how) == []
    assert passes(loader_of(DistributedSampler(range(8), 2, 0)), how) == []
    assert passes(DataLoader(range(8), shuffle=True), how) == []


def test_a_collective_of_rank_0_alone_goes_through_if_it_is_silenced_and_the_others_come() -> None:
    def program(rank: int) -> float:
        alone = phalanx.rank_zero_only(lambda: phalanx.mean(1.0))
        if rank == 0:
            with pytest.raises(MisuseError, match="which only rank 0 runs"):
                alone()
        dist.barrier()
        silenced.add("rank-zero-collective")
        return alone() if rank == 0 else phalanx.mean(3.0)

    assert run(2, program) == [2.0, 2.0]


# ------------------------------------------------------------------ explain


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_explain_shows_the_norm_of_each_gradient_on_each_rank(ranks: int) -> None:
    def program(rank: int) -> list[str]:
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False)), bucket_cap_mb=1e-6)
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter.fill_(1.0)
        assert ddp.explain(norms=True).count(" - ") == 3 * ranks
        with ddp.no_sync("1"):
            ddp(torch.full((1, 1), rank + 1.0)).sum().backward()
        return ddp.explain(norms=True).splitlines()

    for lines in run(ranks, program):
        heads, weight, bias, last = (line.split() for line in lines)
        assert heads[2 : 2 + 2 * ranks] == " ".join(f"rank {rank}" for rank in range(ranks)).split()
        mean = (ranks + 1) / 2
        assert weight[:2] == ["0.weight", "2"] and weight[2 : 2 + ranks] == [f"{mean:g}"] * ranks
        assert bias[:2] == ["0.bias", "1"] and bias[2 : 2 + ranks] == ["1"] * ranks
        assert last[:2] == ["1.weight", "0"] and last[2 : 2 + ranks] == [f"{rank + 2}" for rank in range(ranks)]
