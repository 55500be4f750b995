"""What a transport must do: move the data of one agreed collective.

A transport knows nothing of tickets. It is given a `fence`: a call that returns when every rank of the
group has made it too. The first fence of a collective is where the ranks compare tickets, so a transport
may put data where only it writes before that fence, and must not read a peer's data before it.

Every rank calls the same method with tensors of the same dtype and sizes; the group has checked that.
All tensors are contiguous. Results are the same bits on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from phalanx.transport.reductions import Reduction


class Fence(Protocol):
    """Returns when every rank of the group has called it too."""

    @property
    def step(self) -> int:
        """The number of the coming fence, counted over all collectives of the group, equal on all ranks."""

    def __call__(self) -> object:
        """Wait for the others."""

    def on_host(self) -> None:
        """Wait for the ranks of this host only. Every rank of the group calls it equally often."""

    def look_for_lost(self, seconds: float = 2.0) -> None:
        """Raise what is known, or comes to be known within `seconds`, of a rank that is gone or has failed.

        After some seconds also what is known of a rank that is late, if the group's timeout has passed.
        """


class Transport(Protocol):
    """Moves tensors between the ranks of one group."""

    name: str
    """What people read in a header: "shared memory", "gloo", ..."""

    def reduce(self, tensor: torch.Tensor, reduction: Reduction, root: int, fence: Fence) -> None:
        """Combine `tensor` of all ranks, in rank order, into `tensor` of rank `root` (-1: of all)."""

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: Reduction, fence: Fence
    ) -> None:
        """Combine `inputs[r]` of all ranks into `output` of rank r, for every r."""

    def share(self, mine: torch.Tensor | None, outputs: Sequence[torch.Tensor | None], size: int, fence: Fence) -> None:
        """Copy `mine` of rank r (None: it gives nothing) into `outputs[r]` (None: not wanted) of every rank.

        `size` is the number of bytes that each giving rank gives.
        """

    def route(
        self, parts: Sequence[torch.Tensor | None], outputs: Sequence[torch.Tensor | None], largest: int, fence: Fence
    ) -> None:
        """Copy `parts[j]` of rank i into `outputs[i]` of rank j. `largest` is the longest part, in bytes."""

    def close(self) -> None:
        """Give back what the transport holds. No rank may be inside a call."""
