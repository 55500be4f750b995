"""Arguments of the constructor: those that cannot be right, those without a meaning, and models that differ."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import phalanx
from phalanx import DistributedDataParallel, MisuseError
from phalanx.testing import generator, run
from tests.threads.small_models import ddp, one, same_on_all, values, x_of


@pytest.mark.parametrize(
    ("build", "keywords", "error", "text"),
    [
        (one, {"device_ids": [0]}, ValueError, "device_ids and output_device arguments only work"),
        (one, {"device_ids": [0, 1]}, ValueError, "device_ids can only be None or contain a single element."),
        (one, {"output_device": 0}, ValueError, "device_ids and output_device arguments only work"),
        (nn.ReLU, {}, RuntimeError, "is not needed when a module doesn't have any parameter that requires a gradient."),
        (lambda: one().requires_grad_(False), {}, RuntimeError, "doesn't have any parameter that requires a gradient."),
        (one, {"no_such_keyword": 1}, TypeError, "no_such_keyword"),
    ],
    ids=["device_ids", "two devices", "output_device", "no parameters", "all frozen", "unknown keyword"],
)
def test_arguments_that_cannot_be_right(build, keywords: dict, error: type, text: str):
    def program(rank: int) -> None:
        with pytest.raises(error, match=text):
            DistributedDataParallel(build(), **keywords)

    run(2, program, timeout=10)


def test_gradients_of_another_dtype_than_their_parameter_are_refused():
    def program(rank: int) -> None:
        layer = nn.Sequential(nn.Linear(2, 2).bfloat16())
        layer[0].bias.grad_dtype = torch.float32
        with pytest.raises(MisuseError, match="gradients of 0.bias are to be torch.float32"):
            DistributedDataParallel(layer)

    run(2, program)


def test_empty_device_ids_are_no_device_ids():
    assert same_on_all(2, lambda rank: ddp(one(), device_ids=[]).device_ids) is None


FLAGS = ["find_unused_parameters", "gradient_as_bucket_view", "check_reduction", "batched_grad_copy"]


@pytest.mark.parametrize("name", FLAGS)
def test_flags_that_have_no_meaning_here_are_accepted(name: str):
    def program(rank: int) -> float:
        model = ddp(one(), **{name: True})
        model(x_of(rank)).sum().backward()
        return values(model)["weight"]

    assert same_on_all(2, program) == 1.5


def test_the_older_name_of_buffer_synchronisation_warns_where_it_is_used():
    def program(rank: int) -> None:
        with pytest.warns(FutureWarning, match="forward_sync_buffers") as caught:
            DistributedDataParallel(one(), broadcast_buffers=False)
        assert [each.filename for each in caught] == [__file__]

    run(1, program)


def test_models_that_differ_in_one_of_many_layers_name_it_on_every_rank():
    def program(rank: int) -> None:
        layers = [nn.Linear(3, 3) for _ in range(5)]
        if rank == 2:
            layers[3] = nn.Linear(3, 3, dtype=torch.float64)
        with pytest.raises(MisuseError, match="'3.weight'.*rank 2 has 3.weight: float64"):
            ddp(nn.Sequential(*layers))

    run(3, program)


def test_models_whose_weights_lie_differently_in_memory_name_the_first():
    def program(rank: int) -> None:
        layer = nn.Sequential(nn.Linear(2, 2), nn.Conv2d(3, 4, 2))
        if rank == 0:
            layer.to(memory_format=torch.channels_last)
        with pytest.raises(MisuseError, match=r"'1.weight'.*rank 0 has 1.weight: float32 \[4, 3, 2, 2\] with strides"):
            ddp(layer)
        ddp(nn.Conv2d(1, 1, 1).to(memory_format=torch.channels_last) if rank else nn.Conv2d(1, 1, 1))  # the same memory

    run(2, program)


def test_bucket_sizes_that_differ():
    def program(rank: int) -> None:
        with pytest.raises(MisuseError, match="bucket_cap_mb"):
            ddp(one(), bucket_cap_mb=rank + 1)

    run(2, program)


def test_a_world_of_one_without_a_launcher():
    """`python train.py`, without any initialisation."""

    def program(rank: int) -> tuple:
        model = ddp(one())
        with model.no_sync():
            model(x_of(0)).sum().backward()
        model(x_of(0)).sum().backward()
        result = values(model)["weight"], phalanx.world_size()
        return result

    assert run(1, program, backend=None) == [(2.0, 1)]


def test_random_weights_are_made_equal():
    def program(rank: int) -> list:
        model = ddp(nn.Linear(4, 4))
        model(torch.randn(2, 4, generator=generator(rank))).sum().backward()
        return [model.module.weight.tolist(), values(model)["bias"]]

    same_on_all(3, program)
