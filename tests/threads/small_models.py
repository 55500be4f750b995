"""Models so small that their gradients are known by heart, and what the tests do with them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from phalanx import DistributedDataParallel
from phalanx.testing import generator, oracle, run

Values = dict[str, Any]


def one(bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Linear:
    """Linear(1, 1) with all parameters 1: the gradient of its weight is the sum of its inputs."""
    layer = nn.Linear(1, 1, bias=bias, dtype=dtype)
    for parameter in layer.parameters():
        nn.init.ones_(parameter)
    return layer


def ddp(module: nn.Module, **keywords: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, **keywords)


def x_of(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((1, 1), rank + 1.0, dtype=dtype)


class Branches(nn.Module):
    """Layers `a` and `b`; forward runs those that `way` names, one after the other."""

    def __init__(self, way: str = "a") -> None:
        super().__init__()
        self.a, self.b = one(), one()
        self.way = way

    def forward(self, x: Tensor, way: str | None = None) -> Tensor:
        for name in self.way if way is None else way:
            x = getattr(self, name)(x)
        return x


def values(module: nn.Module) -> Values:
    """Every gradient as numbers, by name; None where there is none."""
    return {
        name.removeprefix("module."): None if p.grad is None else simple(p.grad)
        for name, p in module.named_parameters()
    }


def simple(tensor: Tensor) -> Any:
    """A number for one element, else nested lists."""
    tensor = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return tensor.item() if tensor.numel() == 1 else tensor.tolist()


def filled(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module with parameters that depend on `seed` alone, whatever other threads draw."""
    random = generator(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            size = parameter.shape
            if parameter.is_complex():
                parameter.copy_(torch.randn(*size, dtype=parameter.dtype, generator=random) / 2)
            else:
                parameter.copy_(torch.randn(*size, dtype=torch.float64, generator=random) / 2)
    return module


def same_on_all(n: int, program: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Run `program` on `n` ranks, which must all return the same; return that."""
    results = run(n, program, *args, **keywords)
    for rank, result in enumerate(results):
        assert result == results[0], f"rank {rank} has {result}, rank 0 has {results[0]}"
    return results[0]


def compare(
    build: Callable[[], nn.Module], loss: oracle.Loss, batches: list[Any], steps: int = 2, **tolerance: float
) -> None:
    """Train `steps` steps on one rank for each batch; every gradient of every step equals the oracle's."""

    def program(rank: int) -> list[oracle.Gradients]:
        model, seen = ddp(filled(build())), []
        for _ in range(steps):
            model.zero_grad()
            loss(model, batches[rank]).backward()
            seen.append(oracle.gradients_of(model))
        return seen

    expected = oracle.gradients(filled(build()), loss, [[batch] for batch in batches])
    for seen in run(len(batches), program):
        for gradients in seen:
            oracle.assert_close(gradients, expected, **tolerance)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=generator(seed))


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def copied_gradients(model: Any) -> list[Tensor | None]:
    """Copies of the gradients that a wrapped model shows."""
    return [None if p.grad is None else p.grad.detach().clone() for p in model.module.parameters()]


class RandomScript:
    """What training loops that do `actions` at random have in common; `kept` are gradients, and copies of them."""

    chance = 0.4  # of each action, in each step

    def __init__(self, model: Any, seed: int, actions: list[str], rank: int, size: int) -> None:
        self.model, self.actions, self.rank, self.size, self.seed = model, actions, rank, size, seed
        self.dice = random.Random(seed)  # the same on all ranks
        self.kept: list[tuple[Tensor, Tensor]] = []

    def does(self, action: str) -> bool:
        return self.dice.random() < self.chance and action in self.actions

    def check_kept(self) -> None:
        for gradient, copy in self.kept:
            assert torch.equal(gradient, copy), "a gradient that was kept has changed"
