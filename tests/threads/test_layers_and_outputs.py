"""Layers, parameter types, memory formats and outputs of all kinds, against one process."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.testing import run
from tests.threads.small_models import compare, ddp, filled, noise, one, same_on_all, squares, values, x_of

# ------------------------------------------------------------------ layer types and memory formats

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 3), (4, 5)),
    "convolution": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 6, 6)),
    "transposed convolution": (lambda: nn.ConvTranspose1d(3, 2, 3), (2, 3, 6)),
    "layer norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), (3, 4)),
    "group norm": (lambda: nn.Sequential(nn.Conv1d(4, 4, 1), nn.GroupNorm(2, 4)), (2, 4, 5)),
    "scalar parameters": (lambda: nn.PReLU(), (3, 4)),
    "bilinear": (lambda: Both(nn.Bilinear(3, 3, 2)), (4, 3)),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), (2, 3, 4)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (5, 4)),
}  # fmt: skip


class Both(nn.Module):
    """Gives a layer its input twice."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("n", [2, 3])
def test_layers_of_all_kinds(name: str, n: int):
    build, shape = LAYERS[name]
    compare(lambda: build().double(), squares, [noise(*shape, seed=rank) for rank in range(n)])


def test_recurrent_layers():
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTM(3, 4, num_layers=2, bidirectional=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(x)[0][-1]

    compare(lambda: Last().double(), squares, [noise(5, 2, 3, seed=rank) for rank in range(2)])


@pytest.mark.parametrize("kind", ["channels_last", "channels_last_3d", "transposed weight"])
def test_gradients_have_the_layout_of_their_parameters(kind: str):
    def build() -> nn.Module:
        if kind == "channels_last":
            return nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)
        if kind == "channels_last_3d":
            return nn.Conv3d(2, 3, 2).double().to(memory_format=torch.channels_last_3d)
        layer = nn.Linear(4, 3).double()
        layer.weight = nn.Parameter(torch.empty(4, 3, dtype=torch.float64).t())
        return layer

    shape = {"channels_last": (2, 3, 5, 5), "channels_last_3d": (2, 2, 4, 4, 4)}.get(kind, (5, 4))
    compare(build, squares, [noise(*shape, seed=rank) for rank in range(2)])

    def program(rank: int) -> bool:
        model = ddp(filled(build()))
        squares(model, noise(*shape, seed=rank)).backward()
        return all(p.grad.stride() == p.stride() for p in model.parameters())

    assert same_on_all(2, program)


@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"),
    [
        (torch.float16, 2e-3, 2e-3),
        (torch.bfloat16, 1e-2, 1e-2),
        (torch.float64, 1e-10, 1e-12),
        (torch.complex64, 1e-5, 1e-6),
    ],
    ids=str,
)
def test_parameters_of_other_types(dtype: torch.dtype, rtol: float, atol: float):
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).abs().double().square().mean()

    batches = [noise(6, 4, seed=rank, dtype=torch.float32).to(dtype) for rank in range(3)]
    compare(lambda: nn.Linear(4, 3, dtype=dtype), loss, batches, rtol=rtol, atol=atol)


def test_parameters_of_several_types_in_one_model():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64)
            self.c, self.d = nn.Linear(4, 4, dtype=torch.complex128), nn.Linear(4, 4, dtype=torch.bfloat16)
            self.empty = nn.Parameter(torch.empty(0, 3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.b(self.a(x.float()).double())
            z = self.c(y.to(torch.complex128)).abs() + self.d(y.bfloat16()).double()
            return z + self.empty.sum()

    compare(Mixed, squares, [noise(3, 4, seed=rank) for rank in range(2)], rtol=2e-2, atol=2e-2)


# ------------------------------------------------------------------ outputs


@dataclass
class Data:
    loss: Tensor
    name: str


Pair = namedtuple("Pair", "a b")


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


class Slotted:
    __slots__ = ("_hidden",)

    def __init__(self, value: Any) -> None:
        self._hidden = value


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dict": (lambda y: {"y": y, "n": 1}, lambda out: out["y"]),
    "ordered dict in a list": (lambda y: [OrderedDict(y=y)], lambda out: out[0]["y"]),
    "tuple with None": (lambda y: (None, y), lambda out: out[1]),
    "named tuple": (lambda y: Pair("text", y), lambda out: out.b),
    "dataclass": (lambda y: Data(y, "text"), lambda out: out.loss),
    "plain object": (lambda y: Plain({"deep": [y]}), lambda out: out.value["deep"][0]),
    "object with slots": (Slotted, lambda out: out._hidden),
    "a closure": (lambda y: lambda: y, lambda out: out()),
    "a generator": (lambda y: (part for part in [y]), lambda out: next(out)),
    "a view": (lambda y: y.view(-1), lambda out: out),
}


class Returns(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.unused, self.wrap = one(bias=True), one(), wrap

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Any:
        return self.wrap(self.layer(x) * scale)


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_of_all_kinds(name: str):
    wrap, unwrap = OUTPUTS[name]

    def program(rank: int) -> list:
        model, seen = ddp(Returns(wrap)), []
        for _ in range(2):
            model.zero_grad()
            unwrap(model(x_of(rank), scale=2.0)).sum().backward()
            seen.append(values(model))
        return seen

    assert same_on_all(2, program) == [{"layer.weight": 3.0, "layer.bias": 2.0, "unused.weight": None}] * 2


@pytest.mark.parametrize("name", OUTPUTS)
def test_no_sync_around_the_forward_alone_is_seen_through_every_output_whose_tensors_can_be_found(name: str):
    wrap, unwrap = OUTPUTS[name]
    if name in ("a closure", "a generator"):
        pytest.skip("no way to see into it: whether to synchronise is then decided in backward alone")

    def program(rank: int) -> tuple:
        model = ddp(Returns(wrap))
        with model.no_sync():
            loss = unwrap(model(x_of(rank))).sum()
        loss.backward()
        local = values(model)["layer.weight"]
        unwrap(model(x_of(rank))).sum().backward()
        return local, values(model)["layer.weight"]

    assert run(2, program) == [(1.0, 3.0), (2.0, 3.0)]


def test_an_output_that_is_an_input_or_needs_no_gradient():
    def program(rank: int) -> dict:
        model = ddp(Returns(lambda y: (y, y.detach(), torch.ones(2))))
        out, flat, constant = model(x_of(rank))
        (out * flat * constant.sum()).sum().backward()
        return values(model)

    # out = x + 1, gradient of the weight = x * (x + 1) * 2
    assert same_on_all(2, program)["layer.weight"] == (1 * 2 * 2 + 2 * 3 * 2) / 2
