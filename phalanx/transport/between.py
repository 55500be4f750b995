"""What makes sums of one host sums of all hosts, where ranks of a host share memory.

The first ranks of every host, as many as the host with the fewest has, are its lanes: lane i adds up the i-th segment
of what the ranks of its host have posted, and sums that over all hosts, with the lanes i there, through a backend. So
a wire carries each host's sum once, in as many streams as there are lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp

from phalanx.errors import InternalError
from phalanx.transport.backend import Backend, wide_dtype
from phalanx.transport.protocol import Fence
from phalanx.transport.reductions import scale_into, segment, summation


def hosts_of(neighbours: Sequence[Sequence[int]]) -> list[list[int]]:
    """Group ranks by host, given for each rank which share its host, itself included; [] if they do not agree."""
    hosts = sorted({tuple(sorted(each)) for each in neighbours})
    agree = all(rank in each for rank, each in enumerate(neighbours))
    return list(map(list, hosts)) if agree and sum(map(len, hosts)) == len(neighbours) else []


def lanes_of(hosts: Sequence[Sequence[int]]) -> list[list[int]]:
    """The ranks of each lane, one of every host."""
    return [list(lane) for lane in zip(*hosts, strict=False)]


class Sum(NamedTuple):
    """What one rank adds up on its host: scales x parts. The sum of all hosts goes to `result`, times `left`."""

    parts: Sequence[torch.Tensor]
    scales: Sequence[float]
    result: torch.Tensor
    left: float

    def add(self) -> torch.Tensor:
        """Add up, in memory of a dtype that a backend sums: the result's own, or wider one."""
        wide = wide_dtype(self.result.dtype)
        if wide is self.result.dtype:
            parts, memory = self.parts, self.result
        else:
            parts, memory = [part.to(wide) for part in self.parts], torch.empty(self.result.shape, dtype=wide)
        for call in summation(parts, self.scales, memory):
            call()
        return memory


Begun = tuple[Any, torch.Tensor, torch.Tensor, float]
"""A sum on its way, where it comes to be, and what it is to be written to, times what."""


class Between:
    """One rank's part in making sums of its host sums of all `hosts`.

    `lane` is the backend of this rank's lane, in the order of the hosts; None if it is none.
    """

    def __init__(self, hosts: Sequence[Sequence[int]], rank: int, lane: Backend | None) -> None:
        self.hosts, self._lane = hosts, lane
        self.here = next(host for host in hosts if rank in host)
        self.place, self._lanes = self.here.index(rank), len(lanes_of(hosts))
        self.are_pairs = all(len(host) == 2 for host in hosts)

    def segment(self, count: int) -> tuple[int, int]:
        """Which of `count` elements, from the first to before the last, this rank adds up and sums between hosts."""
        return segment(count, self.place, self._lanes) if self._lane is not None else (0, 0)

    def reduce(self, tensor: torch.Tensor, op: Any) -> Any:
        """Begin to reduce a segment, of a dtype of wide_dtype(), over the lane, in place; wait() for what it returns.

        Every rank of the lane calls it, in one order.
        """
        if self._lane is None:
            raise InternalError("a rank that is no lane begins a reduction between hosts")
        return self._lane.begin(tensor, op)

    def wait(self, work: Any, fence: Fence) -> None:
        """Wait for a reduction that has been begun."""
        if self._lane is not None:
            self._lane.finish(work, fence)

    def sum(
        self, parts: Sequence[torch.Tensor], scales: Sequence[float], everywhere: Sequence[float], result: torch.Tensor
    ) -> Sum:
        """Return what begin() takes for a segment.

        `parts` are of the ranks here whose scale is not zero, `scales` theirs, `everywhere` those of all ranks. Equal
        ones are applied to the sum of all hosts, so that it is rounded once; narrow numbers travel as wider ones.
        """
        if len(set(everywhere)) == 1:
            return Sum(parts, [1.0] * len(scales), result, everywhere[0])
        return Sum(parts, scales, result, 1.0)

    def begin(self, sums: Sequence[Sum], are_there: bool) -> list[Begun]:
        """Add up on this host, and begin to sum that between hosts; if `are_there`, the results hold it, scaled."""
        begun = []
        for each in sums:
            memory = each.result if are_there else each.add()
            begun.append((self.reduce(memory, ReduceOp.SUM), memory, each.result, 1.0 if are_there else each.left))
        return begun

    def finish(self, begun: Sequence[Begun], fence: Fence) -> None:
        """Wait for sums, and write the results."""
        for work, total, result, left in begun:
            self.wait(work, fence)
            scale_into(total, left, result)

    def close(self) -> None:
        """Close the lane."""
        if self._lane is not None:
            self._lane.close()
