"""Accelerate's own test of uneven inputs, on the CPU.

Accelerate joins uneven inputs for several GPUs only, and does nothing for several CPU processes, so that the test
would hang there under any backend. Here it takes a wrapped model on the CPU for one on GPUs while it joins.
"""

from contextlib import contextmanager
from unittest.mock import PropertyMock, patch

import torch
from accelerate import Accelerator
from accelerate.test_utils.scripts import test_distributed_data_loop
from accelerate.utils import DistributedType

join_uneven_inputs = Accelerator.join_uneven_inputs


@contextmanager
def join_on_cpu(self, joinables, even_batches=None):
    kind = self.distributed_type
    if isinstance(joinables[0], torch.nn.parallel.DistributedDataParallel):
        kind = DistributedType.MULTI_GPU
    with patch.object(Accelerator, "distributed_type", new_callable=PropertyMock, return_value=kind):
        with join_uneven_inputs(self, joinables, even_batches):
            yield


Accelerator.join_uneven_inputs = join_on_cpu
test_distributed_data_loop.main()
print("all joined")
