"""The names that other code reads of torch's DistributedDataParallel, public by use if not by intent.

Trainers, optimizers and torch's own tests touch them. Each does here what the caller expects; state that
Phalanx does not have is answered from the reducer's plan and statistics.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation

from phalanx.group.process_group import for_process_group
from phalanx.parallel import buffers
from phalanx.parallel.logging_data import LoggingData
from phalanx.parallel.wrapped import Wrapped

_BROADCAST_BUCKET_BYTES = 250 << 20


class ReducerSurface:
    """What callers of torch reach through `ddp.reducer`."""

    def __init__(self, ddp: Any) -> None:
        self._ddp = ddp

    def prepare_for_backward(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have the next backward synchronise, even if the forward it belongs to ran under no_sync().

        Accelerate and Lightning call this, with the outputs or an empty list.
        """
        local = self._ddp._local_now()
        for tensor in tensors:
            self._ddp._watch(tensor, local)
        self._ddp._reducer.watch.output_reached(local)

    def prepare_for_forward(self) -> None:
        """Nothing to do: the forward itself prepares."""

    def _delay_all_reduce(self) -> None:
        """Nothing to do: whatever backward has left is synchronised when it ends (Lightning calls this)."""

    def _install_post_backward_futures(self, futures: Sequence[torch.futures.Future[Any]]) -> None:
        self._ddp._buffer_futures.extend(futures)

    def _remove_autograd_hooks(self) -> None:
        self._ddp._remove_autograd_hooks()

    def _check_reducer_finalized(self) -> None:
        self._ddp._check_reducer_finalized()

    def _get_local_used_map(self) -> torch.Tensor:
        return torch.tensor(self._ddp._reducer.statistics.used_map(), dtype=torch.int32)

    def _ddp_graph_static(self) -> bool:
        return bool(self._ddp._reducer.statistics.used_set_changes == 0)

    def _rebuild_buckets(self) -> bool:
        return False

    def _set_static_graph(self) -> None:
        pass


class LoggerSurface(dist.Logger):
    """What callers of torch reach through `ddp.logger`: a logger of torch's too, which its C++ functions take."""

    def __init__(self, ddp: Any) -> None:
        watched = [torch.zeros(1, requires_grad=True)]  # Torch's logger wants a reducer, and that a parameter.
        super().__init__(dist.Reducer(watched, [[0]], [watched[0].nbytes], ddp.process_group, [False]))
        self._ddp = ddp

    @property
    def noted_error(self) -> str:
        """What a C++ function has noted as the error; empty if none has."""
        return str(super()._get_ddp_logging_data().strs_map.get("error", ""))

    def set_runtime_stats_and_log(self) -> None:
        """Nothing to do: steps are noted as they end."""

    def set_error_and_log(self, text: str) -> None:
        """Keep an error for _get_ddp_logging_data()."""
        self._ddp._logging.error = text

    def _set_uneven_input_join(self) -> None:
        self._ddp._logging.joined = True

    def _set_static_graph(self) -> None:
        pass

    def _get_ddp_logging_data(self) -> Any:
        data = self._ddp._get_ddp_logging_data()
        texts = {key: value for key, value in data.items() if isinstance(value, str)}
        return SimpleNamespace(strs_map=texts, ints_map={key: data[key] for key in data.keys() - texts.keys()})


