"""What of torch's tests is not expected to pass on Phalanx, each with its reason.

`EXPECTED` holds cases that apply to the CPU. The list only shrinks: a case that is listed and passes is a
failure too. `NOT_APPLICABLE` holds the tests that do not apply; every test is there or is a case.
"""

from __future__ import annotations

from tests.peer.cases import What

_NO_ERROR = (
    "wants an error where a parameter got no gradient and find_unused_parameters is off; here that is "
    "no error: what is used is synchronised, what is not keeps its gradient as it was"
)

EXPECTED: dict[What, dict[str, str]] = {
    What.DDP: {
        "test_ddp_control_flow_different_across_ranks@2": _NO_ERROR,
        "test_ddp_control_flow_same_across_ranks@2": _NO_ERROR,
        "test_ddp_multiple_nested_unused_params_err_ignore_params@2": _NO_ERROR,
        "test_ddp_multiple_nested_unused_params_error@2": _NO_ERROR,
        "test_ddp_profiling_torch_profiler@2": (
            "counts the profiler's events of torch's own reducer: one all-reduce of gloo a bucket, and the "
            "search for unused parameters, for which there is no need here"
        ),
        "test_ddp_unused_params_rebuild_buckets_exception@2": _NO_ERROR,
        "test_skip_all_reduce_unused_parameters@2": (
            "counts two buckets, filled from the first parameter on; here they are filled from the last one on, the "
            "order in which backward produces gradients, which makes it one"
        ),
    },
    What.SYNC_BATCHNORM: {},
    What.COLLECTIVES: {},
}

_HANG = "wants NCCL's text of the error of an all-reduce that is waited for too briefly"

NOT_APPLICABLE: dict[str, str] = {
    "test_broadcast_object_list": "torch skips it everywhere: failing",
    "test_ddp_device": "wants inputs on the device whose index is the rank; there is one CPU",
    "test_ddp_has_finalized": "torch skips it everywhere: failing",
    "test_ddp_hook_pickling_powerSGD": "torch skips it everywhere: unpickles with weights_only=True what is no weights",
    "test_ddp_logging_data_gpu": "wants the index of the GPU that it gave in the logging data, and the GPU's own times",
    "test_ddp_profiling_autograd_profiler": (
        "torch skips it everywhere; it is that of the other profiler, which is listed above"
    ),
    "test_ddp_profiling_execution_trace": "torch skips it everywhere; it reads what NCCL adds to a trace",
    "test_ddp_sync_bn_training_vs_eval": (
        "torch skips it everywhere: failing. It also runs a backward of the inner module on one rank alone, which is "
        "synchronised here as any other is"
    ),
    "test_monitored_barrier_allreduce_hang": _HANG,
    "test_monitored_barrier_allreduce_hang_wait_all_ranks": _HANG,
    "test_nccl_high_priority_stream": "makes a process group of NCCL",
}
