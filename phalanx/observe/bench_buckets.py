"""Time the reduction of gradient buckets by size: what a training step pays once backward has ended.

The call is the reducer's whole flush of a gradient that autograd has made: copied into shared memory, tickets,
reduction, the result as the parameter's gradient. Against it stands Gloo's all-reduce of a bucket of the same size,
which is what torch's reducer waits for (copying gradients into it, and its division by the number of ranks, are not
counted).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from phalanx.group.process_group import PhalanxProcessGroup, for_process_group
from phalanx.observe.bench_allreduce import BASELINE, SIZES, Contender, all_reduce_case, compare
from phalanx.observe.bench_ranks import Ranks
from phalanx.reduce.reducer import Reducer

OURS = "phalanx"


def measure_buckets(ranks: Ranks, quick: bool) -> list[dict[str, Any]]:
    """Measure buckets of every size and return a JSON entry for each. Collective."""
    group = for_process_group(ranks.group(OURS), "gradients")
    entries = []
    for size in SIZES:
        ranks.say(f"gradient bucket: {size} bytes")
        theirs = all_reduce_case(BASELINE, ranks.group(BASELINE), torch.empty(size // 4))
        entries.append(compare(ranks, size, [theirs, bucket_case(group, size)], quick))
    return entries


def bucket_case(group: PhalanxProcessGroup, size: int) -> Contender:
    """Return the flush of a reducer whose only gradient has `size` bytes. Collective."""
    parameter = nn.Parameter(torch.zeros(size // 4))
    reducer = Reducer(group, [("bucket", parameter)], frozenset(), [size], frozenset)
    reducer.build()
    gradient = torch.empty(size // 4)

    @torch.no_grad()
    def reduce() -> None:
        parameter.grad = None
        reducer.backward_begins()
        parameter.grad = gradient.detach()  # what autograd would have made
        reducer.flush({0})

    def result() -> torch.Tensor:
        return gradient if parameter.grad is None else parameter.grad

    return Contender(OURS, gradient, reduce, mean=True, result=result)
