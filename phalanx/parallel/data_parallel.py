"""DataParallel: one process, a replica of the model on each device, gradients summed into the one model.

Forward splits the batch (scatter.py), copies the model (replicate.py), runs the replicas in threads (crew.py)
and puts their outputs together. Backward needs nothing: the copies are operations that autograd knows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch._utils import _get_all_device_indices, _get_available_device_type, _get_device_index
from torch.nn.parallel import DataParallel as TorchDataParallel
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.nn.parallel.data_parallel import _check_balance

from phalanx.errors import MisuseError
from phalanx.parallel.crew import Crew, Replicas, run_replicas
from phalanx.parallel.replicate import replicate
from phalanx.parallel.scatter import gather, scatter

Device = int | str | torch.device
T = TypeVar("T", bound=nn.Module)


class DataParallel(TorchDataParallel[T]):
    """Run `module` on parts of the batch, each on a device of its own, within this process.

    Arguments and attributes are those of `torch.nn.DataParallel`, whose subclass it is: `device_ids` (all
    accelerators, if None), `output_device` (the first), `dim` (that of the batch). Besides, devices may be CPUs,
    `device_ids=["cpu", "cpu"]`, and `replicas=n` means n replicas on the device where the module is. Without an
    accelerator and without either, forward is the module's own.

    The gradient is that of the module on the whole batch, up to rounding; so is the output of a model whose
    items do not depend on each other. BatchNorm takes each replica's part for itself, and keeps the running
    statistics of replica 0; `phalanx.SyncBatchNorm` takes the whole batch. What a replica changes otherwise is
    lost with it: attributes, and everything but buffers and parameters of replica 0.

    Forward raises MisuseError for tensors that cannot be split alike and for outputs that cannot be put together;
    DistributedDataParallel does for a module with a DataParallel inside. An error in a replica has its type, and
    says in which replica.
    """

    def __init__(
        self,
        module: T,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        *,
        replicas: int | None = None,
    ) -> None:
        nn.Module.__init__(self)
        _refuse_wrappers(module)
        self.module = module
        self.dim = dim
        self.device_ids = _devices(module, device_ids, replicas)
        if not self.device_ids:
            return
        self.src_device_obj = _device(self.device_ids[0])
        self.output_device = self.device_ids[0] if output_device is None else _as_torch_has_it(output_device)
        if self.src_device_obj.type == "cuda" and all(isinstance(device, int) for device in self.device_ids):
            _check_balance(self.device_ids)
        if len(self.device_ids) == 1:
            self.module.to(self.src_device_obj)
        if any(part._compiled_call_impl is not None or "_orig_mod" in part._modules for part in module.modules()):
            warnings.warn(
                "DataParallel runs the replicas of a compiled module uncompiled; DistributedDataParallel keeps it",
                stacklevel=2,
            )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the replicas on their parts of the inputs and return their outputs as one, on `output_device`."""
        if not self.device_ids:
            return self.module(*inputs, **kwargs)
        if torch.compiler.is_compiling():
            return _uncompiled(self._forward_of_replicas, inputs, kwargs)
        return self._forward_of_replicas(inputs, kwargs)

    def _forward_of_replicas(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.autograd.profiler.record_function("DataParallel.forward"):
            self._check_call()
            split, split_kwargs = self.scatter(inputs, kwargs, self.device_ids)
            if not split and not split_kwargs:
                split, split_kwargs = ((),), ({},)
            if len(self.device_ids) == 1:
                return self.module(*split[0], **split_kwargs[0])
            replicas = self.replicate(self.module, self.device_ids[: len(split)])
            outputs = self.parallel_apply(replicas, split, split_kwargs)
            if isinstance(replicas, Replicas):
                replicas.hand_back_buffers()
            return self.gather(outputs, self.output_device)

    def _check_call(self) -> None:
        for tensor in chain(self.module.parameters(), self.module.buffers()):
            if tensor.device != self.src_device_obj:
                raise RuntimeError(
                    "module must have its parameters and buffers "
                    f"on device {self.src_device_obj} (device_ids[0]) but found one of "
                    f"them on device: {tensor.device}. Instead: module.to({str(self.src_device_obj)!r}) first"
                )

    # -- the steps of forward, which subclasses may replace -------------------------------------------

    def replicate(self, module: T, device_ids: Sequence[Device]) -> list[T]:
        """Return a replica of `module` for each device; see phalanx.parallel.replicate."""
        copies: Any = replicate(module, [_device(device) for device in device_ids])
        return copies  # type: ignore[no-any-return]  # a list of T, which carries its crew with it

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Device]
    ) -> tuple[tuple[Any, ...], tuple[dict[str, Any], ...]]:
        """Return the positional and the keyword arguments of each replica; see phalanx.parallel.scatter."""
        parts = scatter(inputs, kwargs or {}, [_device(device) for device in device_ids], self.dim)
        return tuple(part for part, _ in parts), tuple(part for _, part in parts)

    def parallel_apply(self, replicas: Sequence[T], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
        """Run the replicas in threads and return their outputs."""
        given: Sequence[nn.Module] = replicas
        crew = given if isinstance(given, Replicas) else Replicas(Crew(len(given)), given, [])
        return run_replicas(crew, inputs, kwargs, [_device(device) for device in self.device_ids[: len(given)]])

    def gather(self, outputs: Any, output_device: Device) -> Any:
        """Return the outputs of the replicas as one; see phalanx.parallel.scatter."""
        return gather(outputs, _device(output_device), self.dim)

    # -- state ----------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "module" not in self.__dict__.get("_modules", ()):
                raise
            return getattr(self._modules["module"], name)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of the wrapped or of the plain model (with or without the `module.` prefix)."""
        if state_dict and not any(key.startswith("module.") for key in state_dict):
            state_dict = {f"module.{key}": value for key, value in state_dict.items()}
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


@_disable_dynamo
def _uncompiled(forward: Callable[..., Any], *arguments: Any) -> Any:
    """Call `forward` outside of the graph that torch.compile is making: it runs threads."""
    return forward(*arguments)


def _refuse_wrappers(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, (TorchDistributedDataParallel, TorchDataParallel)):
            where = f"its module {name!r}" if name else "its module"
            raise MisuseError(
                f"DataParallel of a {type(part).__name__} ({where}): each splits the batch",
                f"wrap the plain model, {type(part).__name__}(...).module, in one of the two",
            )


def _devices(module: nn.Module, device_ids: Sequence[Device] | None, replicas: int | None) -> list[Any]:
    """The devices to use, as torch keeps them: accelerators by number. None of them: no replicas."""
    if replicas is not None:
        if device_ids is not None or replicas < 1:
            raise MisuseError(
                f"DataParallel(device_ids={device_ids}, replicas={replicas})",
                "replicas=2 (on the device where the module is), or device_ids with one entry for each replica",
            )
        first = next(chain(module.parameters(), module.buffers()), torch.empty(0))
        return [_as_torch_has_it(first.device)] * replicas
    kind = _get_available_device_type()
    if device_ids is None:
        return [] if kind in (None, "mps") else list(_get_all_device_indices() or ())
    known = [_as_torch_has_it(device) for device in device_ids]
    if kind in (None, "mps") and not all(isinstance(device, torch.device) for device in known):
        return []  # As torch: what is written for accelerators runs on a machine that has none.
    return known


def _as_torch_has_it(device: Device) -> Any:
    """The number of an accelerator; a torch.device for a CPU."""
    if isinstance(device, int):
        return torch.device("cpu") if device < 0 else device
    device = torch.device(device)
    if device.type == "cpu":
        return device
    return device.index if _get_available_device_type() in (None, "mps") else _get_device_index(device, True)


def _device(device: Device) -> torch.device:
    if isinstance(device, int):
        return torch.device(_get_available_device_type() or "cpu", device)
    return torch.device(device)
