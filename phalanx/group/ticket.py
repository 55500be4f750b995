"""The ticket: what one rank says to every other before a collective moves data. Pure.

A ticket has two parts. The *signature* (operation, reduce op, dtype, element count, root, tag) must be
equal on all ranks; equal bytes are equal calls, so the usual check is one comparison of 32 bytes. The
*personal* part (state, weights, bitmap of used parameters, free bytes) is what only this rank knows.
The generation and the group are in the frame that carries the ticket (see links.py): a ticket of another
generation goes to another channel and can never be taken for one of this generation.

    wire = SIGNATURE (32 bytes) | PERSONAL (24 bytes) | bitmap | extra

Nothing here knows sockets, torch or the clock.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

SIGNATURE = struct.Struct("<BBBxiQQ8x")
PERSONAL = struct.Struct("<BBHHHdd")
HEAD_BYTES = SIGNATURE.size + PERSONAL.size
_SAYS = struct.Struct("<BHH")
_AT_SAYS = SIGNATURE.size + 1


_CALLS: dict[int, str] = {}


@lru_cache(maxsize=256)
def tag_of(call: str) -> int:
    """The tag of an exchange that belongs to `call`, which is what the exchange is called from now on."""
    tag = int.from_bytes(hashlib.blake2b(call.encode(), digest_size=8).digest(), "little")
    _CALLS[tag] = call
    return tag


class Operation(enum.IntEnum):
    """What a collective does; the names are those of torch.distributed."""

    FOLLOW = 0  # no call of its own: takes part in whatever the others do
    ALL_REDUCE = 1
    BROADCAST = 2
    ALL_GATHER = 3
    REDUCE_SCATTER = 4
    REDUCE = 5
    GATHER = 6
    SCATTER = 7
    ALL_TO_ALL = 8
    BARRIER = 9
    GRADIENTS = 10  # one flush of a reducer's buckets
    WRAP = 11  # comparing the models when they are wrapped
    ARENA = 12  # making shared memory
    EXCHANGE = 13  # bytes from every rank to every rank
    MONITORED_BARRIER = 14
    ALL_REDUCE_SPARSE = 15  # all_reduce of a sparse tensor


class State(enum.IntEnum):
    """What this rank brings to the collective."""

    ACTIVE = 0
    JOINED = 1  # out of data: follows the others, contributes nothing
    SKIPPING = 2  # has nothing for this step only


@dataclass(frozen=True)
class Ticket:
    """What one rank is about to do.

    `count` is in elements, `dtype` is a code of phalanx.group.dtypes, `tag` tells calls of one kind
    apart (a reducer's plan hash, say), `unit` and `total` are the weights of the gradient (see
    reduce/policy.py), `bitmap` holds one bit per parameter that this rank produced, `digest` stands for the
    model of this rank (0: nothing is said of it), `apart` says that this rank needs the results of a reduction in
    memory of its own, `begun` is the number of buckets whose sums this rank has begun in backward, and `intact` says
    that they are of the gradients that it has now.
    """

    operation: Operation
    reduction: int = 0
    dtype: int = 0
    count: int = 0
    root: int = -1
    tag: int = 0
    state: State = State.ACTIVE
    weighed: bool = False
    unit: float = 1.0
    total: float = 1.0
    bitmap: bytes = b""
    extra: bytes = b""
    digest: int = 0
    apart: bool = False
    begun: int = 0
    intact: bool = False

    def signature(self) -> bytes:
        """The part that must be equal on all ranks, as bytes."""
        return SIGNATURE.pack(self.operation, self.reduction, self.dtype, self.root, self.count, self.tag)

    def encode(self) -> bytes:
        """The whole ticket as bytes."""
        flags = self.weighed | self.apart << 1 | self.intact << 2
        personal = PERSONAL.pack(
            self.state, flags, self.digest, self.begun, len(self.bitmap), self.unit, self.total
        )  # fmt: skip
        return self.signature() + personal + self.bitmap + self.extra


def decode(wire: bytes) -> Ticket:
    """Read a ticket back from its bytes."""
    operation, reduction, dtype, root, count, tag = SIGNATURE.unpack_from(wire)
    state, flags, digest, begun, bits, unit, total = PERSONAL.unpack_from(wire, SIGNATURE.size)
    start = SIGNATURE.size + PERSONAL.size
    return Ticket(
        Operation(operation), reduction, dtype, count, root, tag,
        State(state), bool(flags & 1), unit, total, wire[start : start + bits], wire[start + bits :], digest,
        bool(flags & 2), begun, bool(flags & 4),
    )  # fmt: skip


def plain(operation: int, reduction: int, dtype: int, count: int, root: int, tag: int = 0) -> bytes:
    """Encode an ACTIVE ticket without weights: the hot path, without building a Ticket first."""
    return SIGNATURE.pack(operation, reduction, dtype, root, count, tag) + _ACTIVE


_ACTIVE = PERSONAL.pack(State.ACTIVE, False, 0, 0, 0, 1.0, 1.0)


def carrying(wire: bytes, digest: int, apart: bool, begun: int, intact: bool) -> bytes:
    """The same encoded ticket with these."""
    flags = wire[_AT_SAYS] & 1 | apart << 1 | intact << 2
    return wire[:_AT_SAYS] + _SAYS.pack(flags, digest, begun) + wire[_AT_SAYS + _SAYS.size :]


def extra(wire: bytes) -> bytes:
    """The free bytes at the end of an encoded ticket."""
    bits = PERSONAL.unpack_from(wire, SIGNATURE.size)[4]
    return wire[SIGNATURE.size + PERSONAL.size + bits :]


def bits(members: Iterable[int], size: int) -> bytes:
    """A bitmap of `size` bits with those of `members` set."""
    value = 0
    for index in members:
        value |= 1 << index
    return value.to_bytes(-(-size // 8), "little")


def members(bitmap: bytes) -> list[int]:
    """The numbers of the bits that are set."""
    value = int.from_bytes(bitmap, "little")
    return [index for index in range(value.bit_length()) if value >> index & 1]


def follows(wire: bytes) -> bool:
    """Whether an encoded ticket is that of a rank without a call of its own."""
    return wire[SIGNATURE.size] != State.ACTIVE


def describe(wire: bytes, dtype_names: Mapping[int, str], reduction_names: Mapping[int, str]) -> str:
    """Say in words what an encoded ticket's rank is doing, as people write the call."""
    t = decode(wire)
    name = t.operation.name.lower()
    if t.operation is Operation.FOLLOW:
        if t.state is State.SKIPPING:
            return "skip(): it follows the others through their step"
        return "no call: it has run out of data and follows the others"
    if t.operation is Operation.GRADIENTS:
        part = f"some layers (set {t.root & 0xFFFF:04x}) of " if t.root >= 0 else ""
        return f"the gradient synchronisation of {part}model {t.tag >> 8 & 0xFFFF:04x} ({t.count} elements)"
    if t.operation is Operation.BROADCAST and t.tag:
        what = "a model's buffers" if t.tag >> 63 else "a model"
        return f"the copying of {what} from rank {t.root} to all ({t.count} bytes)"
    if t.operation is Operation.WRAP:
        return "DistributedDataParallel(...)"
    if t.operation is Operation.EXCHANGE and t.tag in _CALLS:
        return _CALLS[t.tag]
    arguments = []
    if t.count:
        arguments.append(f"{t.count} x {dtype_names.get(t.dtype, 'bytes')}")
    if t.reduction:
        arguments.append(f"op={reduction_names.get(t.reduction, t.reduction)}")
    if t.root >= 0:
        arguments.append(f"root={t.root}")
    return f"{name}({', '.join(arguments)})"


def round_members(tickets: Iterable[Ticket]) -> bytes:
    """The mask of the gradients that the active ones among `tickets` exchange; empty for the whole model."""
    return next((t.extra for t in tickets if t.operation is Operation.GRADIENTS), b"")


def of_followers(wires: Iterable[bytes], said: Iterable[Ticket]) -> list[bytes]:
    """Tickets of a flush by ranks that all only follow, with the states of the tickets in which they `said` so."""
    return [replace(decode(wire), state=t.state, digest=0).encode() for wire, t in zip(wires, said, strict=True)]


def as_contribution(t: Ticket, tag: int, mask: bytes) -> Ticket:
    """Read a follower's ticket in a round of the flush `tag`: gradients of it that it has left count, no others.

    Items that it has counted for the round count too, if it has used none of the parameters.
    """
    if t.state is State.ACTIVE:
        return t
    left = int.from_bytes(t.bitmap, "little")
    if left and t.tag == tag and (not mask or left & int.from_bytes(mask, "little")):
        return replace(t, state=State.ACTIVE)
    return replace(t, bitmap=b"", weighed=t.weighed and t.tag == tag)
