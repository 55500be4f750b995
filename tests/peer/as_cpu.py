"""Let test code written for GPUs run on the CPU.

Only the *tests* see this torch: the names `torch` of the test modules are replaced by `CpuTorch`,
in which every device is the CPU. The library under test goes on using the real one. The few
methods that tests call on objects (`Tensor.cuda`, `Module.to`, ...) are patched on the classes.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.device_mesh as device_mesh

# As many as the largest world of any case, so that no test finds too few.
_DEVICES = 8


def _names_gpu(device: Any) -> bool:
    """Tell whether `device`, as an argument of a torch call, means a GPU."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _on_cpu(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `call` so that a GPU given as `device` means the CPU."""

    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _names_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return call(*args, **kwargs)

    return wrapper


class _Cuda(types.ModuleType):
    """`torch.cuda` with `_DEVICES` devices that do at once whatever they are asked."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self._current = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def device_count(self) -> int:
        return _DEVICES

    def set_device(self, device: Any) -> None:
        self._current = device if isinstance(device, int) else torch.device(device).index or 0

    def current_device(self) -> int:
        return self._current

    def synchronize(self, device: Any = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        pass

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def Stream(self, device: Any = None) -> _Stream:  # noqa: N802
        return _Stream()


class _Stream:
    """A stream, or an event on one, on a device that has no queue."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass


class CpuTorch(types.ModuleType):
    """`torch`, except that every device is the CPU."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _Cuda()

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        return _on_cpu(value) if isinstance(value, types.BuiltinFunctionType) else value

    @staticmethod
    def device(kind: Any, index: int = 0) -> torch.device:
        return torch.device("cpu" if _names_gpu(kind) else kind)


def _patch_moves() -> None:
    """Make moves to a GPU leave tensors and modules where they are."""

    def moving(to: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(to)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if args and _names_gpu(args[0]):
                args = ("cpu", *args[1:])
            return to(self, *args, **kwargs)

        return _on_cpu(wrapper)

    def cuda(self: Any, device: Any = None, non_blocking: bool = False) -> Any:
        return self

    for cls in (torch.Tensor, torch.nn.Module):
        cls.cuda = cuda
        cls.to = moving(cls.to)


def _patch_streams() -> None:
    """Give torch's own mixed precision, which wants streams, some that exist without a GPU."""
    torch.Stream = torch.Event = _Stream
    torch.accelerator.current_stream = lambda device=None: _Stream()


def _patch_mesh() -> None:
    build = device_mesh.init_device_mesh

    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return build("cpu" if _names_gpu(device_type) else device_type, *args, **kwargs)

    device_mesh.init_device_mesh = init_device_mesh


def install(*test_modules: types.ModuleType) -> None:
    """Replace `torch` in each of `test_modules` and patch what they reach through objects."""
    _patch_moves()
    _patch_streams()
    _patch_mesh()
    view = CpuTorch()
    for module in test_modules:
        module.torch = view
