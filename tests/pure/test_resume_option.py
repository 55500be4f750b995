"""`phalanx run --resume` and what a rank finds of it in its environment; the door of phalanx.seed."""

from __future__ import annotations

from pathlib import Path

import pytest

import phalanx
from phalanx import MisuseError
from phalanx.launch.environment import Launcher, Place, child_environment
from phalanx.launch.options import parse


@pytest.mark.parametrize(("given", "found"), [([], ""), (["--resume", "auto"], "auto"), (["--resume=runs/a"], "path")])
def test_every_rank_is_told_where_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str], found: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    expected = str(tmp_path / "runs" / "a") if found == "path" else found  # ranks may run in another folder
    for place in parse(["-n", "2", *given, "script.py", "--resume", "no"]).places(29500, "run"):
        assert place.resume == expected
        env = child_environment(place, 1, {})
        assert Place.from_environment(env).resume == expected and ("PHALANX_RESUME" in env) == bool(expected)


@pytest.mark.parametrize("env", [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "1",
                                                                    "SLURM_STEP_ID": "0"}])  # fmt: skip
def test_with_any_launcher_the_variable_counts(env: dict[str, str]) -> None:
    place = Place.from_environment({**env, "PHALANX_RESUME": "auto"})
    assert place.resume == "auto" and place.launcher is not Launcher.PHALANX


@pytest.mark.parametrize("wrong", [-1, 2**63, 1.5, "7", True])
def test_a_seed_is_an_integer(wrong: object) -> None:
    with pytest.raises(MisuseError, match=r"not an integer from 0 to 2\*\*63 - 1"):
        phalanx.seed(wrong)
