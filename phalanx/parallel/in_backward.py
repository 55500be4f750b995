"""Optimizers that run inside backward (torch.distributed.optim._apply_optimizer_in_backward).

They step when a parameter's gradient has been accumulated, which is before it is synchronised. So their own
hooks are taken off, and they step when the synchronisation has finished; the gradients are then None, as
their users expect.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

# Whose parameters have such optimizers has imported it; by itself it costs a second, for FSDP comes along.
_TORCH_MODULE = "torch.distributed.optim.apply_optimizer_in_backward"


class InBackwardOptimizers:
    """The parameters of one model whose optimizers step in backward."""

    def __init__(self) -> None:
        self._parameters: list[torch.nn.Parameter] = []

    def take_over(self, parameters: Iterable[torch.nn.Parameter]) -> bool:
        """Take the optimizers' own hooks off, and return whether there are any.

        Called at the first forward: they may come after wrapping.
        """
        for parameter in parameters:
            if hasattr(parameter, "_in_backward_optimizers"):
                for handle in sys.modules[_TORCH_MODULE].param_to_optim_hook_handle_map.pop(parameter, ()):
                    handle.remove()
                self._parameters.append(parameter)
        return bool(self._parameters)

    def step(self) -> None:
        """Step them on the synchronised gradients, which are then dropped."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
                    optimizer.step()
                parameter.grad = None
