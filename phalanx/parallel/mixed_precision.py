"""mixed_precision=: forward and backward in a low precision, parameters and gradients in full.

Takes torch's _MixedPrecision configuration (param_dtype, buffer_dtype; reduce_dtype has no meaning here:
gradients are exchanged in full precision). Parameters are swapped for low-precision copies from the
forward to the end of backward. torch's names for the two copies are kept, other code reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.utils import _cast_forward_inputs
from torch.nn.parallel.distributed import _cast_buffers


class LowPrecision:
    """The low-precision side of one model. `parameters` are all that are not ignored."""

    def __init__(self, config: Any, module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._dtype: torch.dtype = config.param_dtype
        self._parameters = [p for p in parameters if p.is_floating_point()]
        self._kept: dict[int, torch.Tensor] = {}
        self._lowered = False
        if config.buffer_dtype is not None:
            _cast_buffers(config, module)
        for parameter in self._parameters:
            parameter._fp_param = parameter.data  # type: ignore[attr-defined]
            parameter._mp_param = parameter.data.to(self._dtype)  # type: ignore[attr-defined]

    def lower(self, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        """Swap the low-precision copies in, and cast the inputs of a forward."""
        for index, parameter in enumerate(self._parameters):
            if not self._lowered:
                parameter._fp_param = parameter.data  # type: ignore[attr-defined]
                if parameter.grad is not None:
                    self._kept[index] = parameter.grad
                    parameter.grad = None
            parameter._mp_param = parameter._fp_param.to(self._dtype)  # type: ignore[attr-defined]
            parameter.data = parameter._mp_param  # type: ignore[attr-defined]
        self._lowered = True
        return _cast_forward_inputs(self._dtype, *inputs, **kwargs)

    def restore(self) -> None:
        """Swap full precision back in; gradients follow, added to those that were there before."""
        if not self._lowered:
            return
        self._lowered = False
        for index, parameter in enumerate(self._parameters):
            gradient, parameter.grad = parameter.grad, None
            parameter.data = parameter._fp_param  # type: ignore[attr-defined]
            kept = self._kept.pop(index, None)
            if gradient is None:
                parameter.grad = kept
            elif kept is None:
                parameter.grad = gradient.to(parameter.dtype)
            else:
                parameter.grad = kept.add_(gradient)
