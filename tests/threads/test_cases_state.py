"""Cases 24 to 38 from the field: failures, state and data, each with the exact right answer."""

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

from phalanx import DistributedDataParallel, DistributedSampler, MisuseError, RankMismatchError
from phalanx.testing import generator, run
from tests.threads.small_models import ddp, filled, one, same_on_all, values, x_of

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
        pairs = zip(model.parameters(), truth.parameters(), strict=True)
        return max((p.grad - q.grad).abs().max().item() for p, q in pairs)

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
