"""Time `torch.distributed.all_reduce` by size, one group per backend, in turn, in the same processes.

A call is what a program pays: an ordinary float32 tensor in, the same tensor with the sum out, so
copies into and out of a transport's own memory count. Rounds and start line as for step time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.errors import InternalError
from phalanx.observe.bench_figures import order_of_round, ratio, spread
from phalanx.observe.bench_ranks import Ranks

KIB, MIB = 1 << 10, 1 << 20
SIZES = (KIB, 4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 25 * MIB)
ROUNDS, QUICK_ROUNDS = 30, 3
MOST_CALLS, LEAST_CALLS = 40, 3  # timed in one block
BLOCK_BYTES = 16 * MIB
BASELINE = "gloo"
TOLERANCE = 1e-6  # relative


@dataclass(frozen=True)
class Contender:
    """A way to reduce: `reduce()` replaces `tensor` by the sum over the ranks, or by their `mean`.

    Where the result is not in `tensor` itself, `result()` gives it.
    """

    name: str
    tensor: Tensor
    reduce: Callable[[], Any]
    mean: bool = False
    result: Callable[[], Tensor] | None = None


def measure_allreduce(ranks: Ranks, backends: Sequence[str], quick: bool) -> list[dict[str, Any]]:
    """Measure every size on a group of each backend and return a JSON entry for each. Collective."""
    entries = []
    for size in SIZES:
        ranks.say(f"all-reduce: {size} bytes")
        tensor = torch.empty(size // 4)
        contenders = [all_reduce_case(backend, ranks.group(backend), tensor) for backend in backends]
        entries.append(compare(ranks, size, contenders, quick))
    return entries


def all_reduce_case(name: str, group: dist.ProcessGroup, tensor: Tensor) -> Contender:
    """Return the plain all-reduce of `tensor` through `group`."""
    return Contender(name, tensor, lambda: dist.all_reduce(tensor, group=group))


def compare(ranks: Ranks, size: int, contenders: Sequence[Contender], quick: bool) -> dict[str, Any]:
    """Check the contenders, time them in turn and return the JSON entry of `size` bytes. Collective."""
    for contender in contenders:
        _check(ranks, contender)
    calls = min(MOST_CALLS, max(LEAST_CALLS, BLOCK_BYTES // size))
    rounds = QUICK_ROUNDS if quick else ROUNDS
    mine: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        for place in order_of_round(number, len(contenders)):
            contender = contenders[place]
            mine[contender.name].append(_block(ranks, contender, calls))
    times = {name: ranks.slowest(seconds) for name, seconds in mine.items()}
    return {
        "bytes": size,
        "calls_per_block": calls,
        "rounds": rounds,
        "seconds": {name: spread(seconds) for name, seconds in times.items()},
        "speedup": {n: ratio(times[BASELINE], times[n]) for n in times if n != BASELINE},
    }


def _block(ranks: Ranks, contender: Contender, calls: int) -> float:
    """Make one untimed call and `calls` timed ones; return seconds per call. Collective."""
    reduce = contender.reduce
    contender.tensor.fill_(ranks.rank + 1)
    reduce()
    ranks.start_line()
    begin = time.perf_counter()
    for _ in range(calls):
        reduce()
    return (time.perf_counter() - begin) / calls


def _check(ranks: Ranks, contender: Contender) -> None:
    """Raise InternalError, on every rank, unless rank-dependent values come out right. Collective."""
    places = torch.arange(contender.tensor.numel()) % 1000
    contender.tensor.copy_(places + ranks.rank)
    contender.reduce()
    expected = (places * ranks.size + sum(range(ranks.size))).float()
    if contender.mean:
        expected /= ranks.size
    reduced = contender.tensor if contender.result is None else contender.result()
    wrong = int(((reduced - expected).abs() > TOLERANCE * expected).sum())
    if ranks.slowest([float(wrong)]) != [0.0]:
        raise InternalError(
            f"[rank {ranks.rank}] {contender.name}: reducing {places.numel()} floats is wrong in {wrong} "
            f"elements on this rank, so its speed means nothing"
        )
