"""A test bed for programs that run on several ranks: worlds of threads or processes, an oracle, faults.

from phalanx.testing import run, oracle
gradients = run(4, program, over="threads")      # program(rank) on 4 ranks, each one's result
oracle.assert_close(gradients[0], oracle.gradients(model, loss, batches))
"""

from __future__ import annotations

from phalanx.testing import oracle
from phalanx.testing.faults import Fault, FaultError, Faults, Kind, Point
from phalanx.testing.outcome import Ending, Outcome, WorldError
from phalanx.testing.process_world import warm_up
from phalanx.testing.thread_world import generator, seeded
from phalanx.testing.world import run

__all__ = [
    "Ending",
    "Fault",
    "FaultError",
    "Faults",
    "Kind",
    "Outcome",
    "Point",
    "WorldError",
    "generator",
    "oracle",
    "run",
    "seeded",
    "warm_up",
]
