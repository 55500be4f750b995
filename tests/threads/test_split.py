"""A model over several devices, and over the ranks of a pipeline: the truth is the model in one place."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from phalanx import DistributedDataParallel, MisuseError, pipeline_stages, split_over
from phalanx.testing import oracle, run
from tests.threads.small_models import filled, noise, squares


def blocks() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def stacked() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), 1)


def devices_of(model: nn.Module) -> list[str]:
    return [str(parameter.device) for parameter in model.parameters()]


def test_the_model_stays_itself_and_equal() -> None:
    plain, batch = filled(blocks()), noise(4, 6)
    model = copy.deepcopy(plain)
    names = list(model.state_dict())
    assert split_over(model, ["cpu", "cpu"]) is model
    assert list(model.state_dict()) == names
    squares(model, batch).backward()
    oracle.assert_close(oracle.gradients_of(model), oracle.gradients(plain, squares, [[batch]]))


def test_blocks_and_what_goes_into_them_are_on_the_device() -> None:
    """The meta device computes shapes only, but refuses tensors that are elsewhere."""
    model = split_over(blocks(), ["cpu", "meta"], counts=[2, 3])
    assert devices_of(model) == ["cpu"] * 2 + ["meta"] * 4
    assert model(noise(4, 6)).device.type == "meta" and model[1](noise(4, 8)).device.type == "cpu"

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3).double()

        def forward(self, x: Tensor, others: dict[str, Any], *, mask: Tensor) -> Tensor:
            return self.layer(x) + others["a"][0] * mask

    made = split_over([Adds()], ["meta"])
    assert isinstance(made, nn.Sequential)
    x = noise(2, 3)
    assert made[0](x, {"a": (x, "text")}, mask=x).device.type == "meta"


def test_a_list_inside_of_a_model_and_the_way_back() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
    assert split_over(model.layers, ["meta", "cpu"], counts=[1, 2], output_device="meta") is model.layers
    x = torch.zeros(1, 2)
    assert [str(layer(x).device) for layer in model.layers] == ["meta", "cpu", "meta"]


def test_a_new_split_replaces_the_old_one_and_copies_keep_it() -> None:
    model = split_over(blocks(), ["cpu", "meta"], output_device="cpu")
    split_over(model, ["meta", "meta", "meta"])
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert each(noise(2, 6)).device.type == "meta"
        assert [len(block._forward_pre_hooks) + len(block._forward_hooks) for block in each] == [1] * 5


def test_shares_are_equal_by_bytes() -> None:
    heavy = nn.Sequential(nn.Linear(100, 100), *[nn.Linear(5, 5) for _ in range(5)])
    assert devices_of(split_over(heavy, ["meta", "cpu"])) == ["meta"] * 2 + ["cpu"] * 10


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: split_over(blocks(), ["cpu"] * 6), "5 blocks for 6 devices"),
        (lambda: split_over(blocks(), []), "5 blocks for 0 devices"),
        (lambda: split_over(blocks(), ["cpu"] * 2, counts=[5, 0]), "2 positive numbers whose sum is 5"),
        (lambda: pipeline_stages(blocks(), 2, counts=[1, 1]), r"counts=\[1, 1\] for 5 blocks and 2 stages"),
        (lambda: split_over(stacked(), ["cpu"]), "Instead: its blocks, layers"),
    ],
)
def test_misuse_is_an_error(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(MisuseError, match=words):
        call()


def test_a_tensor_shared_between_places_is_an_error() -> None:
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    with pytest.raises(MisuseError, match="'0.weight' on cpu and '1.weight' on meta are one tensor"):
        split_over(tied, ["cpu", "meta"])
    with pytest.raises(MisuseError, match="on stage 0 and .* on stage 1"):
        pipeline_stages(tied, 2)
    assert split_over(tied, ["cpu", "cpu"])(noise(1, 3).float()).shape == (1, 3)


def test_ranks_of_a_split_model_equal_the_whole_batch() -> None:
    plain, batches = filled(blocks()), [noise(4, 6, seed=seed) for seed in range(2)]

    def program(rank: int) -> oracle.Gradients:
        model = DistributedDataParallel(split_over(copy.deepcopy(plain), ["cpu", "cpu"]))
        squares(model, batches[rank]).backward()
        return oracle.gradients_of(model)

    for gradients in run(2, program):
        oracle.assert_close(gradients, oracle.gradients(plain, squares, [[batch] for batch in batches]))


def error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def in_pipeline(rank: int, kind: type, micro_batches: int, steps: int) -> list[oracle.Gradients]:
    """Train one of two stages on one of two halves of the batch; return the gradients of each step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "replica"))
    index, replica = mesh.get_local_rank("stage"), mesh.get_local_rank("replica")
    part = pipeline_stages(filled(blocks()), 2)[index]
    model = DistributedDataParallel(part, process_group=mesh.get_group("replica"))
    stage = PipelineStage(model, index, 2, torch.device("cpu"), group=mesh.get_group("stage"))
    schedule = kind(stage, micro_batches, loss_fn=error)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = (whole.chunk(2)[replica] for whole in whole_batch(step))
        schedule.step(inputs) if index == 0 else schedule.step(target=targets)
        seen.append(oracle.gradients_of(model))
        optimizer.step()
    return seen


def whole_batch(step: int) -> tuple[Tensor, Tensor]:
    return noise(16, 6, seed=2 * step), noise(16, 3, seed=2 * step + 1)


@pytest.mark.parametrize("kind", [ScheduleGPipe, Schedule1F1B])
def test_stages_of_a_pipeline_times_replicas_equal_one_process(kind: type) -> None:
    ranks = run(4, in_pipeline, kind, 4, 3)
    model = filled(blocks())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        inputs, targets = whole_batch(step)
        error(model(inputs), targets).backward()
        for first, last in ((0, 2), (1, 3)):
            oracle.assert_close({**ranks[first][step], **ranks[last][step]}, oracle.gradients_of(model), rtol=1e-10)
        optimizer.step()
