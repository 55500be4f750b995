"""What is delivered: the wheel and the source distribution, their contents, and what an import costs."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import phalanx
from tests.commands import run_command
from tests.test_readme import BLOCKS

ROOT = Path(__file__).parents[1]
NOT_OURS = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist", "runs", "site")
IMPORT_SECONDS = 0.030


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, without what tools leave in it."""
    copy = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT, copy, ignore=NOT_OURS, dirs_exist_ok=True)
    return copy


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the source distribution, and the wheel that is made from it."""
    folder = tmp_path_factory.mktemp("dist")
    run_command([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)], folder)
    return folder


@pytest.fixture(scope="module")
def fresh(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment with the wheel in it; what it depends on is that of this environment."""
    home = tmp_path_factory.mktemp("fresh")
    run_command([sys.executable, "-m", "venv", "--without-pip", str(home)], home)
    python = home / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "-q", str(wheel)]
    run_command(pip, home)
    libraries = home / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    # A path is all that is taken over: an editable installation's own files are not read through it.
    (libraries / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


def files(root: Path, *patterns: str) -> set[str]:
    return {path.relative_to(root).as_posix() for pattern in patterns for path in root.glob(pattern)}


def test_the_wheel_has_every_module_and_the_types(source: Path, built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if name.endswith(".py")} == files(source, "phalanx/**/*.py")
    assert {"phalanx/py.typed", "phalanx/__init__.pyi"} <= names
    assert {name.partition("/")[0] for name in names} == {"phalanx", f"phalanx_ddp-{phalanx.__version__}.dist-info"}


def test_the_source_distribution_can_be_tested(source: Path, built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    wanted = files(source, *(f"{part}/**/*.py" for part in ("tests", "examples", "benchmarks")), "tests/**/*.json")
    wanted |= files(source, "docs/**/*.*", "*.md", "LICENSE", "Makefile", "constraints.txt", "pyproject.toml")
    assert not wanted - names
    assert not [name for name in names if name.endswith(".pyc") or "/." in name]


def test_a_new_environment_has_the_command_and_the_backend(fresh: Path, tmp_path: Path) -> None:
    where = run_command([str(fresh / "python"), "-c", "import phalanx; print(phalanx.__file__)"], tmp_path)
    assert str(fresh.parent) in where
    assert "usage: phalanx" in run_command([str(fresh / "phalanx"), "--help"], tmp_path)
    code = "from importlib.metadata import entry_points; print(*entry_points(group='torch.backends'))"
    assert "phalanx.group.autoload:register" in run_command([str(fresh / "python"), "-c", code], tmp_path)


@pytest.mark.full
def test_a_new_environment_trains_on_two_ranks(fresh: Path, tmp_path: Path) -> None:
    (block,) = (block for block in BLOCKS if block.file == "train.py")
    (tmp_path / "train.py").write_text(block.code)
    said = run_command([str(fresh / "phalanx"), "run", "-n", "2", "train.py"], tmp_path)
    assert "loss 0.0" in said


def test_an_import_costs_nothing_and_brings_nothing_in() -> None:
    code = (
        "import sys, time; began = time.process_time(); import phalanx; took = time.process_time() - began; "
        "print(took, *{'torch', 'numpy', 'rich', 'asyncio', 'multiprocessing'} & set(sys.modules))"
    )
    # Processor time, and the best of several: another program on the machine is no reason to fail.
    said = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    times = [each.stdout.split() for each in said]
    assert all(len(each) == 1 for each in times), times
    assert min(float(each[0]) for each in times) < IMPORT_SECONDS


def test_type_checkers_see_the_names_that_there_are() -> None:
    stub = ast.parse((ROOT / "phalanx" / "__init__.pyi").read_text())
    found = {
        alias.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    wanted = dict(phalanx._HOMES) | dict.fromkeys(phalanx._PACKAGES, "phalanx")
    missing = [f"from {home} import {name} as {name}" for name, home in wanted.items() if found.get(name) != home]
    assert not missing, "phalanx/__init__.pyi lacks\n" + "\n".join(missing)
    assert not set(found) - set(wanted), "phalanx/__init__.pyi has names that are not public"


@pytest.mark.full
@pytest.mark.timeout(420)
def test_the_types_are_right() -> None:
    pytest.importorskip("mypy")
    # Minutes the first time; later ones read what mypy has kept in the tree.
    run_command([sys.executable, "-m", "mypy"], ROOT, timeout=400)


def test_versions_are_one() -> None:
    assert f'\nversion = "{phalanx.__version__}"\n' in (ROOT / "pyproject.toml").read_text()
