"""What is compared: a table from a name to a way of wrapping the model.

Add a variant: write a function that takes the module and a process group and returns what the
training loop calls, and add one line to `VARIANTS`. The function must be importable by name
(no lambda), because the ranks are fresh processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from phalanx.parallel.agree import clip_grad_norm_
from phalanx.parallel.ddp import DistributedDataParallel as PhalanxDDP

BASELINE = "torch"
OURS = "phalanx"
LOCAL = "local"


@dataclass(frozen=True)
class Variant:
    """One way of training a model: `wrap(module, group)`, over a group of `backend`.

    `clip(parameters, max_norm)` is called after each backward where gradients are to be clipped.
    `synchronises` says that gradients must come out as the mean over the ranks, which is checked.
    """

    name: str
    title: str
    backend: str
    wrap: Callable[[nn.Module, ProcessGroup], nn.Module]
    synchronises: bool = True
    clip: Callable[[Iterable[Tensor], float], Tensor] = nn.utils.clip_grad_norm_


def _plain(module: nn.Module, group: ProcessGroup) -> nn.Module:
    return module


def _torch(module: nn.Module, group: ProcessGroup) -> nn.Module:
    return TorchDDP(module, process_group=group)


def _torch_view(module: nn.Module, group: ProcessGroup) -> nn.Module:
    return TorchDDP(module, process_group=group, gradient_as_bucket_view=True)


def _phalanx(module: nn.Module, group: ProcessGroup) -> nn.Module:
    return PhalanxDDP(module, process_group=group)


VARIANTS: dict[str, Variant] = {
    v.name: v
    for v in (
        Variant(LOCAL, "no synchronisation", "gloo", _plain, synchronises=False),
        Variant(BASELINE, "torch DDP over Gloo", "gloo", _torch),
        Variant("torch-view", "torch DDP over Gloo, gradients as bucket views", "gloo", _torch_view),
        Variant(OURS, "Phalanx DDP", "phalanx", _phalanx),
        Variant("phalanx-clip", "Phalanx DDP and its clip_grad_norm_", "phalanx", _phalanx, clip=clip_grad_norm_),
    )
}
