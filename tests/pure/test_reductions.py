"""Weighted sums: whatever the factors of the ranks, among them 1."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.testing import generator
from phalanx.transport.reductions import summation, weighted_sum

FACTORS = st.lists(st.sampled_from([1.0, 0.5, 0.25, 1 / 3, 0.75, 2.0]), min_size=1, max_size=4)
DTYPES = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.complex64: 1e-6}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(scales=FACTORS)
def test_each_part_counts_with_its_factor(dtype: torch.dtype, scales: list[float]) -> None:
    parts = [torch.randn(5, generator=generator(seed), dtype=torch.float64).to(dtype) for seed in range(len(scales))]
    out = torch.empty(5, dtype=dtype)
    for call in summation(parts, scales, out):
        call()
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected = sum(part.to(wide) * scale for part, scale in zip(parts, scales, strict=True))
    assert torch.allclose(out.to(wide), expected, rtol=DTYPES[dtype], atol=DTYPES[dtype])


def test_nothing_to_add_up_is_zero() -> None:
    out = torch.ones(3)
    weighted_sum([], [], out)
    assert out.tolist() == [0.0, 0.0, 0.0]
