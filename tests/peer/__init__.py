"""Torch's own distributed tests, run on Phalanx.

The tests ship inside the torch wheel (`torch/testing/_internal/distributed/distributed_test.py`).
They are run unchanged, once with torch's own classes (the baseline) and once with ours:

    python -m tests.peer.run --what ddp --target phalanx               our DistributedDataParallel
    python -m tests.peer.run --what sync_batchnorm --target phalanx    our SyncBatchNorm
    python -m tests.peer.run --what collectives --target phalanx       our process group
    python -m tests.peer.run --what ddp --target drop_in               our class and our process group
    python -m tests.peer.run --what ddp --target torch                 what the baseline rests on

`run.py` hands cases to a `worker.py` process, which imports the tests once (`suite.py`) and forks
the ranks of each case. `as_cpu.py` lets cases written for GPUs run on the CPU; `targets.py` puts
the class or the process group under test in place. `cases.py` holds the list of applicable
cases, `exceptions.py` those of them that are expected not to pass and the tests that do not
apply, each with its reason. `whole_batch_norm.py` stands in for torch's SyncBatchNorm, which has no
kernels for the CPU.
"""
