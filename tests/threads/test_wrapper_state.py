"""The wrapper itself: copies and pickles, state dicts, groups of the user."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx import DistributedDataParallel, MisuseError
from phalanx.testing import generator, run
from tests.threads.small_models import Branches, ddp, filled, one, same_on_all, values, x_of


class Named(nn.Module):
    """With attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.width = one(), 7
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    @property
    def twice(self) -> int:
        return 2 * self.width

    def describe(self, word: str = "") -> str:
        return f"{word}{self.width}"


# ------------------------------------------------------------------ being a module


def test_it_is_torchs_class_and_a_module():
    def program(rank: int) -> tuple:
        model = ddp(Named())
        return (
            isinstance(model, nn.parallel.DistributedDataParallel), isinstance(model.module, Named),
            [name for name, _ in model.named_parameters()], model.training, len(list(model.children())),
        )  # fmt: skip

    assert same_on_all(2, program) == (True, True, ["module.layer.weight"], True, 1)


def test_attributes_methods_and_properties_of_the_module_are_reached():
    def program(rank: int) -> tuple:
        model = ddp(Named())
        with pytest.raises(AttributeError, match="no attribute 'wiegh', nor has the Named in it") as caught:
            _ = model.wiegh
        assert caught.value.obj is model  # so that Python can say what was meant
        return model.width, model.twice, model.describe(word="w"), model.seen.item(), hasattr(model, "missing")

    assert same_on_all(2, program) == (7, 14, "w7", 0.0, False)


def test_train_and_eval_reach_the_module():
    def program(rank: int) -> tuple:
        model = ddp(Named())
        model.eval()
        first = model.module.training
        assert model.train() is model
        return first, model.module.training

    assert same_on_all(2, program) == (False, True)


def test_parameters_and_buffers_of_rank_0_are_copied_to_all():
    def program(rank: int) -> tuple:
        module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        filled(module, rank)
        module[1].running_mean.fill_(rank + 1.0)
        model = ddp(module)
        return [p.tolist() for p in model.parameters()], module[1].running_mean.tolist()

    assert same_on_all(3, program)[1] == [1.0] * 3


def test_without_init_sync_every_rank_keeps_its_own():
    def program(rank: int) -> float:
        module = one()
        nn.init.constant_(module.weight, rank)
        return ddp(module, init_sync=False).module.weight.item()

    assert run(2, program) == [0.0, 1.0]


def test_two_training_forwards_may_come_before_one_backward():
    """Buffers are copied before the second one, which a graph that has saved them must not notice."""

    def program(rank: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        ddp = DistributedDataParallel(copy.deepcopy(model))
        for real, made in [(1.0, 2.0), (3.0, 5.0)]:
            x = torch.randn(4, 3, generator=generator(rank))
            ddp.zero_grad()
            (ddp(real * x) - ddp(made * x) ** 2).sum().backward()
        return [p.grad for p in ddp.parameters()]

    first, second = run(2, program)
    assert all(torch.equal(a, b) and a.abs().sum() > 0 for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("forward_sync", [True, False])
def test_buffers_are_those_of_rank_0_after_each_training_forward(forward_sync: bool):
    def program(rank: int) -> list:
        model, seen = ddp(nn.BatchNorm1d(1), forward_sync_buffers=forward_sync), []
        for _ in range(2):
            model(torch.tensor([[1.0], [3.0]]) + 10 * rank).sum().backward()
            seen.append(round(model.module.running_mean.item(), 4))
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, 1))
        return [*seen, round(model.module.running_mean.item(), 4)]

    first, second = run(2, program)
    # 0.9 * before + 0.1 * mean of the batch; the batches' means are 2 and 12. Evaluation takes rank 0's, as in torch.
    assert first == [0.2, 0.38, 0.38]
    assert second == ([1.2, 1.38, 0.38] if forward_sync else [1.2, 2.28, 2.28])


# ------------------------------------------------------------------ copies and pickles


def save_and_load(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "torch.save": save_and_load}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("trained", [False, True])
def test_a_copy_trains_by_itself_and_so_does_the_original(way: str, trained: bool):
    def program(rank: int) -> list:
        model = ddp(Branches())
        if trained:
            model(x_of(rank), "ab").sum().backward()
        twin, seen = COPIES[way](model), []
        for each, route in ((twin, "a"), (model, "b"), (twin, "ab"), (model, "a")):
            each.zero_grad()
            each(x_of(rank), route).sum().backward()
            seen.append(values(each))
        return seen

    a, b = {"a.weight": 1.5, "b.weight": None}, {"a.weight": None, "b.weight": 1.5}
    assert same_on_all(2, program) == [a, b, {"a.weight": 1.5, "b.weight": 1.5}, a]


def test_options_survive_a_copy():
    def program(rank: int) -> list:
        model = ddp(Branches(), bucket_cap_mb=3, forward_sync_buffers=False, find_unused_parameters=True)
        return [
            (m.options.bucket_cap_mb, m.forward_sync_buffers, m.find_unused_parameters, m.device_ids)
            for m in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)))
        ]

    assert same_on_all(2, program) == [(3, False, True, None)] * 3


def test_a_copy_on_rank_0_alone_is_no_collective_and_harms_nothing():
    """As people keep the best model so far."""

    def program(rank: int) -> tuple:
        model = ddp(one())
        model(x_of(rank)).sum().backward()
        best = copy.deepcopy(model) if rank == 0 else None
        model.zero_grad()
        model(x_of(rank)).sum().backward()
        another = ddp(one())  # models wrapped later are told from each other
        another(2 * x_of(rank)).sum().backward()
        kept = None
        if best is not None:
            with torch.no_grad():
                kept = best(torch.ones(1, 1)).item()
        return values(model)["weight"], values(another)["weight"], kept

    assert run(2, program, timeout=10) == [(1.5, 3.0, 1.0), (1.5, 3.0, None)]


