"""Hashing tensors by their bytes: every byte is in exactly one piece, and nothing else is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from phalanx.parallel.pieces import Pieces, can_be_hashed, checksum

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]


def hashes(pieces: Pieces) -> list[int]:
    return [pieces.hash(number) for number in range(len(pieces))]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 900), st.sampled_from(DTYPES)), max_size=6), st.integers(1, 20), st.data())
def test_any_changed_byte_changes_the_piece_it_is_in_and_no_other(
    shapes: list[tuple[int, torch.dtype]], most: int, data: st.DataObject
) -> None:
    tensors = [torch.zeros(count, dtype=dtype) for count, dtype in shapes]
    pieces = Pieces(tensors, most)
    assert len(pieces) <= most
    assert [bool(of) for of in pieces.of] == [tensor.numel() > 0 for tensor in tensors]
    filled = [index for index, tensor in enumerate(tensors) if tensor.numel()]
    if not filled:
        assert len(pieces) == 0
        return
    index = data.draw(st.sampled_from(filled))
    raw = tensors[index].view(torch.uint8)
    place, before = data.draw(st.integers(0, raw.numel() - 1)), hashes(pieces)
    raw[place] = 1
    changed = [number for number, (old, new) in enumerate(zip(before, hashes(pieces), strict=True)) if old != new]
    assert len(changed) == 1 and changed[0] in pieces.of[index]


def test_swapped_elements_show() -> None:
    tensor = torch.arange(8.0)
    pieces, before = Pieces([tensor], 1), checksum(tensor)
    (whole,) = hashes(pieces)
    tensor[[2, 5]] = tensor[[5, 2]]
    assert checksum(tensor) != before and hashes(pieces) != [whole]


def test_pieces_follow_data_that_has_moved() -> None:
    parameter = nn.Parameter(torch.ones(300))
    pieces = Pieces([parameter], 4)
    before = hashes(pieces)
    parameter.data = torch.ones(300)
    assert hashes(pieces) == before
    parameter.data = torch.full((300,), 2.0)
    assert all(new != old for new, old in zip(hashes(pieces), before, strict=True))
    parameter.data = torch.ones(10)  # too short for all but nothing
    assert hashes(pieces) == [0] * len(pieces)


@pytest.mark.parametrize(
    ("tensor", "whole"),
    [
        (torch.zeros(4, 3, 5, 5).to(memory_format=torch.channels_last), 1200),
        (torch.zeros(6, 4).t(), 96),
        (torch.zeros(6, 4)[:, :2], 0),
        (torch.zeros(1).expand(7), 0),
        (torch.zeros(4, dtype=torch.complex64).conj(), 0),
        (torch.zeros(4, 4).to_sparse(), 0),
        (torch.zeros(4, device="meta"), 0),
        (torch.zeros(0), 0),
    ],
    ids=["channels last", "transposed", "gaps", "expanded", "conjugated", "sparse", "meta", "empty"],
)
def test_only_what_lies_plainly_in_memory_is_read_by_address(tensor: torch.Tensor, whole: int) -> None:
    pieces = Pieces([tensor], 1)
    assert sum(len(part.memory) for piece in pieces._pieces for part in piece) == whole
    assert can_be_hashed(tensor) == (tensor.device.type != "meta")


def test_a_checksum_is_of_the_values_in_order_whatever_their_strides() -> None:
    plain = torch.randn(2, 3, 4, 4)
    assert checksum(plain) == checksum(plain.to(memory_format=torch.channels_last))
    assert checksum(plain) != checksum(plain.transpose(2, 3))
    turned = torch.randn(5, dtype=torch.complex64)
    assert checksum(turned.conj()) == checksum(turned.conj().resolve_conj()) != checksum(turned)
    assert checksum(torch.eye(3).to_sparse()) == checksum(torch.eye(3))
    assert checksum(torch.empty(0)) == 0


def test_equal_nans_are_equal() -> None:
    assert checksum(torch.tensor([float("nan"), 1.0])) == checksum(torch.tensor([float("nan"), 1.0]))


def test_a_piece_that_is_left_out_hashes_to_the_same_from_then_on() -> None:
    tensor = torch.zeros(600)
    pieces = Pieces([tensor], 2)
    pieces.leave_out(0)
    before = hashes(pieces)
    tensor.add_(1.0)
    assert hashes(pieces)[0] == before[0] and hashes(pieces)[1] != before[1]
