"""Importing this puts Phalanx in the place of torch's own data-parallel classes, for unchanged scripts.

    import phalanx.dropin                          # at the top of the script, or instead of it:
    phalanx run --drop-in script.py                # the same in every process of the run
    PHALANX_DROPIN=ddp,gloo torchrun ... script.py # some of it only, under any launcher

Replaced are DistributedDataParallel (ddp), SyncBatchNorm (syncbn), DistributedSampler (sampler) and the gloo
backend of torch.distributed (gloo): all, or those that PHALANX_DROPIN names; PHALANX_DROPIN=0 turns an import
in a script off. `replaced` says which. Classes that were derived from torch's before stay derived from torch's.
"""

from __future__ import annotations

from phalanx.dropin.install import install
from phalanx.launch.environment import DROP_IN, drop_in, variable

__all__ = ["replaced"]

replaced: tuple[str, ...] = install(drop_in(variable(DROP_IN, "all")))
