"""What one process would have in a case of uneven work: plain autograd in float64, nothing of Phalanx.

All batches that the ranks work on at the same time go through the model as one batch, so that a BatchNorm
sees them all; what each rank counts for is written out below.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.uneven_case import Case, Net, loss_of

LEARNING_RATE = 0.05


@dataclass
class Record:
    """What is compared: gradients before each step, answers of the user's collectives, and what is left."""

    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    left: dict[str, Tensor] = field(default_factory=dict)
    """Gradients that nobody has stepped with: of rounds that did not end, synchronised on leaving join()."""


def truth(case: Case) -> list[Record]:
    """Return what every rank must record."""
    net = Net(case).double()
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE, momentum=case.momentum)
    records = [Record() for _ in range(case.ranks)]
    steps = max(len(case.rounds(rank)) for rank in range(case.ranks))
    for step in range(steps):
        running = [rank for rank in range(case.ranks) if _runs(case, rank, step)]
        optimizer.zero_grad()
        _one_step(case, net, step, records)
        for rank in running:
            records[rank].gradients.append(_gradients(net))
        if running:
            optimizer.step()
            optimizer.zero_grad()
            for rank in running:
                records[rank].answers += [answer(call, running, step) for call in case.calls]
    for record in records:
        record.left = {name: gradient for name, gradient in _gradients(net).items() if gradient is not None}
        record.parameters = {name: p.detach().clone() for name, p in net.named_parameters()}
        record.buffers = {name: b.clone() for name, b in net.named_buffers()}
    return records


def _runs(case: Case, rank: int, step: int) -> bool:
    """Whether a rank has a round for this step that it synchronises."""
    rounds = case.rounds(rank)
    return step < len(rounds) and case.synchronises(rank, rounds[step][-1])


def _one_step(case: Case, net: Net, step: int, records: list[Record]) -> None:
    """Accumulate the gradient of one step: everything between two synchronisations, of all ranks."""
    counting: set[int] = set()
    items = 0
    for at in range(case.every):
        present = [
            (rank, case.rounds(rank)[step][at]) for rank in range(case.ranks)
            if step < len(case.rounds(rank)) and at < len(case.rounds(rank)[step])
        ]  # fmt: skip
        seen = [place for place in present if case.skips.get(place) != "before"]
        if case.middle:
            talking = [rank for rank, _ in seen]
            for rank in talking:
                records[rank].answers.append(answer(case.calls[0], talking, at))
        used = [place for place in seen if place not in case.skips]
        counting |= {rank for rank, _ in used}
        items += sum(case.sizes[rank][i] for rank, i in used)
        _micro_step(case, net, used, seen)
    count = items if case.weighed else case.ranks if case.whole else len(counting)
    for parameter in net.parameters():
        if parameter.grad is not None and count:
            parameter.grad /= count


def _micro_step(case: Case, net: Net, used: list[tuple[int, int]], seen: list[tuple[int, int]]) -> None:
    """Add the gradients of the batches that the ranks work on at the same time, as one batch."""
    if case.normalises and not sum(case.sizes[rank][i] for rank, i in seen):
        if seen:
            net.norm.num_batches_tracked += 1
        if case.weighed or not used:
            return
        net.norm.eval()  # of no values at all; the gradients are zeros
    if case.weighed:
        used = [(rank, i) for rank, i in used if case.sizes[rank][i]]
    if not used:
        return
    batches = [case.batch(rank, i, torch.float64) for rank, i in used]
    side = torch.cat([
        torch.full((len(inputs),), float(place in case.branches))
        for place, (inputs, _) in zip(used, batches, strict=True)
    ])  # fmt: skip
    outputs = net(torch.cat([inputs for inputs, _ in batches]), side.double())
    parts = outputs.split([len(inputs) for inputs, _ in batches])
    losses = [
        loss_of(part, targets, False) * (len(part) if case.weighed else 1)
        for part, (_, targets) in zip(parts, batches, strict=True)
    ]
    sum(losses).backward()
    net.norm.train()


def answer(call: str, ranks: list[int], step: int) -> Any:
    """What a collective gives in which exactly these ranks take part; see `uneven_program.ask`."""
    values = {rank: value(rank, step) for rank in ranks}
    if call in ("gather", "objects"):
        return values
    if call == "stop":
        return any(stops(v) for v in values.values())
    if call == "mean":
        return sum(v * (rank + 1) for rank, v in values.items()) / sum(rank + 1 for rank in values)
    return {"sum": sum, "max": max, "min": min, "product": math.prod}[call](values.values())


def value(rank: int, step: int) -> float:
    """What a rank brings to a collective."""
    return float((rank * 5 + step * 3) % 11 - 4)


def stops(brought: float) -> bool:
    return brought > 4


def difference(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> float:
    """The relative error of all tensors together: the norm of the difference by the norm of the truth."""
    if set(actual) != set(expected):
        return math.inf
    off = size = 0.0
    for name, true in expected.items():
        got = actual[name]
        true = torch.zeros_like(got).double() if true is None and got is not None else true
        if got is None or true is None:
            got = true = torch.zeros(()) if got is None and (true is None or not true.any()) else None
        if got is None or true is None or got.shape != true.shape:
            return math.inf
        off += float((got.double() - true.double()).square().sum())
        size += float(true.double().square().sum())
    return math.sqrt(off / size) if size else math.sqrt(off)


def _gradients(net: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}
