"""The transport of a group of one rank: nothing moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.transport.protocol import Fence
from phalanx.transport.reductions import Reduction, combine


class Alone:
    """See Transport; every output is this rank's own input."""

    name = "one rank"

    def reduce(self, tensor: torch.Tensor, reduction: Reduction, root: int, fence: Fence) -> None:
        """See Transport.reduce."""
        fence()

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: Reduction, fence: Fence
    ) -> None:
        """See Transport.reduce_scatter."""
        fence()
        combine([inputs[0].view(-1)], output.view(-1), reduction)

    def share(self, mine: torch.Tensor | None, outputs: Sequence[torch.Tensor | None], size: int, fence: Fence) -> None:
        """See Transport.share."""
        fence()
        _copy(mine, outputs[0])

    def route(
        self,
        parts: Sequence[torch.Tensor | None],
        outputs: Sequence[torch.Tensor | None],
        largest: int,
        fence: Fence,
    ) -> None:
        """See Transport.route."""
        fence()
        _copy(parts[0], outputs[0])

    def close(self) -> None:
        """See Transport.close."""


def _copy(source: torch.Tensor | None, target: torch.Tensor | None) -> None:
    if source is not None and target is not None:
        target.view(-1).copy_(source.view(-1))
