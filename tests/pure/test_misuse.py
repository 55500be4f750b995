"""The list of wrong uses: silencing by name, the warnings' place and text, and the page that explains each."""

from __future__ import annotations

import ast
import pickle
import re
import warnings
from pathlib import Path

import pytest

import phalanx
from phalanx import MisuseError, MisuseWarning, ReplicaDriftError, misuse

PAGE = (Path(__file__).parents[2] / "docs" / "misuse.md").read_text()
SECTIONS = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))


@pytest.fixture(autouse=True)
def nothing_silenced():
    before = set(misuse.silenced)
    misuse.silenced.clear()
    yield
    misuse.silenced.clear()
    misuse.silenced.update(before)


def test_the_page_has_a_section_and_a_row_for_each_name_and_for_no_other() -> None:
    assert sorted(SECTIONS) == sorted(misuse.NAMES)
    assert sorted(re.findall(r"^\| \[`(\S+)`\]\(#\1\)", PAGE, re.M)) == sorted(misuse.NAMES)


@pytest.mark.parametrize("name", misuse.NAMES)
def test_each_section_shows_wrong_and_right_code_that_compiles(name: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", SECTIONS[name], re.S)
    assert [block.split()[1].rstrip(":") for block in blocks] == ["wrong", "right"]
    for block in blocks:
        ast.parse(block)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(MisuseError, match="replica-drift"):
        phalanx.silence("same-seed", "no-such-name")
    with pytest.warns(MisuseWarning):
        misuse.warn("wrapped-twice", "what", "instead")


def test_a_warning_names_the_users_line_and_how_to_silence_it() -> None:
    with pytest.warns(MisuseWarning) as caught:
        misuse.warn("same-seed", "all draw alike", "seed apart", 3)
    (warning,) = caught
    assert warning.filename == __file__
    assert (warning.message.name, warning.message.rank) == ("same-seed", 3)
    assert str(warning.message) == (
        "[rank 3] all draw alike\nInstead: seed apart\nTo silence this: phalanx.silence('same-seed')"
    )


def test_what_is_silenced_neither_warns_nor_raises() -> None:
    with pytest.raises(MisuseError, match=r"phalanx.silence\('step-in-backward'\)"):
        misuse.refuse("step-in-backward", "what", "instead", 0)
    phalanx.silence("step-in-backward", "same-seed")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        misuse.refuse("step-in-backward", "what", "instead", 0)
        misuse.warn("same-seed", "what", "instead")


def test_a_drift_error_reads_well_and_can_be_pickled() -> None:
    error = ReplicaDriftError(
        [[0, 2], [1], [3]], ["a", "b", "c", "d", "e"], 4, 9, 2, {0: "norm 1", 1: "norm 2", 3: "norm 3"}, "Look there."
    )
    assert (error.parameter, error.odd) == ("a", [1, 3])
    assert str(error).splitlines() == [
        "[rank 2] the replicas of the model differ: 'a' does, and so do 4 more (b, c, d, ...)",
        "  ranks 0, 2: norm 1",
        "  rank 1: norm 2",
        "  rank 3: norm 3",
        "It was last seen equal in synchronised step 4, and differs in synchronised step 9.",
        "Look there.",
    ]
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.groups) == (str(error), error.groups)
