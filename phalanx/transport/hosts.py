"""Ranks on several hosts, of which some share one: added up on each host first, then between hosts, then spread.

Which rank sums what between hosts is said in between.py. A tensor goes through in pieces. While the sums of a piece
travel, the next one is added up:

    round i     post piece i; wait for the sums of piece i - 2
    fence of the host
                add up a segment of piece i and begin its sum; copy the results of piece i - 2

Two slots per rank and three result areas, used in turn, are enough: a slot that is written in round i was read in
round i - 2, before the fence of round i - 1; a result area that is written in round i was copied in round i - 1, before
this round's fence.
"""

from __future__ import annotations

from collections.abc import Sequence
from mmap import mmap
from typing import Any

import torch
from torch.distributed import ReduceOp

from phalanx.transport.backend import Backend
from phalanx.transport.between import Between
from phalanx.transport.protocol import Fence
from phalanx.transport.reductions import Reduction, combine

SLOT_BYTES = 4 << 20
_SLOTS, _RESULTS = 2, 3
_AHEAD = 2  # pieces that a result may lag behind
_PAIRWISE = {
    ReduceOp.SUM: Reduction.SUM,
    ReduceOp.PRODUCT: Reduction.PRODUCT,
    ReduceOp.MIN: Reduction.MIN,
    ReduceOp.MAX: Reduction.MAX,
}


def arena_bytes(hosts: Sequence[Sequence[int]]) -> int:
    """How much shared memory any of the hosts needs. Only touched pages become real."""
    return (_SLOTS * max(map(len, hosts)) + _RESULTS) * SLOT_BYTES


class Hosts(Backend):
    """The transport over the hosts `hosts`, for `rank`.

    `arena` is what the ranks of this host share; `lane` is a c10d process group of this rank's lane, in the order of
    the hosts, or None; `group`, as of Backend, is one of all ranks, which moves what is not added up.
    """

    def __init__(self, group: Any, hosts: Sequence[Sequence[int]], rank: int, arena: mmap, lane: Any | None) -> None:
        super().__init__(group, "shared memory and gloo")
        self.between = Between(hosts, rank, None if lane is None else Backend(lane))
        self._place, self._here = self.between.place, len(self.between.here)
        self._arena = arena

    def _area(self, number: int, like: torch.Tensor) -> torch.Tensor:
        """One of the slots and result areas, for as many elements as `like` has."""
        return torch.frombuffer(self._arena, dtype=like.dtype, count=like.numel(), offset=number * SLOT_BYTES)

    def _slot(self, turn: int, place: int, like: torch.Tensor) -> torch.Tensor:
        return self._area(turn % _SLOTS * self._here + place, like)

    def _result(self, turn: int, like: torch.Tensor) -> torch.Tensor:
        return self._area(_SLOTS * self._here + turn % _RESULTS, like)

    def _reduce_here(self, total: torch.Tensor, op: Any, root: int, fence: Fence) -> None:
        flat = total.view(-1)
        pieces = flat.split(SLOT_BYTES // flat.element_size())
        lag = min(_AHEAD, len(pieces))
        works: list[Any] = [None] * len(pieces)
        for turn in range(len(pieces) + lag):
            done = turn - lag
            if turn < len(pieces):
                self._slot(turn, self._place, pieces[turn]).copy_(pieces[turn])
            if done >= 0 and works[done] is not None:
                self.between.wait(works[done], fence)
            fence.on_host()
            if turn < len(pieces):
                works[turn] = self._begin(turn, pieces[turn], op)
            if done >= 0:
                pieces[done].copy_(self._result(done, pieces[done]))

    def _begin(self, turn: int, piece: torch.Tensor, op: Any) -> Any:
        """Add up this rank's segment of a piece, where its result goes, and begin its reduction between hosts."""
        low, high = self.between.segment(piece.numel())
        if low == high:
            return None
        result = self._result(turn, piece)[low:high]
        combine([self._slot(turn, place, piece)[low:high] for place in range(self._here)], result, _PAIRWISE[op])
        return self.between.reduce(result, op)

    def close(self) -> None:
        """See Transport.close."""
        super().close()
        self.between.close()