class TorchSurface(Wrapped):
    """Mixed into DistributedDataParallel before torch's class, so that these win."""

    # State of torch's that is always the same here.
    _lazy_init_ran = True
    _use_python_reducer = False
    _delay_all_reduce_all_params = False
    _delay_grad_buffer: torch.Tensor | None = None
    _static_graph_delay_allreduce_enqueued = False
    use_side_stream_for_tensor_copies = False

    def _start_surface(self) -> None:
        """Set what belongs to this process; called before the reducer is built."""
        self._surface = ReducerSurface(weakref.proxy(self))
        self._logging = LoggingData(weakref.proxy(self))
        self._logger: LoggerSurface | None = None
        self._buffer_futures: list[torch.futures.Future[Any]] = []
        self._fetched: list[buffers.Pack] = []
        self._authoritative_rank = 0
        self._first_used: frozenset[int] | None = None
        self._graph_changed = False

    def _finish_surface(self) -> None:
        options = self.options
        self.device_ids = None if options.device_ids is None else list(options.device_ids)
        self.output_device = options.output_device
        self.forward_sync_buffers = options.forward_sync_buffers
        self.find_unused_parameters = options.find_unused_parameters
        self.gradient_as_bucket_view = options.gradient_as_bucket_view
        self.static_graph = options.static_graph
        self.skip_all_reduce_unused_params = options.skip_all_reduce_unused_params
        self.batched_grad_copy = options.batched_grad_copy
        self.mixed_precision = options.mixed_precision
        self.bucket_bytes_cap = int(options.bucket_cap_mb * (1 << 20))
        self.bucket_bytes_cap_list = list(options.bucket_bytes_cap_list)
        self.broadcast_bucket_size = _BROADCAST_BUCKET_BYTES
        self._module_parameters = list(self._everything)
        self.device = self._module_parameters[0].device
        self.device_type = self.device.type
        self.is_multi_device_module = len({p.device for p in self._module_parameters}) > 1
        self._delay_all_reduce_params: list[torch.Tensor] = []
        if not hasattr(self, "buffer_hook"):
            self.buffer_hook: _BufferCommHook | None = None

    @property
    def reducer(self) -> ReducerSurface:
        """What callers of torch reach through this name."""
        return self._surface

    @property
    def logger(self) -> LoggerSurface:
        """What callers of torch reach through this name."""
        if self._logger is None:
            self._logger = LoggerSurface(weakref.proxy(self))
        return self._logger

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return bool(self._reducer.statistics.flushes)

    def _lazy_init(self) -> None:
        pass

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        """Synchronise over another group from now on (torchft calls this when ranks come and go). Collective."""
        self._remove_autograd_hooks()
        hook = self._reducer.comm_hook
        self.process_group = new_process_group
        self._attach(for_process_group(new_process_group, "gradients"))
        self._reducer.comm_hook = hook
        self._finish_surface()

    # -- errors and logging ----------------------------------------------------------------------------

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> NoReturn:
        if hasattr(self, "_logging"):
            self._logging.error = err_msg
        raise err_type(err_msg)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        if self._logger is not None and self._logger.noted_error:
            self._logging.error = self._logger.noted_error
        return self._logging.as_dict()

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            self._log_and_throw(ValueError, "DDP runtime logging sample rate should be equal or greater than 1")
        self._logging.sample_rate = sample_rate

    def _set_static_graph(self) -> None:
        if self.static_graph:
            return
        if self._reducer.statistics.flushes:
            self._log_and_throw(RuntimeError, "_set_static_graph() should be called before training loop starts")
        self.static_graph = True

    def _check_static_graph(self) -> None:
        """Hold the user to static_graph=True, with torch's texts; every rank sees the same."""
        used = self._reducer.statistics.used
        if self._first_used is None:
            self._first_used = used
        self._graph_changed = used != self._first_used
        if not used <= self._first_used:
            self._log_and_throw(
                RuntimeError,
                "Your training graph has changed in this iteration, e.g., one parameter is unused in first "
                "iteration, but then got used in the second iteration. this is not compatible with static_graph set "
                "to True. Instead: leave static_graph out, it is not needed.",
            )

    def _refuse_changed_graph(self) -> None:
        self._graph_changed = False
        changed = sorted((self._first_used or frozenset()) ^ self._reducer.statistics.used)
        self._log_and_throw(
            RuntimeError,
            "Expected to have finished reduction in the prior iteration before starting a new one. This error "
            "indicates that your training graph has changed in this iteration, e.g., one parameter is used in "
            "first iteration, but then got unused in the second iteration. this is not compatible with "
            "static_graph set to True.\nParameter indices which did not receive grad for rank "
            f"{self._group.core.rank}: {' '.join(map(str, changed))}\n"
            "Instead: leave static_graph out, it is not needed.",
        )

    def _passing_sync_batchnorm_handle(self, module: nn.Module) -> None:
        pass

    def _remove_autograd_hooks(self) -> None:
        self._reducer.watch.take_off()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        pass

    def _check_reducer_finalized(self) -> None:
        self._reducer.watch.check_idle("_check_reducer_finalized()", self._group.core.rank)

    # -- communication hooks ---------------------------------------------------------------------------

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        hooks: dict[Any, Callable[[Any, Any], Any]] = {
            dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        self.register_comm_hook(self._group, hooks[comm_hook_type])
        if self._reducer.comm_hook is not None:
            self._reducer.comm_hook.name = str(comm_hook_type)

    def _check_comm_hook(self, hook: Callable[..., Any]) -> None:
        """Refuse hooks that cannot be right; annotations are optional, as in torch."""
        annotations = getattr(hook, "__annotations__", {})
        bucket = annotations.get("bucket")
        if bucket not in (None, dist.GradBucket, "dist.GradBucket", "GradBucket"):
            self._log_and_throw(ValueError, "Communication hook: bucket annotation should be dist.GradBucket.")
        returned = annotations.get("return")
        if returned is not None and not isinstance(returned, str):
            if returned not in (torch.futures.Future[torch.Tensor], torch.futures.Future):
                self._log_and_throw(
                    ValueError,
                    "Communication hook: return annotation should be torch.futures.Future[torch.Tensor] or "
                    "torch._C.Future.",
                )

    # -- buffers -----------------------------------------------------------------------------------------

    def will_sync_module_buffers(self) -> bool:
        """Whether a training forward would bring buffers in line now."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self.modules_buffers)

    def _has_buffer_hook_at(self, location: _BufferCommHookLocation) -> bool:
        hook = self.buffer_hook
        return hook is not None and hook.buffer_comm_hook_location == location

    def _sync_buffers(self) -> None:
        """Bring buffers in line before a forward, by the user's buffer hook if there is one."""
        self._fetched.clear()
        if self.buffer_hook is None:
            if self._reducer.stale:
                self._reducer.build()
            self._broadcaster.broadcast(0)
        elif self._has_buffer_hook_at(_BufferCommHookLocation.PRE_FORWARD):
            self._run_buffer_hook()

    _sync_params = _sync_buffers  # what it was called before torch 1.10

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        if self.buffer_hook is None:
            self._default_broadcast_coalesced(authoritative_rank=authoritative_rank)
        else:
            self._run_buffer_hook()

    def _assign_modules_buffers(self) -> None:
        self._remember_structure()

    def _sync_buffers_after_step(self) -> None:
        """Fetch the buffers of rank 0, for a forward that evaluates; torch broadcasts them in that forward itself.

        Here it must not: ranks may evaluate alone. Ranks that have skipped the step have missed its forward, and
        get the buffers of one that has not, at once.
        """
        self._fetched.clear()
        # Here too: a rank that has skipped the step, or only follows, has had no forward to set it.
        self.__dict__["require_forward_param_sync"] = True
        runners = self._reducer.runners
        if not runners or self.buffer_hook is not None or not self.will_sync_module_buffers():
            return
        if self._reducer.skippers:
            self._broadcaster.broadcast(runners[0])
        elif self.module.training:
            self._fetched.extend(self._broadcaster.fetch(runners[0]))

    def _take_fetched_buffers(self) -> None:
        while self._fetched:
            self._fetched.pop().put()

    def _run_buffer_hook(self) -> None:
        hook: Any = self.buffer_hook
        futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, self.named_module_buffers)
        self._buffer_futures.extend(futures or ())

    def _wait_for_buffer_hooks(self) -> None:
        while self._buffer_futures:
            self._buffer_futures.pop(0).wait()

    def _buffers_used(self) -> None:
        """Do what follows the forward of a model with buffers."""
        if self._has_buffer_hook_at(_BufferCommHookLocation.POST_FORWARD) and self.will_sync_module_buffers():
            self._run_buffer_hook()
        # As in torch, a forward after one under no_sync() leaves buffers alone: ranks may differ in how many
        # micro-batches they have.
        self.__dict__["require_forward_param_sync"] = self.require_backward_grad_sync

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[..., Any],
        comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        if not callable(hook):
            self._log_and_throw(TypeError, "Communication hook must be callable.")
        self.buffer_hook = _BufferCommHook(
            buffer_comm_hook=hook, buffer_comm_hook_state=state, buffer_comm_hook_location=comm_hook_location
        )

    def _default_broadcast_coalesced(
        self, bufs: Sequence[torch.Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        buffers.broadcast(self._group, self.modules_buffers if bufs is None else bufs, authoritative_rank)

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        buffers.broadcast(self._group, tensors, authoritative_rank)
