"""Buffers of every form are those of rank 0 in each training forward, however they change in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.group.dtypes import CODES
from phalanx.testing import run
from tests.threads.small_models import ddp

DTYPES = [dtype for dtype in CODES if dtype is not torch.complex32]


class Holder(nn.Module):
    """A layer with buffers, which forward leaves alone."""

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def bytes_of(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    raw = torch.arange(count * dtype.itemsize, dtype=torch.int64).add_(7 * rank + 1) % 100
    return raw.ne(50 + rank).to(dtype) if dtype is torch.bool else raw.to(torch.uint8).view(dtype)


def step(model: Any) -> None:
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()


def test_every_dtype_and_form_at_once() -> None:
    def program(rank: int) -> dict[str, Tensor]:
        made = {str(dtype).replace("torch.", "of_"): bytes_of(rank, 5, dtype) for dtype in DTYPES}
        made |= {
            "number": torch.tensor(rank + 0.5),
            "nothing": torch.empty(0, 3),
            "columns": torch.full((3, 4), float(rank)).t(),
            "every_second": torch.arange(10.0).add_(rank)[::2],
            "images": torch.full((2, 3, 4, 4), float(rank)).to(memory_format=torch.channels_last),
            "large": torch.full((300_000,), rank, dtype=torch.int64),
        }
        model = ddp(Holder(**{name: buffer.clone() for name, buffer in made.items()}))
        for name, buffer in model.module.named_buffers():
            buffer.copy_(made[name])  # wrapping has made them equal
        if rank == 0:
            before = {name: buffer.clone() for name, buffer in model.module.named_buffers()}
        step(model)
        if rank == 0:
            assert all(same(before[name], buffer) for name, buffer in model.module.named_buffers())
        return dict(model.module.named_buffers())

    first, *others = run(3, program)
    assert len(first) == len(DTYPES) + 6
    for name, buffer in first.items():
        assert all(same(buffer, other[name]) for other in others), name


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit: some of these bytes are NaN."""
    return a.shape == b.shape and torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def replaced(model: Any, rank: int) -> None:
    model.module.b = torch.full((4, 4), 10.0 + rank)


def other_data(model: Any, rank: int) -> None:
    model.module.b.data = torch.full((4, 4), 10.0 + rank)


def other_dtype(model: Any, rank: int) -> None:
    model.module.b.data = torch.full((4, 4), 10.0 + rank / 3, dtype=torch.float64)


def other_shape(model: Any, rank: int) -> None:
    model.module.b.resize_(2, 3).fill_(10.0 + rank)


def other_data_and_shape(model: Any, rank: int) -> None:
    model.module.b.data = torch.full((7,), 10.0 + rank)


def transposed(model: Any, rank: int) -> None:
    model.module.b.copy_(torch.arange(16.0).view(4, 4).add_(10.0 + rank)).t_()


def grown(model: Any, rank: int) -> None:
    model.module.b = torch.full((600, 600), 10.0 + rank)


OF_OTHER_FORM = [other_dtype, other_shape, other_data_and_shape, grown]
CHANGES = [(change, "all") for change in (replaced, other_data, transposed, *OF_OTHER_FORM)]
CHANGES += [(change, "not rank 0") for change in (replaced, other_data, transposed)]


@pytest.mark.parametrize(("change", "who"), CHANGES)
def test_buffers_that_change_between_steps(change: Callable[[Any, int], None], who: str) -> None:
    def program(rank: int) -> list[Tensor]:
        model, seen = ddp(Holder(b=torch.zeros(4, 4), c=torch.zeros(3, dtype=torch.int64))), []
        for at in range(4):
            if at == 2 and (who == "all" or rank):
                change(model, rank)
            model.module.c.fill_(10 * at + rank)
            step(model)
            seen += [model.module.b.clone(), model.module.c.clone()]
        return seen

    first, *others = run(3, program)
    assert [c.tolist() for c in first[1::2]] == [[10 * at] * 3 for at in range(4)]
    assert first[4].max() == (0.0 if who == "not rank 0" else 25.0 if change is transposed else 10.0)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_conjugate_and_negated_views() -> None:
    def program(rank: int) -> list[Tensor]:
        value = torch.tensor([1 + 2j, 3 - 4j]) * (rank + 1)
        model = ddp(Holder(conj=value.clone().conj(), neg=value.clone().conj().imag, plain=value.clone()))
        step(model)
        return [buffer.resolve_conj().resolve_neg() for buffer in model.module.buffers()]

    for conj, neg, plain in run(2, program):
        assert conj.tolist() == [1 - 2j, 3 + 4j] and neg.tolist() == [-2.0, 4.0] and plain.tolist() == [1 + 2j, 3 - 4j]


def test_a_forward_that_evaluates_sees_the_buffers_of_rank_zero_after_the_step() -> None:
    def program(rank: int) -> list[float]:
        model, seen = ddp(Holder(b=torch.zeros(()))), []
        for at in range(3):
            step(model)
            model.module.b.fill_(100.0 * at + rank)
            step(model)  # from here on it is rank 0's
            model.eval()
            if rank == at % 2:  # on one rank alone
                model(torch.ones(1, 2))
            seen.append(model.module.b.item())
            model.train()
        return seen

    assert run(2, program) == [[0.0, 100.0, 200.0]] * 2
