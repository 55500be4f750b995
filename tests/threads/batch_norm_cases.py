"""Batches, their splits over ranks, and the one BatchNorm over a whole batch that they are compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.nn.sync_batchnorm import SyncBatchNorm
from phalanx.testing import generator, run

FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class OneBatchNorm(nn.modules.batchnorm._BatchNorm):
    """The truth: torch's BatchNorm, for an input of any number of dimensions."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


@dataclass(frozen=True)
class Case:
    """A batch, how it is split, and the layer's options."""

    sizes: tuple[int, ...]
    features: tuple[int, ...] = (3, 4, 5)
    dtype: torch.dtype = torch.float64
    format: str = "contiguous"
    affine: bool = True
    bias: bool = True
    tracked: bool = True
    momentum: float | None = 0.1
    steps: int = 1
    seed: int = 0
    shift: float = 1.0

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The input of all ranks, and the gradient that comes back."""
        shape, random = (sum(self.sizes), *self.features), generator(100 * self.seed + step)
        whole, grad = (torch.randn(shape, dtype=torch.float64, generator=random) for _ in range(2))
        return self._laid_out(whole * 2 + self.shift), self._laid_out(grad)

    def part(self, whole: Tensor, rank: int) -> Tensor:
        start = sum(self.sizes[:rank])
        return whole[start : start + self.sizes[rank]]

    def layer(self, kind: type[nn.Module]) -> nn.Module:
        """A layer with parameters of its own, in float32 for the half-precision types."""
        dtype = torch.promote_types(self.dtype, torch.float32)
        layer = kind(
            self.features[0], 1e-3, self.momentum, self.affine, self.tracked, dtype=dtype, bias=self.bias
        )  # fmt: skip
        random = generator(self.seed)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(1 + torch.rand(parameter.shape, generator=random))
        return layer

    def _laid_out(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self.dtype)
        if self.format == "transposed":
            return tensor.transpose(1, -1).contiguous().transpose(1, -1)
        return tensor.contiguous(memory_format=FORMATS[self.format])


def errors_on_a_rank(rank: int, case: Case) -> dict[str, float]:
    """The relative errors of this rank against one BatchNorm over the whole batch, over all steps."""
    layer, truth = case.layer(SyncBatchNorm), case.layer(OneBatchNorm)
    errors: dict[str, float] = {}
    for step in range(case.steps):
        whole, grad = case.batch(step)
        input = case.part(whole, rank).clone().requires_grad_()
        whole.requires_grad_()
        output, expected = layer(input), truth(whole)
        output.backward(case.part(grad, rank))
        expected.backward(grad)
        assert output.dtype == expected.dtype
        errors[f"output {step}"] = relative(output, case.part(expected, rank), expected)
        # The gradient is what is left of grad x weight / std, which may be next to nothing.
        size = whole.grad.norm().clamp(min=1e-3 * grad.norm())
        errors[f"input's gradient {step}"] = relative(input.grad, case.part(whole.grad, rank), size)
    for name, parameter in truth.named_parameters():
        mine = layer.get_parameter(name).grad.clone()
        dist.all_reduce(mine)
        errors[name] = relative(mine, parameter.grad)
    assert dict(layer.named_buffers()).keys() == dict(truth.named_buffers()).keys()
    for name, buffer in truth.named_buffers():
        errors[name] = relative(layer.get_buffer(name), buffer)
    return errors


def relative(actual: Tensor, expected: Tensor, scale: Tensor | None = None) -> float:
    """The norm of the difference over that of `scale` (`expected`, where not given)."""
    assert actual.shape == expected.shape
    size = (expected if scale is None else scale).double().norm()
    difference = (actual.double() - expected.double()).norm()
    return (difference / size).item() if difference or size.isnan() else 0.0


def check(case: Case) -> None:
    for rank, errors in enumerate(run(len(case.sizes), errors_on_a_rank, case)):
        # The statistics are in float32 where the batch is in half precision.
        limit = TOLERANCE[case.dtype]
        limits = {name: min(1e-6, limit) if name.startswith("running") else limit for name in errors}
        wrong = {name: error for name, error in errors.items() if not error <= limits[name]}
        assert not wrong, f"on rank {rank} of {case}"
