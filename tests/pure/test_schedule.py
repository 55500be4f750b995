"""Policies per layer: what a flush synchronises, for any policies and any local parameters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.reduce.schedule import ALWAYS, NEVER, Round, Schedule, matching

NAMES = ["encoder.weight", "encoder.bias", "encoder.deep.weight", "head.weight", "head.bias"]
EVERYTHING = frozenset(range(len(NAMES)))


def schedule(*policies: tuple[str, int | str]) -> Schedule:
    made = Schedule()
    made.name(NAMES)
    for pattern, every in policies:
        made.set(pattern, every)
    return made


def test_without_policies_everything_is_one_round() -> None:
    due = schedule().due(EVERYTHING, frozenset())
    assert due.due == (Round(None),)
    assert not due.held


def test_local_parameters_are_left_out() -> None:
    assert schedule().due(EVERYTHING, frozenset({1, 2})).due == (Round(frozenset({0, 3, 4})),)


@pytest.mark.parametrize(
    ("pattern", "found"), [("encoder", {0, 1, 2}), ("*.bias", {1, 4}), ("head.*", {3, 4}), ("x", set())]
)
def test_patterns_are_of_the_shell_and_prefixes_are_of_whole_parts(pattern: str, found: set[int]) -> None:
    assert matching(NAMES, pattern) == found


@pytest.mark.parametrize("every", [0, -1, 1.5, "often", None])
def test_an_impossible_policy_is_refused(every: object) -> None:
    with pytest.raises(ValueError, match="neither a positive number"):
        schedule().set("encoder", every)  # type: ignore[arg-type]


@given(
    st.lists(
        st.tuples(st.sampled_from(["encoder", "*.bias", "head.*", "*"]), st.sampled_from([1, 2, 3, ALWAYS, NEVER])),
        max_size=4,
    ),
    st.frozensets(st.sampled_from(sorted(EVERYTHING))),
    st.integers(1, 12),
)
def test_every_parameter_is_due_held_local_or_never(
    policies: list[tuple[str, int | str]], local: frozenset[int], flushes: int
) -> None:
    made = schedule(*policies)
    governing = {}
    for pattern, every in policies:
        governing.update(dict.fromkeys(matching(NAMES, pattern), every))
    for number in range(1, flushes + 1):
        rounds = made.due(EVERYTHING, local)
        due = [index for each in rounds.due for index in (EVERYTHING if each.members is None else each.members)]
        assert len(due) == len(set(due)), "a parameter is due twice"
        assert not set(due) & local and not set(due) & rounds.held
        for index in EVERYTHING - local:
            every = governing.get(index, ALWAYS)
            wanted = every != NEVER and (every == ALWAYS or number % int(every) == 0)
            if len(policies) == len({pattern for pattern, _ in policies}):  # setting a policy again restarts it
                assert (index in due) == wanted
                assert (index in rounds.held) == (not wanted and every != NEVER)


@pytest.mark.parametrize("pattern", ["encoder", "*"])
def test_following_keeps_count_with_those_who_run(pattern: str) -> None:
    running, following = schedule((pattern, 3)), schedule((pattern, 3))
    for _ in range(7):
        for each in running.due(EVERYTHING, frozenset()).due:
            following.followed(following.round_of(each.members), frozenset())
    assert [p.flushes for p in running.policies] == [p.flushes for p in following.policies]
