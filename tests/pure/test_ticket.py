"""The ticket: what is written is read, equal calls are equal bytes, and every call has its words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.group import ticket
from phalanx.group.ticket import SIGNATURE, Operation, State, Ticket

bytes_of_any_length = st.binary(max_size=200)
tickets = st.builds(
    Ticket,
    operation=st.sampled_from(Operation),
    reduction=st.integers(0, 9),
    dtype=st.integers(0, 255),
    count=st.integers(0, (1 << 64) - 1),
    root=st.integers(-1, 1 << 20),
    tag=st.integers(0, (1 << 64) - 1),
    state=st.sampled_from(State),
    weighed=st.booleans(),
    unit=st.floats(allow_nan=False),
    total=st.floats(allow_nan=False),
    bitmap=bytes_of_any_length,
    extra=bytes_of_any_length,
    digest=st.integers(0, (1 << 16) - 1),
    apart=st.booleans(),
    begun=st.integers(0, (1 << 16) - 1),
    intact=st.booleans(),
)
SIGNED = ("operation", "reduction", "dtype", "count", "root", "tag")
PERSONAL = ("state", "weighed", "unit", "total", "bitmap", "extra", "digest", "apart", "begun", "intact")


@given(tickets)
def test_what_is_written_is_read(t: Ticket):
    assert ticket.decode(t.encode()) == t
    assert ticket.extra(t.encode()) == t.extra
    other = replace(t, digest=0, apart=not t.apart, begun=7, intact=not t.intact)
    assert ticket.carrying(other.encode(), t.digest, t.apart, t.begun, t.intact) == t.encode()
    assert ticket.follows(t.encode()) == (t.state is not State.ACTIVE)


@given(tickets)
def test_the_signature_comes_first(t: Ticket):
    assert t.encode()[: SIGNATURE.size] == t.signature()
    assert SIGNATURE.size == 32


@given(tickets, tickets)
def test_signatures_are_equal_exactly_if_the_calls_are(a: Ticket, b: Ticket):
    same = all(getattr(a, name) == getattr(b, name) for name in SIGNED)
    assert (a.signature() == b.signature()) == same


@given(tickets, tickets, st.sampled_from(SIGNED))
def test_each_field_of_the_call_is_in_the_signature(t: Ticket, other: Ticket, name: str):
    changed = replace(t, **{name: getattr(other, name)})
    assert (changed.signature() == t.signature()) == (getattr(t, name) == getattr(other, name))


@given(tickets, tickets)
def test_what_only_this_rank_knows_is_not_in_the_signature(t: Ticket, other: Ticket):
    changed = replace(t, **{name: getattr(other, name) for name in PERSONAL})
    assert changed.signature() == t.signature()
    assert ticket.decode(changed.encode()) == changed


@given(tickets)
def test_the_quick_way_writes_the_same_bytes(t: Ticket):
    plain = Ticket(t.operation, t.reduction, t.dtype, t.count, t.root, t.tag)
    assert ticket.plain(t.operation, t.reduction, t.dtype, t.count, t.root, t.tag) == plain.encode()
    assert ticket.decode(plain.encode()).state is State.ACTIVE


@given(tickets)
def test_every_ticket_has_its_words(t: Ticket):
    text = ticket.describe(t.encode(), {1: "float32"}, {1: "SUM"})
    assert text and "\n" not in text


@pytest.mark.parametrize(
    ("t", "words"),
    [
        (Ticket(Operation.ALL_REDUCE, 1, 1, 4), "all_reduce(4 x float32, op=SUM)"),
        (Ticket(Operation.BROADCAST, 0, 1, 4, 0), "broadcast(4 x float32, root=0)"),
        (Ticket(Operation.BARRIER), "barrier()"),
        (Ticket(Operation.ALL_GATHER, dtype=200, count=3), "all_gather(3 x bytes)"),
        (Ticket(Operation.REDUCE, 7, 1, 1, 2), "reduce(1 x float32, op=7, root=2)"),
        (Ticket(Operation.WRAP), "DistributedDataParallel(...)"),
        (
            Ticket(Operation.GRADIENTS, count=16, tag=0xABC1234),
            "the gradient synchronisation of model bc12 (16 elements)",
        ),
    ],
)
def test_calls_are_described_as_people_write_them(t: Ticket, words: str):
    assert ticket.describe(t.encode(), {1: "float32"}, {1: "SUM"}) == words


def test_a_rank_that_follows_is_described_so():
    wire = Ticket(Operation.FOLLOW, state=State.JOINED).encode()
    assert "run out of data" in ticket.describe(wire, {}, {})


@pytest.mark.parametrize("size", [0, 1, 55])
def test_half_a_ticket_is_an_error(size: int):
    wire = Ticket(Operation.BARRIER).encode()
    with pytest.raises(Exception, match="buffer"):
        ticket.decode(wire[:size])
