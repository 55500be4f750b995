"""The state of an epoch that is under way, as plain data: what one rank knows, and what all know together.

A whole state is the same on every rank, and is all that a run with any number of ranks needs:

    {"version": 1, "epoch": 3, "finished": False, "history": [[640]],
     "seed": 0, "shuffle": True, "length": 1000, "order": ""}

A part has instead of `finished` what this rank has taken: its `rank`, `ranks`, number of `lanes` and
`[lane, count]` pairs in `taken`. `together` makes a whole of the parts of all ranks. Both are dicts, lists,
strings, numbers and booleans only: JSON, `torch.save` and any checkpoint hold them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch.distributed as dist

from phalanx.data.history import History
from phalanx.errors import MisuseError, RankMismatchError
from phalanx.group.process_group import PhalanxProcessGroup, for_process_group

State = dict[str, Any]

VERSION = 1
_SAME_ORDER = ("seed", "shuffle", "length", "order")
_AGREED = ("version", "epoch", "history", "ranks", "lanes", *_SAME_ORDER)
_PART = "taken"


def together(parts: Sequence[Mapping[str, Any]]) -> State:
    """Make one whole state of the parts of all ranks, given in any order.

    Raises MisuseError if parts are missing or twice, RankMismatchError if the ranks were in different epochs
    or orders.
    """
    if not parts or any(_PART not in part for part in parts):
        raise MisuseError(
            "a list of states that are not those of single ranks",
            "load_state_dict(state), or a list of every rank's local_state_dict()",
        )
    parts = sorted(parts, key=lambda part: part["rank"])
    first = parts[0]
    _compare(parts)
    if [part["rank"] for part in parts] != list(range(first["ranks"])):
        raise MisuseError(
            f"the states of ranks {', '.join(str(part['rank']) for part in parts)}, of {first['ranks']} ranks",
            "a list with every rank's local_state_dict(), each once",
        )
    taken = [0] * first["lanes"]
    for part in parts:
        for lane, count in part[_PART]:
            taken[lane] = count
    history = History(first["history"]).after(taken, first["length"])
    agreed = {name: first[name] for name in ("version", "epoch", *_SAME_ORDER)}
    return {**agreed, "history": history.plain(), "finished": all(part["finished"] for part in parts)}


def whole(state: Mapping[str, Any] | Sequence[Mapping[str, Any]], rank: int, ranks: int) -> State:
    """Return what `load_state_dict` was given as a whole state, or this rank's own part as it is."""
    if not isinstance(state, Mapping):
        return together(state)
    if state.get("version") != VERSION or not {"epoch", "history", "finished", *_SAME_ORDER} <= set(state):
        raise MisuseError(
            f"load_state_dict with a dict that is not a sampler's state (keys {', '.join(map(str, state))})",
            "what state_dict() of a phalanx sampler or loader has returned", rank,
        )  # fmt: skip
    if _PART in state and (state["rank"], state["ranks"]) != (rank, ranks):
        raise MisuseError(
            f"the state of rank {state['rank']} of {state['ranks']} alone, loaded on rank {rank} of {ranks}: it does "
            "not tell what the other ranks had taken",
            "load_state_dict([...]) with every rank's local_state_dict(), or save state_dict(), which is whole", rank,
        )  # fmt: skip
    return dict(state)


def check_order(state: Mapping[str, Any], mine: Mapping[str, Any], name: str, rank: int) -> None:
    """Raise MisuseError if the state is of another order of items than this sampler's; None is not compared."""
    for field in ("seed", "shuffle", "length"):
        if mine[field] is not None and state[field] != mine[field]:
            raise MisuseError(
                f"load_state_dict: the state is of {name} with {field}={state[field]!r}, this one has "
                f"{field}={mine[field]!r}, so the items not yet seen would be others",
                f"{name} with the same data set, seed and shuffle as in the run that was stopped", rank,
            )  # fmt: skip


def is_whole(state: Mapping[str, Any]) -> bool:
    """Whether a state tells of all ranks, and not of one only."""
    return _PART not in state


def gathered(part: State, absent: Callable[[int], State], group: dist.ProcessGroup | None) -> State:
    """Return the whole state on every rank. Collective.

    `absent(rank)` is the part of a rank that does not answer because it has left join().
    """
    if part["ranks"] == 1:
        return together([part])
    size = dist.get_world_size(group) if dist.is_initialized() else 1
    if size != part["ranks"]:
        raise MisuseError(
            f"state_dict() of a sampler for {part['ranks']} ranks in a group of {size}: what the other ranks have "
            "taken is not known here",
            "state_dict(group) with the group of these ranks, or load_state_dict([...]) later with every rank's "
            "local_state_dict()", part["rank"],
        )  # fmt: skip
    answers = _group(group).exchange(json.dumps(part).encode(), "state_dict() of a sampler")
    return together([json.loads(answer) if answer else absent(rank) for rank, answer in enumerate(answers)])


def agree_on_order(order: str, epoch: int, ranks: int, rank: int) -> None:
    """Raise RankMismatchError on every rank unless all drew the same order. Collective over the default group.

    Does nothing where there is no group of these ranks.
    """
    if ranks == 1 or not dist.is_initialized() or dist.get_world_size() != ranks:
        return
    answers = _group(None).exchange(f"{epoch}/{order}".encode(), "a comparison of the order of the data")
    said = [answer.decode() for answer in answers]
    if len(set(filter(None, said))) > 1:
        calls = {r: "epoch {} in order {}".format(*answer.split("/")) for r, answer in enumerate(said) if answer}
        raise RankMismatchError(
            {r: f"ShardedSampler, {call}" for r, call in calls.items()}, rank,
            "The inner sampler must draw the same on every rank: let it take its random numbers from torch, numpy "
            "or random, from a torch.Generator in its attribute `generator`, or from set_epoch(epoch).",
        )  # fmt: skip


def _group(group: dist.ProcessGroup | None) -> PhalanxProcessGroup:
    process_group = dist.group.WORLD if group is None else group
    return for_process_group(cast(dist.ProcessGroup, process_group), "agreements")


def _compare(parts: Sequence[Mapping[str, Any]]) -> None:
    for field in _AGREED:
        values = {part["rank"]: part[field] for part in parts}
        if any(value != parts[0][field] for value in values.values()):
            raise RankMismatchError(
                {rank: f"the sampler's state_dict() with {field}={value!r}" for rank, value in values.items()},
                parts[0]["rank"],
                "Every rank's sampler has the same data set, seed, epoch and state to start from.",
            )
