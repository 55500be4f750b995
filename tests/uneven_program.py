"""What a rank does in a case of uneven work: the loop that a user writes, and a record of what it saw."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import phalanx
from phalanx import DistributedDataParallel, SyncBatchNorm
from tests.uneven_case import Case, Net, loss_of
from tests.uneven_truth import LEARNING_RATE, Record, stops, value


def work(rank: int, cases: list[Case]) -> list[Record]:
    """Work through several cases in one world."""
    torch.set_num_threads(1)
    records = []
    for case in cases:
        try:
            records.append(_train(rank, case))
        except Exception as error:
            raise AssertionError(f"rank {rank} in {case}") from error
    return records


def _train(rank: int, case: Case) -> Record:
    ddp = DistributedDataParallel(Net(case, SyncBatchNorm))
    optimizer = torch.optim.SGD(ddp.parameters(), LEARNING_RATE, momentum=case.momentum)
    record, step = Record(), 0
    with ddp.join(divide_by_initial_world_size=case.whole):
        for i in range(len(case.sizes[rank])):
            synchronises = case.synchronises(rank, i)
            with _accumulating(ddp, case, synchronises):
                _micro_step(ddp, case, rank, i, record)
            if synchronises:
                record.gradients.append(_gradients(ddp.module))
                optimizer.step()
                optimizer.zero_grad()
                record.answers += [ask(call, rank, step) for call in case.calls]
                step += 1
    record.left = _gradients(ddp.module)
    record.parameters = {name: p.detach().clone() for name, p in ddp.module.named_parameters()}
    record.buffers = {name: b.clone() for name, b in ddp.module.named_buffers()}
    return record


def _micro_step(ddp: DistributedDataParallel, case: Case, rank: int, i: int, record: Record) -> None:
    skip = case.skips.get((rank, i))
    local = ddp.no_sync if case.around_backward and not case.synchronises(rank, i) else contextlib.nullcontext
    if skip == "before":
        with local():
            ddp.skip()
        return
    inputs, targets = case.batch(rank, i, case.dtype)
    if skip == "after":
        inputs.fill_(torch.nan)
    uses_side = torch.full((len(inputs),), float((rank, i) in case.branches), dtype=case.dtype)
    loss = loss_of(ddp(inputs, uses_side), targets, case.weighed)
    if case.middle:
        record.answers.append(ask(case.calls[0], rank, i % case.every))
    if skip == "after":
        with local():
            ddp.skip()
        return
    if case.weighed:
        loss = ddp.weigh(loss, len(inputs))
    with local():
        loss.backward()


@contextlib.contextmanager
def _accumulating(ddp: DistributedDataParallel, case: Case, synchronises: bool) -> Iterator[None]:
    """Keep a micro-step local in one of the ways people write it."""
    if case.around_backward:
        yield
    else:
        with ddp.accumulate(case.every, last=synchronises) as syncs:
            assert syncs == synchronises
            yield


def ask(call: str, rank: int, step: int) -> Any:
    """Call one of a user's collectives, and bring its answer into one form."""
    mine = value(rank, step)
    if call == "gather":
        parts = [torch.empty(2) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, torch.tensor([1.0, mine]))
        return {place: part[1].item() for place, part in enumerate(parts) if part[0]}
    if call == "objects":
        objects: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(objects, {"rank": rank, "value": mine})
        return {each["rank"]: each["value"] for each in objects if each}
    if call == "stop":
        return phalanx.stop_if(stops(mine))
    if call == "mean":
        return phalanx.mean(mine, rank + 1)
    tensor = torch.tensor([mine], dtype=torch.float64)
    dist.all_reduce(tensor, getattr(dist.ReduceOp, call.upper()))
    return tensor.item()


def _gradients(net: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}
