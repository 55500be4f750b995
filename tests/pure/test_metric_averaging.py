"""The mean of metrics over ranks: every item counts once, whoever gave which key."""

from __future__ import annotations

import json
import math
import random

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.errors import MisuseError, RankMismatchError
from phalanx.train.trackers.averaging import Report, mean, report

items = st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(-99, 99), max_size=4))


@given(st.lists(st.none() | items, min_size=1, max_size=5))
def test_it_is_the_mean_of_all_items_of_the_ranks_that_gave_the_key(ranks: list[dict | None]) -> None:
    """Each rank has some items per key, reports their local mean, and the whole is the mean of all items."""
    reports = [
        None
        if measured is None
        else report(
            {key: sum(seen) / len(seen) if seen else math.nan for key, seen in measured.items()},
            7,
            {key: len(seen) for key, seen in measured.items()},
        )
        for measured in ranks
    ]
    expected: dict[str, list[int]] = {}
    for measured in filter(None, ranks):
        for key, seen in measured.items():
            expected.setdefault(key, []).extend(seen)
    got = mean(reports)
    assert list(got) == list(expected)
    for key, seen in expected.items():
        assert got[key] == pytest.approx(sum(seen) / len(seen) if seen else math.nan, nan_ok=True)


@given(st.lists(st.floats() | st.integers(-9, 9), min_size=1, max_size=4), st.floats(0, 1e300))
def test_a_report_survives_its_way_to_the_others(values: list[float], n: float) -> None:
    sent = report({str(i): value for i, value in enumerate(values)}, 3, n)
    got = Report(**json.loads(json.dumps(sent.record())))
    assert got.step == 3
    for key, (value, count) in sent.values.items():
        assert got.values[key][1] == count
        assert got.values[key][0] == value or math.isnan(value)


def test_without_n_every_rank_counts_as_one() -> None:
    assert mean([report({"loss": 1.0}, 0), report({"loss": 4.0}, 0)]) == {"loss": 2.5}


def test_a_rank_without_items_may_have_a_nan_and_one_with_items_may_not_hide_it() -> None:
    assert mean([report({"a": math.nan}, 0, 0), report({"a": 3.0}, 0, 2)]) == {"a": 3.0}
    assert math.isnan(mean([report({"a": math.nan}, 0, 1), report({"a": 3.0}, 0, 2)])["a"])
    assert math.isnan(mean([report({"a": 1.0}, 0, 0)])["a"])


def test_all_ranks_get_the_same_bits_in_the_same_order() -> None:
    draw = random.Random(0)
    reports = [report({"b": draw.random(), "a": draw.random()}, 1, draw.random()) for _ in range(5)]
    assert len({json.dumps(mean(reports, rank)) for rank in range(5)}) == 1
    assert list(mean(reports)) == ["b", "a"]


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (True, 1.0),
        (torch.tensor(2.5), 2.5),
        (torch.tensor([[2.5]], dtype=torch.bfloat16, requires_grad=True), 2.5),
        (numpy.float32(0.5), 0.5),
        (numpy.array([3]), 3.0),
    ],
)
def test_what_is_one_number_can_be_logged(value: object, number: float) -> None:
    assert mean([report({"x": value}, numpy.int64(4))]) == {"x": number}


@pytest.mark.parametrize(
    ("values", "step", "n", "text"),
    [
        ({"x": torch.ones(2, 3)}, 0, 1, r"x is a Tensor of shape \(2, 3\), not one number"),
        ({"x": "1.5"}, 0, 1, "x is a str, not one number"),
        ({"x": 1j}, 0, 1, "x is a complex, not one number"),
        ({"x": None}, 0, 1, "x is a NoneType"),
        ({"step": 1.0}, 0, 1, "'step' cannot be a key"),
        ({"": 1.0}, 0, 1, "'' cannot be a key"),
        ({"a\r": 1.0}, 0, 1, r"'a\\r' cannot be a key"),
        ({3: 1.0}, 0, 1, "3 cannot be a key"),
        ({"x": 1.0}, 0.5, 1, "step=0.5 is not an integer"),
        ({"x": 1.0}, 0, -1, "n=-1 is no number of items"),
        ({"x": 1.0}, 0, math.nan, "n=nan is no number of items"),
        ({"x": 1.0}, 0, {"x": math.inf}, "is no number of items"),
    ],
)
def test_what_cannot_be_logged_is_an_error_for_all_that_names_the_rank(
    values: dict, step: object, n: object, text: str
) -> None:
    wrong = Report(**json.loads(json.dumps(report(values, step, n).record())))
    with pytest.raises(MisuseError, match=rf"on rank 1: .*{text}"):
        mean([report({}, 0), wrong])


def test_ranks_at_different_steps_are_told_so() -> None:
    with pytest.raises(RankMismatchError) as told:
        mean([report({"a": 1}, 5), None, report({"a": 1}, 6)], rank=2)
    assert told.value.calls == {0: "tracker.log(..., step=5)", 2: "tracker.log(..., step=6)"}
    assert told.value.rank == 2
