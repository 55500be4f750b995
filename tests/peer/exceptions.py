"""The cases that apply to the CPU, pass with torch's own, and are expected not to pass on Phalanx.

Each has its reason. The list only shrinks: a case that is listed and passes is a failure too.
"""

from __future__ import annotations

from tests.peer.cases import What

_NO_ERROR = (
    "wants an error where a parameter got no gradient and find_unused_parameters is off; here that is "
    "no error: what is used is synchronised, what is not keeps its gradient as it was"
)

_WHO_IS_LATE = (
    "wants rank 0 to name the first late rank and the others to blame rank 0; here each rank names whom it waits for"
)

EXPECTED: dict[What, dict[str, str]] = {
    What.DDP: {
        "test_compute_bucket_assignment_by_size_sparse_error_with_logger@2": (
            "hands the wrapper's `logger` to a C++ function that takes only that of torch's own reducer"
        ),
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
    What.COLLECTIVES: {
        "test_monitored_barrier_failure_order@4": _WHO_IS_LATE,
        "test_monitored_barrier_gloo_rank_0_timeout@2": (
            "wants rank 0 to fail at once with a timeout of 0; here that counts as none given, and the usual one "
            "applies"
        ),
        "test_reduce_scatter_v_cuda@2": (
            "hands over parts of other sizes than the output's rank has them: refused here, as for Gloo, before data "
            "moves"
        ),
    },
}
