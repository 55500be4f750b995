"""Who may import whom, and other rules about the shape of the code, held by reading it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "phalanx"

# The story of one training step, in order. A package may import the parts of Phalanx named here, and itself.
MAY_IMPORT = {
    "errors": [],
    "misuse": ["errors"],
    "status": ["errors"],  # what ranks are doing: asked from within (group) and from outside (launch)
    "launch": ["errors", "status"],
    "transport": ["errors"],
    "group": ["errors", "misuse", "status", "transport", "launch.environment"],
    "reduce": ["errors", "misuse", "transport", "group"],
    "parallel": ["errors", "misuse", "transport", "group", "reduce", "launch.environment"],
    "nn": ["errors", "misuse", "group", "parallel"],
    "data": ["errors", "misuse", "group", "parallel"],
    "train": ["errors", "misuse", "group", "parallel", "nn", "data", "launch.environment"],
    "observe": ["errors", "launch", "transport", "group", "reduce", "parallel", ""],  # to measure it
    "testing": ["errors", "group", "transport", "launch.environment"],
    "checkpoint": ["errors", "group", "parallel", "train", "launch.environment"],
    "dropin": ["errors", "group", "parallel", "nn", "data", "launch.environment"],
    "integrations": ["errors", "group", "parallel", "nn", "data"],
    "__main__": ["launch"],
    "": ["*"],  # phalanx/__init__.py, the shop window
}
WITHOUT_TORCH = ["", "errors", "misuse", "status", "launch", "group.ticket"]
IMPORTS_IN_FUNCTIONS = ["__init__.py", "group/autoload.py", "launch/cli.py"]
READS_THE_ENVIRONMENT = ["launch/environment.py"]
LINES = 400

FILES = sorted(path for path in ROOT.rglob("*.py"))
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))


@each_file
def test_a_file_imports_only_what_the_table_allows(path: Path) -> None:
    wrong = not_allowed(module_of(path), imported_by(path))
    assert not wrong, f"{module_of(path) or 'phalanx'} may not import {', '.join(wrong)}; see MAY_IMPORT"


@each_file
def test_a_file_is_short_enough_to_be_read_at_once(path: Path) -> None:
    count = len(path.read_text().splitlines())
    assert count <= LINES, f"{count} lines: does the file do two jobs?"


@each_file
def test_imports_stand_at_the_top_of_a_file(path: Path) -> None:
    if relative(path) not in IMPORTS_IN_FUNCTIONS:
        lines = imports_in_functions(ast.parse(path.read_text()))
        assert not lines, f"imports inside functions, in lines {lines}"


@each_file
def test_the_environment_is_read_in_one_place(path: Path) -> None:
    if relative(path) not in READS_THE_ENVIRONMENT:
        lines = reads_of_the_environment(ast.parse(path.read_text()))
        assert not lines, f"the environment is read in lines {lines}: take it from launch/environment.py"


@pytest.mark.parametrize("name", WITHOUT_TORCH, ids=lambda name: name or "phalanx")
def test_what_must_start_fast_reaches_no_torch(name: str) -> None:
    for path in files_of(name):
        chain = way_to_torch(module_of(path))
        assert not chain, "torch is imported: " + " -> ".join(chain)


def test_modules_import_one_another_in_no_circle() -> None:
    files = {module_of(path): path for path in FILES if module_of(path)}
    graph = {name: submodules(imported_by(path, at_start=True)) for name, path in files.items()}
    circle = circle_in(graph)
    assert not circle, " -> ".join(circle)


@pytest.mark.parametrize(
    ("name", "imports", "wrong"),
    [
        ("reduce.reducer", {"phalanx.group.group", "torch"}, []),
        ("reduce.reducer", {"phalanx.parallel.ddp"}, ["phalanx.parallel.ddp"]),
        ("group.group", {"phalanx.launch.environment"}, []),
        ("group.group", {"phalanx.launch.supervisor"}, ["phalanx.launch.supervisor"]),
        ("launch.cli", {"phalanx.group"}, ["phalanx.group"]),
        ("parallel.ddp", {"phalanx.testing"}, ["phalanx.testing"]),
        ("parallel.ddp", {"phalanx"}, ["phalanx"]),
        ("observe.bench", {"phalanx"}, []),
        ("observe.bench", {"phalanx.testing"}, ["phalanx.testing"]),
    ],
)
def test_the_table_is_read_as_written(name: str, imports: set[str], wrong: list[str]) -> None:
    assert not_allowed(name, imports) == wrong


@pytest.mark.parametrize(
    ("code", "reads"),
    [
        ("import os\nos.environ['A']", [2]),
        ("import os\nprint(os.getenv('A'))", [2]),
        ("from os import environ", [1]),
        ("import os\nfor k in os.environ: pass", [2]),
        ("import os\nos.environ['A'] = '1'", []),
        ("import os\nos.environ.update(A='1')", []),
        ("import os\nos.environ.setdefault('A', '1')", [2]),
    ],
)
def test_a_read_of_the_environment_is_told_from_a_write(code: str, reads: list[int]) -> None:
    assert reads_of_the_environment(ast.parse(code)) == reads


def test_a_circle_is_found() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


# ------------------------------------------------------------------ reading code


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    """Return the name of a file's module within phalanx: `group.ticket`, `group`, and nothing for phalanx."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


