"""The dictionary of _get_ddp_logging_data(): keys and units are torch's (times in nanoseconds)."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist
from torch.nn.modules.batchnorm import SyncBatchNorm as TorchSyncBatchNorm

from phalanx.launch.environment import variable

_ALWAYS_SAMPLED = 10
_ENVIRONMENT = {
    "master_port": "MASTER_PORT",
    "master_addr": "MASTER_ADDR",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
}
_GLOO_ENVIRONMENT = {"gloo_socket_ifname": "GLOO_SOCKET_IFNAME", "gloo_device_transport": "GLOO_DEVICE_TRANSPORT"}
_CPP_NAMES = {"float32": "float", "float64": "double", "float16": "c10::Half", "bfloat16": "c10::BFloat16"}


class LoggingData:
    """Times the steps of one wrapper and answers with what torch's logger would say."""

    def __init__(self, ddp: Any) -> None:
        self._ddp = ddp
        self.error = ""
        self.sample_rate = 100
        self.joined = False
        self._iteration = -1
        self._forward = (0, 0)
        self._sampled: dict[str, int] = {}
        self._sums: dict[str, int] = {}
        self._samples = 0

    def forward_begins(self) -> None:
        """Note when a forward starts."""
        self._forward = (time.time_ns(), 0)

    def forward_ended(self) -> None:
        """Note when it ends."""
        self._forward = (self._forward[0], time.time_ns())

    def backward_ended(self) -> None:
        """Note a synchronised step, and keep its times if it is sampled."""
        self._iteration += 1
        if self._iteration >= _ALWAYS_SAMPLED and self._iteration % self.sample_rate:
            return
        statistics, now = self._ddp._reducer.statistics, time.time_ns()
        lag = time.perf_counter()
        started = now - int((lag - statistics.last_started) * 1e9)
        ended = now - int((lag - statistics.last_ended) * 1e9)
        begin, end = self._forward
        times = {
            "forward_compute_time": max(end - begin, 1),
            "backward_compute_time": max(started - end, 1),
            "backward_comm_time": max(ended - started, 1),
            "backward_compute_comm_overlap_time": 0,
        }
        self._samples += 1
        for key, value in times.items():
            self._sums[f"avg_{key}"] = self._sums.get(f"avg_{key}", 0) + value
        self._sampled = times | {
            "iteration": self._iteration,
            "forward_compute_time_start": begin,
            "backward_compute_time_start": end,
            "backward_compute_time_end": max(started, end),
            "backward_comm_time_start": max(started, end),
            "backward_comm_time_end": max(ended, started, end),
        }

    def as_dict(self) -> dict[str, Any]:
        """Everything known now."""
        data = self._construction() | self._sampled
        data.setdefault("iteration", 0)
        data |= {key: value // self._samples for key, value in self._sums.items()}
        if self.error:
            data |= {"has_error": 1, "error": self.error}
        if self.joined:
            data["join_uneven_inputs"] = 1
        reducer = self._ddp._reducer
        if reducer.comm_hook is not None:
            data["comm_hook"] = reducer.comm_hook.name
        data["num_buckets_reduced"] = reducer.statistics.buckets_reduced
        data["unused_parameter_size"] = 0
        if reducer.statistics.flushes and not self._ddp.find_unused_parameters:
            data |= self._rebuilt()
        return data

    def _construction(self) -> dict[str, Any]:
        ddp, plan = self._ddp, self._ddp._reducer.plan
        sizes = [sum(plan.entries[i].count * plan.entries[i].itemsize for i in b.members) for b in plan.buckets]
        dtypes = sorted({_CPP_NAMES.get(entry.dtype, entry.dtype) for entry in plan.entries})
        backend = dist.get_backend(ddp.process_group) if dist.is_initialized() else "none"
        data = {
            "world_size": ddp._group.core.size,
            "rank": ddp._group.core.rank,
            "module_name": type(ddp.module).__name__,
            "device_ids": ", ".join(map(str, ddp.device_ids or ())),
            "output_device": -1 if ddp.output_device is None else ddp.output_device,
            "broadcast_buffers": int(ddp.forward_sync_buffers),
            "bucket_cap_bytes": ddp.bucket_bytes_cap,
            "find_unused_parameters": int(ddp.find_unused_parameters),
            "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
            "static_graph": int(ddp.static_graph),
            "backend_name": backend,
            "dtypes": ", ".join(dtypes),
            "total_parameter_size_bytes": sum(entry.count * entry.itemsize for entry in plan.entries),
            "num_parameter_tensors": len(plan.entries),
            "bucket_sizes": ", ".join(map(str, sizes)),
            "has_sync_bn": int(any(isinstance(m, TorchSyncBatchNorm) for m in ddp.module.modules())),
            "is_multi_device_module": int(ddp.is_multi_device_module),
        }
        data |= {key: variable(name, "N/A") for key, name in _ENVIRONMENT.items()}
        if backend == "gloo":
            data |= {key: variable(name, "N/A") for key, name in _GLOO_ENVIRONMENT.items()}
            data["gloo_num_threads"] = 2
        return data

    def _rebuilt(self) -> dict[str, Any]:
        plan = self._ddp._reducer.plan
        order = [index for bucket in plan.buckets for index in bucket.members]
        return {
            "has_rebuilt_buckets": 1,
            "rebuilt_bucket_sizes": self._construction()["bucket_sizes"],
            "prev_iteration_grad_ready_order_indices": ", ".join(map(str, order)),
            "rebuilt_per_bucket_param_indices": ", ".join(" ".join(map(str, b.members)) for b in plan.buckets),
        }
