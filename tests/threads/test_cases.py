"""Cases from the field, by number, each with the exact right answer. Variations are in the files beside.

The cases of processes that die are in procs/test_cases_processes.py.
"""

from __future__ import annotations

import copy
import io
import pickle
import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.utils.checkpoint import checkpoint

from phalanx import DistributedDataParallel, DistributedSampler, MisuseError, RankMismatchError
from phalanx.testing import generator, run
from tests.threads.small_models import Branches, ddp, filled, one, same_on_all, values, x_of

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


# ------------------------------------------------------------------ failures


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (
            (lambda: dist.all_reduce(torch.ones(4)), lambda: dist.all_reduce(torch.ones(8))),
            ("all_reduce(4 x float32", "all_reduce(8 x float32"),
        ),
        (
            (lambda: dist.all_reduce(torch.ones(4)), lambda: dist.all_reduce(torch.ones(4, dtype=torch.int32))),
            ("all_reduce(4 x float32", "all_reduce(4 x int32"),
        ),
        (
            (lambda: dist.all_reduce(torch.ones(4)), lambda: dist.broadcast(torch.ones(4), 0)),
            ("all_reduce(4 x float32", "broadcast(4 x float32"),
        ),
    ],
    ids=["size", "dtype", "operation"],
)
def test_case_24_ranks_in_different_collectives(calls: tuple, words: tuple):
    def program(rank: int) -> float:
        began = time.monotonic()
        with pytest.raises(RankMismatchError) as caught:
            calls[rank]()
        for place, word in enumerate(words):
            assert word in caught.value.calls[place] and word in str(caught.value)
        return time.monotonic() - began

    assert max(run(2, program)) < 2


class Swapped(nn.Module):
    def __init__(self, order: str) -> None:
        super().__init__()
        for name in order:
            setattr(self, name, one())


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda rank: nn.Linear(2, 1) if rank == 0 else nn.Linear(2, 3), "weight"),
        (lambda rank: nn.Linear(2, 1, bias=rank == 0), "bias"),
        (lambda rank: nn.Linear(2, 1, dtype=torch.float64 if rank else torch.float32), "weight"),
        (lambda rank: Swapped("ba" if rank else "ab"), "a.weight"),
    ],
    ids=["shape", "no bias", "dtype", "order"],
)
def test_case_25_different_models(build, name: str):
    outcomes = run(2, lambda rank: ddp(build(rank)), raises=False)
    for outcome in outcomes:
        assert isinstance(outcome.error, MisuseError)
        assert f"{name!r}" in str(outcome.error)
        assert "rank 0 has" in str(outcome.error) and "rank 1 has" in str(outcome.error)


def test_case_29_one_rank_alone_evaluates():
    def program(rank: int) -> float:
        model = ddp(nn.Sequential(one(), nn.BatchNorm1d(1)))
        model.eval()
        if rank == 0:
            with torch.no_grad():
                model(x_of(rank))
        model.train()
        time.sleep(0.02 * rank)
        model(torch.tensor([[1.0], [2.0]])).sum().backward()
        return model.module[1].running_mean.item()

    assert same_on_all(2, program, timeout=10) == pytest.approx(0.15)


# ------------------------------------------------------------------ state and data


def test_case_31_state_dicts_with_and_without_the_prefix_and_attributes_of_the_module():
    def program(rank: int) -> tuple:
        model, plain = ddp(filled(nn.Linear(3, 2), 1)), filled(nn.Linear(3, 2), 2)
        state = model.state_dict()
        assert list(state) == ["module.weight", "module.bias"]
        nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
        plain.load_state_dict(state)
        assert torch.equal(plain.weight, model.module.weight)
        other = filled(nn.Linear(3, 2), 3)
        model.load_state_dict(other.state_dict())
        assert torch.equal(other.weight, model.module.weight)
        model.load_state_dict({f"module.{k}": v for k, v in plain.state_dict().items()})
        assert torch.equal(plain.weight, model.module.weight)
        return model.in_features, model.out_features

    assert run(2, program) == [(3, 2), (3, 2)]


@pytest.mark.parametrize("sub_group", [False, True])
def test_case_32_deepcopy_and_pickle_inside_a_group(sub_group: bool):
    def program(rank: int) -> list | None:
        group = dist.new_group([0, 2]) if sub_group else None
        if sub_group and rank == 1:
            return None
        model, seen = ddp(one(), process_group=group), []
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert isinstance(twin, DistributedDataParallel) and twin.module is not model.module
            twin(x_of(rank)).sum().backward()
            seen.append(values(twin)["weight"])
        assert values(model)["weight"] is None
        return seen

    if sub_group:
        assert run(3, program) == [[2.0, 2.0], None, [2.0, 2.0]]
    else:
        assert run(2, program) == [[1.5, 1.5], [1.5, 1.5]]


