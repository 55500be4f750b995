"""Batch normalisation over the batches of all ranks: one all-gather in forward, one all-reduce in backward.

Forward. Each rank takes the count, mean and variance of its own batch, and the ranks hand these to one
another. The pooled moments follow by the rule of Chan, Golub and LeVeque (1979): the pooled variance is the
mean over all values of variance + (mean - pooled mean)^2. A rank with no values contributes zeros, and zeros
change nothing, so that a rank which only follows the collectives of the others need not know what they mean.

Within a rank, the deviations are from the float32 mean and the mean of the deviations corrects it: exact
where E[x^2] - E[x]^2 loses its digits, and two to six times as fast as `torch.var_mean` on the CPU. What is
summed is summed over the spatial dimensions first, then over the batch, because the CPU sums pairwise only
within one dimension. Between ranks all is in float64, whatever the input's type. Intermediate results as
large as the input are made piece by piece: fresh memory costs more than the arithmetic.

Backward. With d = input - mean and sums over all ranks, count n,

    gradient of input = scale x grad + slope x d + offset        scale  = weight / std
                                                                  slope  = -scale / std^2 x sum(grad x d) / n
                                                                  offset = -scale x sum(grad) / n

which is done in one buffer where no second derivative is asked for. Under `create_graph`, the same is made
of differentiable operations, and the moments, which forward took as numbers, become functions of the input
again. Both ways a backward is one all-reduce; the backward of a backward is two.

The gradients of weight and bias are of the local batch: to average them is the job of whoever does so for
all other parameters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F


class Moments(NamedTuple):
    """The moments of each channel over the batches of all ranks, in float64; NaN where there is no value."""

    mean: Tensor
    variance: Tensor
    """Biased: the sum of squared deviations divided by the count."""
    count: Tensor  # type: ignore[assignment]  # hides tuple.count
    """Values per channel on all ranks together; a tensor, because reading it would wait for the device."""


@torch.no_grad()
def moments_of_all_ranks(input: Tensor, group: dist.ProcessGroup) -> Moments:
    """Return the moments of all ranks' inputs, which may be empty; dimension 1 is that of the channels.

    Collective: every rank of the group, with the same number of channels.
    """
    channels, ranks = input.size(1), dist.get_world_size(group)
    local = _local_moments(input)
    parts = local.new_empty(ranks * local.numel())
    dist.all_gather_single(parts, local, group=group)
    means, variances, counts = parts.view(ranks, -1).t().split([channels, channels, 1])
    count = counts.sum()
    shares = counts[0] / count
    mean = means.mv(shares)
    apart = means - mean.unsqueeze(1)
    return Moments(mean, torch.addcmul(variances, apart, apart).mv(shares), count)


def normalize(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    moments: Moments,
    eps: float,
    group: dist.ProcessGroup,
) -> Tensor:
    """Normalise a batch with the moments of all ranks; differentiable, as a function of all ranks' inputs.

    At least one rank has a value. The backward is collective, if the input requires a gradient.
    """
    output: Tensor = _Normalize.apply(input, weight, bias, *moments, eps, group)  # type: ignore[no-untyped-call]
    return output


class _Normalize(Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        eps: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, variance, count)
        ctx.eps, ctx.group = eps, group
        # The kernel wants all but a half-precision input in one type.
        wide = _wide(input)
        scale, shift = (None if t is None else t.to(wide) for t in (weight, bias))
        return F.batch_norm(input, mean.to(wide), variance.to(wide), scale, shift, training=False, eps=eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd converts each to the type of what it is the gradient of.
        gradients = _differentiable_gradients if torch.is_grad_enabled() else _gradients
        of_input, of_weight, of_bias = gradients(ctx, grad)
        _, needs_weight, needs_bias, *others = ctx.needs_input_grad
        return of_input, of_weight if needs_weight else None, of_bias if needs_bias else None, *[None] * len(others)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of the input (None where not asked for), of the weight and of the bias."""
    input, weight, mean, variance, count = ctx.saved_tensors
    wide, rows = _wide(input), _rows_at_once(input)
    centre, buffer = _along(input, mean.to(wide)), torch.empty_like(input[:rows], dtype=wide)
    parts = []
    for x, dy in zip(input.split(rows), grad.split(rows), strict=True):
        product = torch.sub(x, centre, out=buffer[: len(x)]).mul_(dy)
        parts.append(torch.cat([_channel_sums(dy, wide), _channel_sums(product, wide)]))
    sums = _sum_of(parts)
    inverse = (variance + ctx.eps).rsqrt_()
    sum_grad, sum_product = sums.chunk(2)
    of_weight, of_bias = sum_product * inverse, sum_grad.clone()
    if not ctx.needs_input_grad[0]:
        return None, of_weight, of_bias
    dist.all_reduce(sums, group=ctx.group)
    coefficients = _coefficients(sum_grad, sum_product, weight, inverse, count)
    scale, slope, offset = (_along(input, t.to(wide)) for t in coefficients)
    of_input = torch.empty_like(input)
    for x, dy, dx in zip(input.split(rows), grad.split(rows), of_input.split(rows), strict=True):
        deviation = torch.sub(x, centre, out=buffer[: len(x)])
        torch.add(deviation.mul_(slope).addcmul_(dy, scale), offset, out=dx)
    return of_input, of_weight, of_bias


