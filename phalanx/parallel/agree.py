"""Small agreements between ranks: early stop, exact means, clipping that refuses unsynchronised gradients."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import cast

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_ as torch_clip_grad_norm_
from torch.nn.utils import get_total_norm

from phalanx.errors import MisuseError
from phalanx.group.process_group import PhalanxProcessGroup, for_process_group
from phalanx.reduce.clipping import clip_together
from phalanx.reduce.roster import pending_among

_PAIR = struct.Struct("<dd")


def stop_if(condition: object, group: dist.ProcessGroup | None = None) -> bool:
    """Return True on every rank as soon as `condition` is true on one.

    Collective: every rank of the group calls it equally often. A rank that has left join() counts as False.
    """
    ours = _group(group)
    if ours is None:
        return bool(condition)
    answers = ours.exchange(b"\x01" if condition else b"\x00", "phalanx.stop_if()")
    return b"\x01" in answers


def mean(value: float | torch.Tensor, n: float = 1, group: dist.ProcessGroup | None = None) -> float:
    """Return the mean over all items of all ranks, where `value` is this rank's mean over its `n` items.

    Collective. Computed in float64; a rank with n = 0 contributes nothing, whatever its value (NaN too).
    The mean of no items at all is NaN.
    """
    number = float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
    mine = _PAIR.pack(number * n if n else 0.0, float(n))
    ours = _group(group)
    answers = [mine] if ours is None else ours.exchange(mine, "phalanx.mean()")
    pairs = [_PAIR.unpack(answer) for answer in answers if answer]
    items = sum(count for _, count in pairs)
    return sum(total for total, _ in pairs) / items if items else float("nan")


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip the norm of gradients as torch.nn.utils.clip_grad_norm_ does, once they are synchronised.

    Returns the norm before clipping, the same on every rank. Where ranks of one host share their gradients, each does
    its part of the work, and they go on sharing. Every rank calls it, as often as the others: it is a collective
    then, unless `max_norm` is infinite, which only asks for the norm. Raises MisuseError, naming the parameters, if
    some gradients have been produced and not synchronised yet.
    """
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    names = pending_among(listed)
    if names:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise MisuseError(
            f"clip_grad_norm_ on gradients that are not synchronised yet: {shown}",
            "clip after the backward that synchronises, outside of no_sync(); in accumulation, only on its last "
            "micro-batch (`if syncs:` in `with ddp.accumulate(every=k) as syncs:`)",
            dist.get_rank() if dist.is_initialized() else None,
        )  # fmt: skip
    norm = clip_together(listed, max_norm, norm_type, error_if_nonfinite)
    if norm is not None:
        return norm
    if max_norm == float("inf"):
        gradients = [parameter.grad for parameter in listed if parameter.grad is not None]
        return get_total_norm(gradients, norm_type, error_if_nonfinite, foreach)
    return torch_clip_grad_norm_(listed, max_norm, norm_type, error_if_nonfinite, foreach)


def _group(group: dist.ProcessGroup | None) -> PhalanxProcessGroup | None:
    if group is None:
        if not dist.is_initialized():
            return None
        group = cast(dist.ProcessGroup, dist.group.WORLD)
    return for_process_group(group, "agreements")
