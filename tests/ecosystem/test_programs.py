"""Programs made of torch's own parts: the drop-in comes to what torch's classes on gloo come to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.ecosystem.launching import DROP_IN, TORCH, launch
from tests.ecosystem.programs import PROGRAMS

pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(900)]

JOINED = "zero_redundancy_optimizer_under_join"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each program came to on each rank, under torch and under the drop-in."""
    folder = tmp_path_factory.mktemp("programs")
    for under in (TORCH, DROP_IN):
        launch(under, ["-m", "tests.ecosystem.run_programs", str(folder / under)], folder, timeout=800)
    return {under: json.loads((folder / under).read_text()) for under in (TORCH, DROP_IN)}


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != JOINED])
def test_it_comes_to_what_torch_comes_to(name: str, results: dict[str, list[dict[str, Any]]]) -> None:
    torch, ours = ([list(flat(rank[name])) for rank in results[under]] for under in (TORCH, DROP_IN))
    for values in (*torch, *ours):
        assert not str(values[0]).startswith("raised"), values[0]
    for mine, theirs in zip(ours, torch, strict=True):
        assert mine == [pytest.approx(x, rel=1e-5, abs=1e-7) if isinstance(x, float) else x for x in theirs]


def test_a_sharded_optimizer_under_join_is_the_plain_one(results: dict[str, list[dict[str, Any]]]) -> None:
    for rank in results[DROP_IN]:
        sharded, plain = (list(flat(each)) for each in rank[JOINED])
        assert sharded == pytest.approx(plain, rel=1e-6)


def flat(value: Any) -> Iterator[Any]:
    """The leaves of nested lists."""
    if isinstance(value, list):
        for item in value:
            yield from flat(item)
    else:
        yield value
