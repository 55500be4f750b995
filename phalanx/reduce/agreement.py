"""What the tickets of a flush say together: whose gradients are reduced, and with what factors. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.errors import RankMismatchError
from phalanx.group import ticket
from phalanx.group.ticket import State, Ticket
from phalanx.reduce.weights import scales


def contributions(heard: Sequence[Ticket], tag: int) -> list[Ticket]:
    """The tickets as contributions to the flush of `tag`, by rank; of those who follow, what they have left for it."""
    mask = ticket.round_members(heard)
    return [ticket.as_contribution(each, tag, mask) for each in heard]


def used_somewhere(tickets: Sequence[Ticket], mask: bytes, size: int) -> Sequence[int]:
    """The parameters, of `size`, that some rank has used; where there is a mask, of those in it."""
    union = 0
    for each in tickets:
        union |= int.from_bytes(each.bitmap, "little")
    if mask:
        union &= int.from_bytes(mask, "little")
    return range(size) if union == (1 << size) - 1 else [index for index in range(size) if union >> index & 1]


def factors_of(tickets: Sequence[Ticket], divisor: int | None, rank: int) -> list[float]:
    """What each rank's gradients are multiplied by; RankMismatchError where some weigh and some do not."""
    try:
        return scales(tickets, divisor)
    except ValueError as error:
        calls = {
            r: "a weighed backward" if t.weighed else "a backward without weigh"
            for r, t in enumerate(tickets) if t.state is State.ACTIVE
        }  # fmt: skip
        raise RankMismatchError(
            calls, rank, "Instead: call ddp.weigh(loss, n) on every rank, with n = 0 where a rank has nothing."
        ) from error
