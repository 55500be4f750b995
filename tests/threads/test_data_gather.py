"""phalanx.gather: every output once, in data set order, whatever the shares; and torchmetrics over the group."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

import phalanx
from phalanx.errors import MisuseError
from phalanx.testing import WorldError, run

N = 11


class Named(NamedTuple):
    double: Tensor
    words: list[str]


@dataclass
class Box:
    size: Tensor
    corners: list[Tensor]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(N))


def outputs_of(batch: Tensor, step: int) -> dict[Any, Any]:
    return {
        "named": Named(batch * 2, [f"item {int(item)}" for item in batch]),
        "pair": (batch.to(torch.bfloat16).reshape(-1, 1, 1).expand(-1, 2, 3), batch % 2 == 0),
        "box": Box(batch.double(), [torch.ones(int(item)) for item in batch]),
        "array": batch.numpy().astype(np.float32),
        7: 0.5,
        "scalar": torch.tensor(1.5, requires_grad=True),
    }


def check(whole: dict[Any, Any], items: list[int]) -> None:
    expected = torch.tensor(items)
    assert isinstance(whole["named"], Named) and isinstance(whole["box"], Box) and isinstance(whole["pair"], tuple)
    assert torch.equal(whole["named"].double, expected * 2)
    assert whole["named"].words == [f"item {item}" for item in items]
    assert whole["pair"][0].dtype == torch.bfloat16 and torch.equal(whole["pair"][0][:, 1, 2].long(), expected)
    assert torch.equal(whole["pair"][1], expected % 2 == 0)
    assert torch.equal(whole["box"].size, expected.double())
    assert [len(corner) for corner in whole["box"].corners] == items
    assert torch.equal(whole["array"], expected.float())
    assert whole[7] == [0.5] * len(items)
    assert torch.equal(whole["scalar"], torch.full((len(items),), 1.5)) and not whole["scalar"].requires_grad


@pytest.mark.parametrize("ranks", [1, 3, 4])
@pytest.mark.parametrize("options", [{"pad": False}, {}, {"pad": False, "shuffle": False}, {"shuffle": "hashed"}])
def test_nested_outputs_come_once_and_in_order(ranks: int, options: dict) -> None:
    def program(rank: int) -> dict[Any, Any]:
        loader = phalanx.loader(range(N), 2 * ranks, **options)
        return phalanx.gather([outputs_of(batch, step) for step, batch in enumerate(loader)], loader)

    for whole in run(ranks, program):
        check(whole, list(range(N)))


def test_ranks_without_any_batch_have_the_result_too() -> None:
    def program(rank: int, items: int) -> Any:
        loader = phalanx.loader(range(items), 4, pad=False)
        return phalanx.gather([{"x": batch * 2, "s": [str(int(i)) for i in batch]} for batch in loader], loader)

    for whole in run(4, program, 2):
        assert whole["x"].tolist() == [0, 2] and whole["s"] == ["0", "1"]
    assert run(2, program, 0) == [[], []]


def test_iterable_data_sets_and_whole_batches() -> None:
    def program(rank: int) -> tuple[list, list]:
        loader = phalanx.loader(Stream(), 6)
        stream = phalanx.gather([batch for batch in loader], loader)
        by_batch = phalanx.loader(
            list(range(N)), batch_sampler=BatchSampler(SequentialSampler(range(N)), 3, False), pad=True
        )
        batches = phalanx.gather([{"x": batch} for batch in by_batch], by_batch)
        return stream.tolist(), batches["x"].tolist()

    assert run(3, program) == [(list(range(N)), list(range(N)))] * 3


def test_after_a_resume_it_is_the_rest_of_the_epoch() -> None:
    def program(rank: int) -> list[int]:
        loader = phalanx.loader(range(N), 2, pad=False, shuffle=False)
        batches = iter(loader)
        next(batches), next(batches)
        state = loader.state_dict()
        resumed = phalanx.loader(range(N), 2, pad=False, shuffle=False)
        resumed.load_state_dict(state)
        return phalanx.gather(list(resumed), resumed).tolist()

    assert run(2, program) == [list(range(4, N))] * 2


def test_one_structure_for_all_items_and_other_sources() -> None:
    def program(rank: int) -> list[Any]:
        sampler = phalanx.DistributedSampler(range(N))
        items = list(sampler)
        words = phalanx.gather([f"{item}" for item in items], sampler)
        loader = phalanx.loader(range(N), 6)
        together = torch.cat(list(loader))
        everything = phalanx.gather({"x": together}, loader)["x"].tolist()
        by_index = phalanx.gather(torch.tensor(items) * 10, torch.tensor(items)).tolist()
        partial = phalanx.gather((together[:1], [rank]), [40 - rank])
        return [words, everything, by_index, partial[1]]

    for words, everything, by_index, partial in run(3, program):
        assert words == [str(item) for item in range(N)]
        assert everything == list(range(N))
        assert by_index == list(range(0, 10 * N, 10))
        assert partial == [2, 1, 0]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda batches: batches[:-1], "outputs, and the loader has given"),
        (lambda batches: [{"x": batch[:-1]} for batch in batches], r"\[0\]\['x'\] has 1 entries, and its batch has 2"),
        (lambda batches: [(batch, batch) if i else batch for i, batch in enumerate(batches)], "nested in another way"),
        (lambda batches: [batch.reshape(len(batch), 1).expand(-1, 1 + i) for i, batch in enumerate(batches)],
         "in different batches"),
        (lambda batches: [batch.float() for batch in batches], "than rank 0"),
        (lambda batches: [[1.0] * len(batch) for batch in batches], "than rank 0"),
    ],
)  # fmt: skip
def test_what_is_wrong_on_one_rank_is_told_on_all(wrong: Any, text: str) -> None:
    def program(rank: int) -> None:
        loader = phalanx.loader(range(8), 4)
        batches = list(loader)
        phalanx.gather(wrong(batches) if rank == 1 else batches, loader)

    with pytest.raises(WorldError) as caught:
        run(2, program)
    for rank, error in caught.value.errors.items():
        assert isinstance(error, MisuseError) and error.rank == rank
        assert "on rank 1" in str(error)
    assert len(caught.value.errors) == 2
    assert re.search(text, str(error))


def test_sources_that_tell_nothing_are_refused() -> None:
    with pytest.raises(MisuseError, match="has not been gone through"):
        phalanx.gather([torch.ones(2)], phalanx.loader(range(4), 2))
    with pytest.raises(MisuseError, match="has not been gone through"):
        phalanx.gather([torch.ones(2)], phalanx.DistributedSampler(range(4)))
    with pytest.raises(MisuseError, match="deals out to 2 ranks, and the group has 1"):
        sampler = phalanx.DistributedSampler(range(4), 2, 0)
        phalanx.gather(list(sampler), sampler)
    with pytest.raises(MisuseError, match="one entry per item"):
        phalanx.gather([{"x": 1.0}], [0, 1])
    sampler = phalanx.DistributedSampler(range(4))
    with pytest.raises(MisuseError, match="3 entries, and the sampler has given 4"):
        phalanx.gather(list(sampler)[:3], sampler)


def test_torchmetrics_has_the_value_of_one_process() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    classification = pytest.importorskip("torchmetrics.classification")
    generator = torch.Generator().manual_seed(0)
    scores, labels = torch.rand(N, 3, generator=generator), torch.randint(3, (N,), generator=generator)

    def metrics() -> list:
        return [
            torchmetrics.MeanMetric(), classification.MulticlassAccuracy(3), classification.MulticlassAUROC(3),
            torchmetrics.CatMetric(),
        ]  # fmt: skip

    def program(rank: int) -> list:
        ours = metrics()
        for index in phalanx.loader(range(N), 6, pad=False, shuffle=False):
            for metric in ours[1:3]:
                metric.update(scores[index], labels[index])
            ours[0].update(scores[index])
            ours[3].update(index)
        return [metric.compute() for metric in ours]

    truth = metrics()
    for metric in truth[1:3]:
        metric.update(scores, labels)
    truth[0].update(scores)
    for mine in run(3, program):
        for metric, value in zip(truth[:3], mine[:3], strict=True):
            torch.testing.assert_close(value, metric.compute())
        assert sorted(mine[3].tolist()) == list(range(N))
