"""Time the reduction of gradient buckets by size: what a training step pays once backward has ended.

Phalanx's large gradients already lie where the transport reads them, so nothing is packed or copied in; small
ones (up to 32 KiB on average) are copied into a slot, which is timed here too. The call is the reducer's whole
flush: tickets, reduction, commit, results back in every gradient. Against it stands Gloo's all-reduce of a bucket
of the same size, which is what torch's reducer waits for (its division by the number of ranks is not counted).
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
    """Return the flush of a reducer whose only gradient has `size` bytes and is in its place. Collective."""
    parameter = nn.Parameter(torch.zeros(size // 4))
    reducer = Reducer(group, [("bucket", parameter)], frozenset(), [size], frozenset)
    reducer.build()
    (gradient,) = reducer.show_only([0])
    return Contender(OURS, gradient, lambda: reducer.flush({0}), mean=True)
