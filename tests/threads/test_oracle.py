"""The oracle itself, against figures worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Module

from phalanx.testing import oracle


class Line(Module):
    def __init__(self, weight: float = 0.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([weight]))
        self.unused = torch.nn.Parameter(torch.tensor([1.0]))


def slope(model: Module, batch: list[float]) -> Tensor:
    """The gradient of this loss with respect to the weight is the batch's mean."""
    return (model.weight * torch.tensor(batch)).mean()


def test_every_rank_counts_as_one_without_items():
    got = oracle.gradients(Line(), slope, [[[1.0]], [[5.0, 5.0, 5.0]]])
    assert got["weight"].tolist() == [3.0]
    assert got["unused"] is None


def test_every_item_counts_as_one_with_items():
    got = oracle.gradients(Line(), slope, [[[1.0]], [[5.0, 5.0, 5.0]]], items=len)
    assert got["weight"].tolist() == [4.0]


def test_micro_batches_of_a_rank_are_summed_without_items_and_averaged_with():
    batches = [[[1.0], [2.0]], [[1.0], [2.0]]]
    assert oracle.gradients(Line(), slope, batches)["weight"].tolist() == [3.0]
    assert oracle.gradients(Line(), slope, batches, items=len)["weight"].tolist() == [1.5]


def test_an_empty_batch_has_no_part_with_items():
    got = oracle.gradients(Line(), slope, [[[]], [[2.0, 4.0]]], items=len)
    assert got["weight"].tolist() == [3.0]


def test_a_divisor_of_ones_own():
    assert oracle.gradients(Line(), slope, [[[4.0]], []], divisor=4)["weight"].tolist() == [1.0]


def test_parameters_after_two_steps_and_the_model_as_it_was():
    model = Line(10.0)
    model.weight.grad = torch.tensor([7.0])
    steps = [[[[1.0]], [[3.0]]], [[[2.0]], [[6.0]]]]
    got = oracle.parameters(model, slope, steps, lambda p: torch.optim.SGD(p, lr=0.5))
    assert got["weight"].tolist() == [10 - 0.5 * 2 - 0.5 * 4]
    assert got["unused"].tolist() == [1.0]
    assert model.weight.item() == 10.0
    assert model.weight.grad.item() == 7.0


def test_the_prefix_of_a_wrapper_is_left_out():
    wrapper = torch.nn.Module()
    wrapper.module = Line(2.0)
    oracle.assert_close(oracle.parameters_of(wrapper), oracle.parameters_of(Line(2.0)))
    oracle.assert_close(oracle.gradients_of(wrapper), {"weight": None, "unused": None})


def test_what_is_close_is_close():
    a = {"x": torch.tensor([1.0, float("nan")]), "y": None, "z": torch.tensor(1j), "w": torch.ones(0)}
    b = {**a, "x": torch.tensor([1.0 + 1e-6, float("nan")])}
    oracle.assert_close(a, b)
    oracle.assert_close({"s": torch.ones(2, 2).to_sparse()}, {"s": torch.ones(2, 2)})


@pytest.mark.parametrize(
    ("actual", "text"),
    [
        ({"a": torch.zeros(2, 2), "b": torch.tensor([[1, 2], [3, 4.5]])}, r"^b: differs by 0.5 at \[1, 1\]"),
        ({"a": torch.tensor([[0, 1.0], [0, 0]]), "b": torch.zeros(2, 2)}, r"^a: differs by 1 at \[0, 1\]"),
        ({"a": torch.zeros(2, 2), "b": None}, "b: is None, expected float32"),
        ({"a": torch.zeros(2, 2), "b": torch.zeros(4)}, r"b: is float32\[4\], expected float32\[2, 2\]"),
        ({"a": torch.zeros(2, 2).double(), "b": torch.zeros(4)}, "a: is float64"),
        ({"a": torch.zeros(2, 2)}, "only one side has: b"),
        ({"a": torch.full((2, 2), float("nan")), "b": torch.zeros(2, 2)}, "a: differs by nan"),
    ],
)
def test_the_first_parameter_that_differs_is_named(actual: dict, text: str):
    expected = {"a": torch.zeros(2, 2), "b": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    with pytest.raises(AssertionError, match=text):
        oracle.assert_close(actual, expected)