def _differentiable_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return what `_gradients` returns, made of operations that autograd knows."""
    input, weight, mean, variance, count = ctx.saved_tensors
    wide = _wide(input)
    if ctx.needs_input_grad[0]:
        mean, variance = _MomentsOfInput.apply(  # type: ignore[no-untyped-call]
            input, mean, variance, count, ctx.group
        )
    deviation = input - _along(input, mean.to(wide))
    sums = torch.cat([_channel_sums(grad, wide), _channel_sums(deviation * grad, wide)]).double()
    inverse = (variance + ctx.eps).rsqrt()
    sum_grad, sum_product = sums.chunk(2)
    of_weight, of_bias = sum_product * inverse, sum_grad
    if not ctx.needs_input_grad[0]:
        return None, of_weight, of_bias
    sum_grad, sum_product = _AllReduce.apply(sums, ctx.group).chunk(2)  # type: ignore[no-untyped-call]
    coefficients = _coefficients(sum_grad, sum_product, weight, inverse, count)
    scale, slope, offset = (_along(input, t.to(wide)) for t in coefficients)
    return scale * grad + slope * deviation + offset, of_weight, of_bias


def _coefficients(
    sum_grad: Tensor, sum_product: Tensor, weight: Tensor | None, inverse: Tensor, count: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return scale, slope and offset of each channel (see above) from the sums over all ranks."""
    scale = inverse if weight is None else inverse * weight
    share = scale / count
    return scale, -share * inverse.square() * sum_product, -share * sum_grad


class _MomentsOfInput(Function):
    """Return moments as they are, and make them functions of all ranks' inputs to autograd."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, mean: Tensor, variance: Tensor, count: Tensor, group: dist.ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        mean, variance = mean.clone(), variance.clone()
        ctx.save_for_backward(input, mean, count)
        ctx.group = group
        return mean, variance

    @staticmethod
    def backward(ctx: Any, grad_mean: Tensor, grad_variance: Tensor) -> tuple[Tensor | None, ...]:
        input, mean, count = ctx.saved_tensors
        wide = _wide(input)
        both = torch.cat([grad_mean, grad_variance])
        sums = _AllReduce.apply(both, ctx.group) / count  # type: ignore[no-untyped-call]
        grad_mean, grad_variance = (_along(input, t.to(wide)) for t in sums.chunk(2))
        return grad_mean + 2 * grad_variance * (input - _along(input, mean.to(wide))), None, None, None, None


class _AllReduce(Function):
    """Sum over the ranks. What each rank does with the sum counts, so the backward is a sum as well."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllReduce.apply(grad, ctx.group), None  # type: ignore[no-untyped-call]


def _local_moments(input: Tensor) -> Tensor:
    """Return the means, variances and count of this rank's batch in one vector; zeros if it is empty."""
    count = input.numel() // input.size(1)
    divisor, wide, rows = max(count, 1), _wide(input), _rows_at_once(input)
    shift = _channel_sums(input, wide) / divisor
    centre, buffer = _along(input, shift), torch.empty_like(input[:rows], dtype=wide)
    parts = []
    for x in input.split(rows):
        deviation = torch.sub(x, centre, out=buffer[: len(x)])
        parts.append(torch.cat([_channel_sums(deviation, wide), _channel_sums(deviation.square_(), wide)]))
    correction, variance = (_sum_of(parts) / divisor).chunk(2)
    variance.addcmul_(correction, correction, value=-1).clamp_(min=0)
    return torch.cat([correction.add_(shift), variance, variance.new_full((1,), count)])


def _rows_at_once(input: Tensor) -> int:
    """How many items of a batch are worked on at once: the intermediate results stay in the cache."""
    return max(1, _ELEMENTS_AT_ONCE * len(input) // max(1, input.numel()))


_ELEMENTS_AT_ONCE = 2**17


def _sum_of(parts: list[Tensor]) -> Tensor:
    """Return the sum in float64, as a tensor of its own."""
    if len(parts) == 1:
        return parts[0].to(torch.float64, copy=True)
    return torch.stack(parts).sum(0, dtype=torch.float64)


def _channel_sums(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dim() > 2:
        tensor = tensor.sum(tuple(range(2, tensor.dim())), dtype=dtype)
    return tensor.sum(0, dtype=dtype)


def _along(input: Tensor, channels: Tensor) -> Tensor:
    """Return one number per channel in a shape that broadcasts over `input`."""
    return channels.view(-1, *[1] * (input.dim() - 2))


def _wide(input: Tensor) -> torch.dtype:
    """The type in which the elements are computed: at least float32."""
    return torch.promote_types(input.dtype, torch.float32)
