"""Small records that ranks tell one another: one from each to all, or the result of rank 0 to all.

Records are JSON, which keeps floats exact. They travel inside tickets, so ranks that are in different calls
get a RankMismatchError, and a dead or failed rank is an error on the others, as for every collective.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from typing import Any, cast

import torch.distributed as dist

from phalanx.errors import MisuseError, PeerFailedError
from phalanx.group import world
from phalanx.group.process_group import for_process_group


def tell_all(call: str, record: Any) -> list[Any]:
    """Give `record` to every rank and return everybody's, in rank order.

    `call` names the user's call; ranks in another one are a RankMismatchError. A rank that has left join()
    has None. Collective: every rank, same order. In a world of one it is this rank's own record.
    """
    if not dist.is_initialized():
        if world.world_size() > 1:
            raise MisuseError(
                f"{call} before the {world.world_size()} ranks have met: each would be alone with it",
                "call phalanx.init() before",
                world.rank(),
            )
        return [record]
    group = for_process_group(cast(dist.ProcessGroup, dist.group.WORLD), call)
    answers = group.exchange(json.dumps(record).encode(), call)
    return [json.loads(answer) if answer else None for answer in answers]


def from_rank_zero(call: str, make: Callable[[], Any]) -> Any:
    """Run `make` on rank 0 and return its result, which JSON can hold, on every rank.

    If it raises there, the others raise PeerFailedError with its text. Collective: every rank, same order.
    """
    if world.rank() != 0:
        told = tell_all(call, None)[0]
        if told is None:
            raise MisuseError(f"{call}, while rank 0 has left join()", "call it outside of join()", world.rank())
        if "exception" in told:
            raise PeerFailedError(0, world.rank(), call, told["exception"], told["traceback"])
        return told["result"]
    try:
        result = make()
    except Exception as error:
        told = {"exception": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        tell_all(call, told)
        raise
    return tell_all(call, {"result": result})[0]["result"]
