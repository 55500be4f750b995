"""The replicas of one forward: each runs in a thread of its own, and they may meet on the way.

A meeting is what a collective is between ranks: every replica brings a value, whoever comes last does the
work for all, and each gets its answer. The work is ordinary autograd operations on the tensors of all replicas,
so its backward needs no meeting. A replica that raises, or that ends while others wait for it, wakes them.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from phalanx.errors import MisuseError

Work = Callable[[list[Any]], Sequence[Any]]


class Crew:
    """The meeting place of `size` replicas, for one forward."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._here: dict[int, tuple[str, Any]] = {}
        self._answers: dict[int, Any] = {}
        self._ended: list[int] = []
        self._failed = False
        self._error: BaseException | None = None

    def meet(self, index: int, place: str, value: Any, work: Work) -> Any:
        """Wait until every replica is here, and return this one's part of `work(values)`, which runs once.

        Raises MisuseError if another replica is in another `place` (the names are in the text) or has ended,
        and whatever `work` raises, in every replica.
        """
        with self._changed:
            if len(self._ended) == self.size:
                raise MisuseError(
                    f"{place} of a replica runs outside of the forward of its DataParallel (activation "
                    "checkpointing runs a forward again in backward, when the other replicas are not there)",
                    "leave the layer out of what is checkpointed, or use DistributedDataParallel",
                )
            self._here[index] = place, value
            if len(self._here) == self.size:
                self._hold(work)
                self._changed.notify_all()
            self._changed.wait_for(lambda: index in self._answers or self._broken())
            if index in self._answers:
                return self._answers.pop(index)
            if self._error is not None:
                raise self._error
            if self._failed:
                raise Abandoned
            raise MisuseError(
                f"replica {index} is in {place}, and replica {self._ended[0]} has ended without it",
                "the same layers in the same order in every replica, whatever its part of the batch",
            )

    def _broken(self) -> bool:
        return self._failed or self._error is not None or bool(self._ended)

    def _hold(self, work: Work) -> None:
        """Do the work of a meeting; the lock is held, and everybody waits."""
        places = {index: place for index, (place, _) in self._here.items()}
        values = [self._here[index][1] for index in range(self.size)]
        self._here = {}
        try:
            if len(set(places.values())) > 1:
                said = ", ".join(f"replica {index} in {places[index]}" for index in range(self.size))
                raise MisuseError(
                    f"the replicas of a DataParallel are in different layers: {said}",
                    "the same layers in the same order in every replica, whatever its part of the batch",
                )
            self._answers = dict(enumerate(work(values)))
        except Exception as error:
            self._error = error

    def end(self, index: int, failed: bool) -> None:
        """Note that a replica has ended its forward."""
        with self._changed:
            self._ended.append(index)
            self._failed = self._failed or failed
            self._changed.notify_all()


class Abandoned(Exception):
    """Raised in a replica that waits for one that has failed; whose error is the one to report."""


@dataclass(frozen=True)
class Seat:
    """A replica's place in its crew, as one of its layers knows it."""

    crew: Crew
    index: int
    place: str
    """How messages name the layer."""


class AcrossReplicas:
    """A module whose replicas meet. `_seat` is set in the replicas, and None in the module itself."""

    _seat: Seat | None = None


class Replicas(list[nn.Module]):
    """The replicas of a module, their crew, and the pairs (a module, its copy in replica 0)."""

    def __init__(self, crew: Crew, modules: Sequence[nn.Module], firsts: Sequence[tuple[nn.Module, nn.Module]]) -> None:
        super().__init__(modules)
        self.crew, self._firsts = crew, firsts

    def hand_back_buffers(self) -> None:
        """Give the module the buffers that replica 0 has replaced (changes in place are shared anyway)."""
        for module, copy in self._firsts:
            for name, buffer in copy._buffers.items():
                if buffer is not module._buffers.get(name):
                    module._buffers[name] = buffer


@dataclass(frozen=True)
class ThreadState:
    """What torch keeps for each thread and a forward depends on."""

    grad: bool
    inference: bool
    autocast: dict[str, tuple[bool, torch.dtype]]
    autocast_cache: bool
    modes: list[Any]
    saved_tensors_hooks: tuple[Any, Any] | None
    cores: int
    """Threads of an operation on the CPU."""
    cores_of_each: int

    @classmethod
    def now(cls, devices: Sequence[torch.device]) -> ThreadState:
        """Return that of the calling thread, whose cores the devices that are CPUs share."""
        types = {"cpu", *(device.type for device in devices)}
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in types},
            torch.is_autocast_cache_enabled(),
            _get_current_function_mode_stack(),
            torch._C._autograd._top_saved_tensors_default_hooks(False),
            torch.get_num_threads(),
            max(1, torch.get_num_threads() // max(1, sum(device.type == "cpu" for device in devices))),
        )

    def enter(self, stack: ExitStack) -> None:
        """Make it the state of a new thread, until `stack` is closed."""
        if self.cores_of_each != self.cores:
            # Without this, each replica has as many threads as there are cores. What is set here is also what
            # threads made later get, so it is set back.
            stack.callback(torch.set_num_threads, self.cores)
            torch.set_num_threads(self.cores_of_each)
        stack.enter_context(torch.inference_mode(self.inference))
        torch.set_grad_enabled(self.grad)
        for kind, (enabled, dtype) in self.autocast.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        for mode in self.modes:  # not entered again: a mode may keep what it found when it was
            torch._C._push_on_torch_function_stack(mode)
        if self.saved_tensors_hooks is not None:
            torch._C._autograd._push_saved_tensors_default_hooks(*self.saved_tensors_hooks)


def run_replicas(
    replicas: Replicas,
    inputs: Sequence[Sequence[Any]],
    keywords: Sequence[dict[str, Any]],
    devices: Sequence[torch.device],
) -> list[Any]:
    """Call every replica with its inputs, each in a thread, and return their outputs.

    The threads have the caller's grad mode, autocast, context variables and default device. If replicas fail,
    raises the first error in time: same type, the replica in the text, the original as its cause.
    """
    crew, state = replicas.crew, ThreadState.now(devices)
    outputs: list[Any] = [None] * len(replicas)
    errors: list[tuple[BaseException, str]] = []

    def run(index: int) -> None:
        try:
            with ExitStack() as stack:
                state.enter(stack)
                _enter_device(stack, devices[index])
                outputs[index] = replicas[index](*inputs[index], **keywords[index])
        except BaseException as error:
            errors.append((error, f"in replica {index} on device {devices[index]}"))
            crew.end(index, failed=True)
        else:
            crew.end(index, failed=False)

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(run, index), name=f"replica {index}")
        for index in range(len(replicas))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        _reraise(*errors[0])
    return outputs


def _enter_device(stack: ExitStack, device: torch.device) -> None:
    if device.type != "cpu":
        stack.enter_context(torch.accelerator.device_index(device.index))


def _reraise(error: BaseException, where: str) -> None:
    """Raise an error of the same type that says where it comes from, with `error` as its cause."""
    if not isinstance(error, Exception):
        raise error
    text = f"Caught {type(error).__name__} {where}: {error}"
    try:
        told: Exception = type(error)(text)
    except Exception:
        told = RuntimeError(text)  # its type takes other arguments
    raise told from error