def files_of(name: str) -> list[Path]:
    return [path for path in FILES if within(module_of(path), name)]


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def imported_by(path: Path, at_start: bool = False) -> set[str]:
    """Return the full names of the modules that a file imports; with `at_start`, when it is itself."""
    names: set[str] = set()
    package = ["phalanx", *path.relative_to(ROOT).parent.parts]
    tree = ast.parse(path.read_text())
    later = imports_in_functions(tree) if at_start else []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and node.lineno not in later:
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.lineno not in later:
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            source = ".".join([*base, node.module] if node.module else base)
            names |= {submodule_or(source, alias.name) for alias in node.names}
    return names


def submodule_or(source: str, name: str) -> str:
    """Return `source.name` where that is a module of phalanx, else `source`."""
    if source.split(".")[0] != "phalanx":
        return source
    place = ROOT.joinpath(*source.split(".")[1:], name)
    return f"{source}.{name}" if place.with_suffix(".py").exists() or place.is_dir() else source


def not_allowed(module: str, imports: set[str]) -> list[str]:
    package = module.split(".")[0]
    allowed = MAY_IMPORT.get(package)
    assert allowed is not None, f"phalanx.{package} is not in MAY_IMPORT: where does it stand?"
    if "*" in allowed:
        return []
    ours = {name for name in imports if within(name, "phalanx")}
    good = ["phalanx" if part == "" else f"phalanx.{part}" for part in (package, *allowed)]
    return sorted(name for name in ours if not any(covers(part, name) for part in good))


def covers(part: str, name: str) -> bool:
    return name == part if part == "phalanx" else within(name, part)


def submodules(imports: set[str]) -> set[str]:
    return {name.removeprefix("phalanx.") for name in imports if name.startswith("phalanx.")}


def imports_in_functions(tree: ast.AST) -> list[int]:
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    found = {
        inner.lineno
        for function in functions
        for inner in ast.walk(function)
        if isinstance(inner, (ast.Import, ast.ImportFrom))
    }
    return sorted(found)


def reads_of_the_environment(tree: ast.AST) -> list[int]:
    """Return the lines that look at the environment; setting a variable and `update` are no look."""
    writes = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            writes.add(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "update":
                writes.add(node.func.value)
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            if node.attr in ("environ", "environb", "getenv", "getenvb") and node not in writes:
                lines.add(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            if any(alias.name in ("environ", "environb", "getenv", "getenvb") for alias in node.names):
                lines.add(node.lineno)
    return sorted(lines)


def way_to_torch(module: str, seen: frozenset[str] = frozenset()) -> list[str]:
    """Return the chain of modules by which importing a module comes to import torch, or nothing."""
    path = next((path for path in FILES if module_of(path) == module), None)
    if path is None:
        return []
    imports = imported_by(path, at_start=True)
    if any(within(name, "torch") for name in imports):
        return [module, "torch"]
    parents = {module.rpartition(".")[0]} - {module}  # Importing a.b imports a first.
    for name in sorted((submodules(imports) | parents) - seen):
        if chain := way_to_torch(name, seen | {module, name}):
            return [module, *chain]
    return []


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """Return one circle of modules, its first again at the end, or nothing."""
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> list[str]:
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in done or module not in graph:
            return []
        found = next(filter(None, (visit(name, [*trail, module]) for name in sorted(graph[module]))), [])
        done.add(module)
        return found

    return next(filter(None, (visit(module, []) for module in sorted(graph))), [])