@pytest.mark.parametrize("sub_group", [False, True])
def test_case_32_a_pickle_loads_outside_of_a_group_as_a_model_of_one_process(sub_group: bool):
    def write(rank: int) -> bytes:
        group = dist.new_group([0, 1]) if sub_group else None
        if rank == 2:
            return b""
        file = io.BytesIO()
        torch.save(ddp(one(), process_group=group), file)
        return file.getvalue()

    def read(rank: int, pickled: bytes) -> float:
        model = torch.load(io.BytesIO(pickled), weights_only=False)
        model(2 * x_of(rank)).sum().backward()
        return values(model)["weight"]

    pickled = run(3 if sub_group else 2, write)[0]
    assert run(1, read, pickled) == [2.0]


def test_case_33_every_index_once_without_padding_and_torchs_padding_by_default():
    data = list(range(10))
    exact = [list(DistributedSampler(data, 4, rank, shuffle=False, pad=False)) for rank in range(4)]
    assert sorted(index for share in exact for index in share) == data
    assert [len(share) for share in exact] == [3, 3, 2, 2]
    for rank in range(4):
        torchs = torch.utils.data.DistributedSampler(data, 4, rank)
        assert list(DistributedSampler(data, 4, rank)) == list(torchs)
        assert len(torchs) == 3


def test_case_34_two_epochs_without_set_epoch_differ_in_order():
    samplers = [DistributedSampler(list(range(64)), 2, rank) for rank in range(2)]
    first, second = ([list(sampler) for sampler in samplers] for _ in range(2))
    assert first != second
    assert all(sorted(a + b) == list(range(64)) for a, b in (first, second))


def test_case_36_half_precision_is_added_in_float32_and_rounded_once():
    def program(rank: int) -> tuple:
        term = 256.0 if rank == 0 else 1.0
        tensor = torch.tensor([term], dtype=torch.bfloat16)
        dist.all_reduce(tensor)
        model = ddp(one(dtype=torch.bfloat16))
        model(torch.tensor([[term]], dtype=torch.bfloat16)).sum().backward()
        return tensor.item(), values(model)["weight"]

    mean = torch.tensor(259 / 4, dtype=torch.float32).to(torch.bfloat16).item()
    assert same_on_all(4, program) == (260.0, mean)
    assert mean != 256 / 4


HOOKS = {
    "allreduce": (default_hooks.allreduce_hook, None, 0.0),
    "fp16": (default_hooks.fp16_compress_hook, None, 2e-3),
    "bf16": (default_hooks.bf16_compress_hook, None, 1e-2),
    "PowerSGD": (powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState, 1e-5),
    "quantisation per tensor": (quantization_hooks.quantization_pertensor_hook, None, 5e-2),
    "quantisation per channel": (quantization_hooks.quantization_perchannel_hook, None, 5e-2),
}


@pytest.mark.parametrize("name", HOOKS)
def test_case_37_torchs_communication_hooks_run_on_the_cpu(name: str):
    hook, state, tolerance = HOOKS[name]

    def program(rank: int) -> float:
        model = ddp(filled(nn.Linear(8, 8)))
        group = dist.group.WORLD
        # From its first step on, at full rank: PowerSGD of full rank loses nothing.
        made = group if state is None else state(group, matrix_approximation_rank=8, start_powerSGD_iter=2)
        model.register_comm_hook(made, hook)
        for step in range(4):
            model.zero_grad()
            batch = torch.randn(4, 8, generator=generator(10 * step + rank))
            model(batch).square().mean().backward()
        whole = torch.cat([torch.randn(4, 8, generator=generator(30 + r)) for r in range(2)])
        truth = filled(nn.Linear(8, 8))
        truth(whole).square().mean().backward()
        return max((p.grad - q.grad).abs().max().item() for p, q in zip(model.parameters(), truth.parameters(), strict=True))

    assert max(run(2, program)) <= tolerance + 1e-6


def test_case_38_the_same_input_twice_gives_bitwise_the_same_whatever_the_bucket_size():
    def program(rank: int) -> list[Tensor]:
        seen = []
        for bucket_cap_mb in (25, 0.0001, 0.01):
            model = ddp(filled(nn.Sequential(*[nn.Linear(17, 17) for _ in range(5)])), bucket_cap_mb=bucket_cap_mb)
            for _ in range(2):
                model.zero_grad()
                model(torch.randn(7, 17, generator=generator(rank))).square().sum().backward()
                seen.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
        return seen

    results = run(3, program)
    for seen in results:
        for other in seen:
            assert torch.equal(results[0][0], other)