def test_a_copy_inside_no_sync_synchronises_outside_of_it():
    def program(rank: int) -> float:
        model = ddp(one())
        with model.no_sync():
            twin = copy.deepcopy(model)
        twin(x_of(rank)).sum().backward()
        return values(twin)["weight"]

    assert same_on_all(2, program) == 1.5


def test_a_pickle_of_a_group_that_this_process_has_not_is_a_clear_error():
    def program(rank: int) -> bytes:
        group = dist.new_group([0, 1])
        return pickle.dumps(ddp(one(), process_group=group)) if rank < 2 else b""

    pickled = run(3, program)[0]

    def load(rank: int) -> None:
        with pytest.raises(MisuseError, match=r"(?s)ranks \[0, 1\].*new_group"):
            pickle.loads(pickled)

    load_on_three = run(3, lambda rank: load(rank))
    assert load_on_three == [None] * 3


# ------------------------------------------------------------------ state dicts


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_dict_with_missing_or_extra_keys(strict: bool):
    def program(rank: int) -> None:
        model = ddp(nn.Linear(2, 2))
        wrong = {"weight": torch.zeros(2, 2), "other": torch.zeros(1)}
        if strict:
            with pytest.raises(RuntimeError, match="Missing key.*bias|Unexpected key.*other"):
                model.load_state_dict(wrong)
        else:
            result = model.load_state_dict(wrong, strict=False)
            assert result.missing_keys == ["module.bias"] and result.unexpected_keys == ["module.other"]
            assert not model.module.weight.any()

    run(2, program)


def test_an_assigned_state_dict_brings_new_parameters_that_are_followed():
    def program(rank: int) -> dict:
        model = ddp(Branches("ab"))
        model(x_of(rank)).sum().backward()
        model.load_state_dict({name: torch.full((1, 1), 2.0) for name in ("a.weight", "b.weight")}, assign=True)
        model(x_of(rank)).sum().backward()
        return values(model)

    assert same_on_all(2, program) == {"a.weight": 3.0, "b.weight": 3.0}


def test_torchs_own_wrapper_reads_our_state_dict_and_we_its():
    def program(rank: int) -> bool:
        ours = ddp(filled(nn.Linear(3, 2), 1))
        theirs = nn.parallel.DistributedDataParallel(filled(nn.Linear(3, 2), 2))
        theirs.load_state_dict(ours.state_dict())
        same = torch.equal(theirs.module.weight, ours.module.weight)
        nn.init.zeros_(theirs.module.weight)
        ours.load_state_dict(theirs.state_dict())
        return same and not ours.module.weight.any()

    assert all(run(2, program, backend="gloo"))


# ------------------------------------------------------------------ groups


@pytest.mark.parametrize("n", [2, 3])
def test_a_gloo_group_of_the_user(n: int):
    def program(rank: int) -> list:
        model, seen = ddp(Branches("ab")), []
        for _ in range(2):
            model.zero_grad()
            model(x_of(rank)).sum().backward()
            seen.append(values(model))
        total = torch.ones(1)
        dist.all_reduce(total)
        return [*seen, total.item(), dist.get_backend()]

    mean = (n + 1) / 2
    assert same_on_all(n, program, backend="gloo") == [{"a.weight": mean, "b.weight": mean}] * 2 + [float(n), "gloo"]


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
def test_two_sub_groups_train_two_models_at_the_same_time(backend: str):
    def program(rank: int) -> float:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        model = ddp(one(), process_group=groups[rank % 2])
        for _ in range(3):
            model.zero_grad()
            model(x_of(rank)).sum().backward()
        return values(model)["weight"]

    assert run(4, program, backend=backend) == [2.0, 3.0, 2.0, 3.0]


def test_the_same_model_by_turns_on_the_world_and_on_a_sub_group():
    def program(rank: int) -> tuple:
        pair = dist.new_group([0, 1])
        everywhere = ddp(one())
        everywhere(x_of(rank)).sum().backward()
        here = None
        if rank < 2:
            here = ddp(one(), process_group=pair)
            here(x_of(rank)).sum().backward()
            here = values(here)["weight"]
        everywhere(x_of(rank)).sum().backward()
        return values(everywhere)["weight"], here

    assert run(3, program) == [(4.0, 1.5), (4.0, 1.5), (4.0, None)]


def test_a_group_that_this_rank_is_not_in():
    def program(rank: int) -> None:
        group = dist.new_group([0])
        if rank == 1:
            with pytest.raises(MisuseError, match="not a member"):
                ddp(one(), process_group=group)

    run(2, program)


def test_a_device_mesh_of_one_dimension():
    def program(rank: int) -> float:
        mesh = dist.init_device_mesh("cpu", (2,))
        model = ddp(one(), device_mesh=mesh)
        model(x_of(rank)).sum().backward()
        with pytest.raises(RuntimeError, match="Cannot specify both process_group and device_mesh"):
            ddp(one(), device_mesh=mesh, process_group=dist.group.WORLD)
        return values(model)["weight"]

    assert same_on_all(2, program) == 1.5


def test_parameters_to_ignore_stay_local_and_are_not_copied():
    def program(rank: int) -> tuple:
        module = Branches("ab")
        nn.init.constant_(module.b.weight, rank + 1.0)
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["b.weight"])
        model = ddp(module)
        model(x_of(rank)).sum().backward()
        return module.b.weight.item(), values(model)["b.weight"], values(model)["a.weight"]

    # gradient of a: x * b = 1 | 4; of b: x * a = 1 | 2
    assert run(2, program) == [(1.0, 1.0, 2.5), (2.0, 2.0, 2.5)]
