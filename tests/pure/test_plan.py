"""The bucket plan: every gradient has one place, buckets tile their regions, and the hash tells models apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.reduce.plan import NOWHERE, Bucket, Entry, Region, fingerprint, first_difference, make_plan

SIZES = {"float32": 4, "float16": 2, "float64": 8, "complex64": 8}


def entry(name: str, *shape: int, dtype: str = "float32", sparse: bool = False, device: str = "cpu") -> Entry:
    return Entry(name, shape, dtype, SIZES[dtype], device, sparse)


@st.composite
def models(draw: st.DrawFn) -> list[Entry]:
    shapes = draw(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=30))
    return [
        entry(
            f"p{number}", *shape, dtype=draw(st.sampled_from(sorted(SIZES))),
            device=draw(st.sampled_from(["cpu", "cuda:0"])), sparse=draw(st.integers(0, 9)) == 0,
        )
        for number, shape in enumerate(shapes)
    ]  # fmt: skip


caps = st.lists(st.integers(1, 4000), min_size=1, max_size=4)


def test_two_layers_are_placed_in_reverse_order_of_registration():
    plan = make_plan([entry("a", 2, 3), entry("b", 4)], [1 << 20])
    assert plan.regions == (Region("float32", "cpu", 16),)  # 10 elements, rounded up to 64 bytes
    assert plan.places == ((0, 4), (0, 0))
    assert plan.buckets == (Bucket(0, 0, 0, 10, (1, 0)),)


def test_a_bucket_is_closed_when_it_reaches_its_size_and_the_next_begins_at_a_cache_line():
    plan = make_plan([entry("a", 5), entry("b", 5), entry("c", 5)], [20])
    assert [(b.start, b.stop, b.members) for b in plan.buckets] == [(0, 5, (2,)), (16, 21, (1,)), (32, 37, (0,))]


def test_the_last_size_repeats():
    plan = make_plan([entry(f"p{i}", 10) for i in range(9)], [40, 80])
    assert [len(b.members) for b in plan.buckets] == [1, 2, 2, 2, 2]


def test_empty_and_sparse_parameters_have_no_place():
    plan = make_plan([entry("a", 3), entry("e", 0, 7), entry("s", 9, 2, sparse=True)], [1])
    assert plan.places == ((0, 0), NOWHERE, NOWHERE)
    assert [b.members for b in plan.buckets] == [(0,)]


def test_a_model_of_only_sparse_parameters_has_no_regions():
    plan = make_plan([entry("s", 9, 2, sparse=True)], [1])
    assert (plan.regions, plan.buckets, plan.spans([0]), plan.whole()) == ((), (), [], [])


def test_each_dtype_and_device_has_its_region():
    plan = make_plan([entry("a", 1), entry("b", 1, dtype="float16"), entry("c", 1, device="cuda:0")], [1 << 20])
    assert {(r.dtype, r.device) for r in plan.regions} == {
        ("float32", "cpu"), ("float16", "cpu"), ("float32", "cuda:0"),
    }  # fmt: skip


@given(models(), caps)
def test_every_dense_parameter_has_a_place_of_its_own(entries: list[Entry], sizes: list[int]):
    plan = make_plan(entries, sizes)
    taken: list[tuple[int, int, int]] = []
    for index, place in enumerate(plan.places):
        dense = not entries[index].sparse and entries[index].count > 0
        assert (place is not NOWHERE) == dense
        if place is not NOWHERE:
            region = plan.regions[place[0]]
            assert (region.dtype, region.device) == (entries[index].dtype, entries[index].device)
            taken.append((place[0], place[1], place[1] + entries[index].count))
            assert taken[-1][2] <= region.count
    taken.sort()
    for (region, _, stop), (other, start, _) in zip(taken, taken[1:], strict=False):
        assert region != other or stop <= start


@given(models(), caps)
def test_buckets_hold_each_dense_parameter_once_and_are_ranges_without_gaps(entries: list[Entry], sizes: list[int]):
    plan = make_plan(entries, sizes)
    members = [index for bucket in plan.buckets for index in bucket.members]
    assert sorted(members) == [index for index, place in enumerate(plan.places) if place is not NOWHERE]
    for number, bucket in enumerate(plan.buckets):
        assert bucket.index == number
        at = bucket.start
        for index in bucket.members:
            assert plan.places[index] == (bucket.region, at)
            at += entries[index].count
        assert at == bucket.stop
        assert bucket.start * entries[bucket.members[0]].itemsize % 64 == 0


@given(models(), caps)
def test_only_the_last_bucket_of_a_region_may_be_below_its_size_and_none_goes_on_beyond_it(
    entries: list[Entry], sizes: list[int]
):
    plan = make_plan(entries, sizes)
    for number in range(len(plan.regions)):
        buckets = sorted((b for b in plan.buckets if b.region == number), key=lambda b: b.start)
        for position, bucket in enumerate(buckets):
            item = entries[bucket.members[0]].itemsize
            cap = sizes[min(position, len(sizes) - 1)]
            if position < len(buckets) - 1:
                assert (bucket.stop - bucket.start) * item >= cap
            assert (bucket.stop - bucket.start - entries[bucket.members[-1]].count) * item < cap


@given(models(), caps)
def test_buckets_are_launched_in_the_order_in_which_backward_begins_them(entries: list[Entry], sizes: list[int]):
    firsts = [bucket.members[0] for bucket in make_plan(entries, sizes).buckets]
    assert firsts == sorted(firsts, reverse=True)


@given(models(), caps, st.data())
def test_spans_cover_exactly_the_used_parameters(entries: list[Entry], sizes: list[int], data: st.DataObject):
    plan = make_plan(entries, sizes)
    used = data.draw(st.sets(st.integers(0, len(entries) - 1)))
    covered = [(region, at) for region, start, stop in plan.spans(used) for at in range(start, stop)]
    wanted = [
        (plan.places[i][0], plan.places[i][1] + k)
        for i in used if plan.places[i] is not NOWHERE for k in range(entries[i].count)
    ]  # fmt: skip
    assert len(covered) == len(set(covered))
    assert sorted(covered) == sorted(wanted)
    spans = plan.spans(used)
    assert not any(a[0] == b[0] and a[2] == b[1] for a, b in zip(spans, spans[1:], strict=False)), "not joined"


@given(models(), caps)
def test_all_spans_lie_within_the_whole(entries: list[Entry], sizes: list[int]):
    plan = make_plan(entries, sizes)
    ends = {region: stop for region, _, stop in plan.whole()}
    assert all(0 <= start < stop <= ends[region] for region, start, stop in plan.spans(range(len(entries))))


@given(models(), caps)
def test_equal_models_have_equal_plans(entries: list[Entry], sizes: list[int]):
    assert make_plan(entries, sizes) == make_plan(list(entries), tuple(sizes))
    assert 0 <= fingerprint(entries, sizes) < 1 << 63


@given(models(), caps, st.data())
def test_any_change_changes_the_fingerprint_and_is_named(entries: list[Entry], sizes: list[int], data: st.DataObject):
    index = data.draw(st.integers(0, len(entries) - 1))
    old = entries[index]
    new = data.draw(
        st.sampled_from(
            [
                replace(old, name="q"),
                replace(old, shape=(*old.shape, 2)),
                replace(old, dtype="bfloat16"),
                replace(old, sparse=not old.sparse),
            ]
        )
    )
    changed = [*entries[:index], new, *entries[index + 1 :]]
    assert fingerprint(changed, sizes) != fingerprint(entries, sizes)
    text = first_difference({0: entries, 3: changed})
    assert f"parameter {index}, {old.name!r}" in text
    assert "rank 0 has" in text and "rank 3 has" in text


@given(models(), caps)
def test_one_parameter_less_is_a_difference_and_so_is_another_bucket_size(entries: list[Entry], sizes: list[int]):
    assert fingerprint(entries[:-1], sizes) != fingerprint(entries, sizes)
    assert f"{entries[-1].name!r}: rank 0 has no parameter" in first_difference({0: entries[:-1], 1: entries})
    assert fingerprint(entries, [*sizes, 7]) != fingerprint(entries, sizes)


def test_swapped_registration_of_equal_shapes_is_a_difference():
    ab, ba = [entry("a", 2), entry("b", 2)], [entry("b", 2), entry("a", 2)]
    assert fingerprint(ab, [1]) != fingerprint(ba, [1])
    assert first_difference({0: ab, 1: ba}).startswith("the first difference is parameter 0, 'a'")


def test_the_device_may_differ():
    here, there = [entry("a", 2, device="cuda:0")], [entry("a", 2, device="cuda:1")]
    assert fingerprint(here, [1]) == fingerprint(there, [1])
    assert first_difference({0: here, 1: there}) == ""


def test_the_first_rank_that_differs_is_named():
    same, other = [entry("a", 2)], [entry("a", 3)]
    assert "rank 0 has a: float32 [2], rank 2 has a: float32 [3]" in first_difference({0: same, 1: same, 2: other})


@pytest.mark.parametrize(("shape", "count"), [((), 1), ((3,), 3), ((2, 0), 0), ((2, 3, 4), 24)])
def test_count_of_elements(shape: tuple[int, ...], count: int):
    assert entry("a", *shape).count == count
