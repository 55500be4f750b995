"""The documentation: its code runs, its shell lines parse, its links lead somewhere, all of it is in the site.

A Python block is run by one of the tests named in ELSEWHERE, or here, on two ranks. Not run is a block whose first
line begins with `# wrong`, and one that needs a library which is not installed. A comment before a block says more:

    <!-- given: CODE -->        is run before it
    <!-- needs: MODULE -->      it is run where that can be imported
    <!-- same output: N -->     blocks that print the same
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import phalanx
from phalanx.launch import options
from tests.commands import BIN, run_command
from tests.test_readme import blocks_of, targets_of

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {path.name: path.read_text() for path in sorted(DOCS.glob("*.md"))}
TEMPLATES = DOCS / "templates"
ELSEWHERE = {
    "checkpoints.md": "procs/test_checkpoint_ends.py",
    "data.md": "pure/test_docs_data.py",
    "large_batch.md": "threads/test_docs_train.py",
    "three_forms.md": "procs/test_three_forms.py",
    "trackers.md": "threads/test_docs_train.py",
}
FENCE = re.compile(
    r"(?:^<!-- (?P<comment>.+?) -->\n)?^```(?P<language>\w*)(?P<more>[^\n]*)\n(?P<code>.*?)^```$", re.M | re.S
)
SNIPPET = re.compile(r'^--8<-- "([^":]+)(?::\w+)?"$', re.M)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page: what it is called here, its language, its code, and the comment before it."""

    name: str
    language: str
    code: str
    comment: str

    @property
    def page(self) -> str:
        return self.name.partition(":")[0]

    @property
    def is_wrong(self) -> bool:
        return self.code.startswith("# wrong")

    def said(self, what: str) -> str:
        """What the comment says after `what:`, if it begins so."""
        return self.comment.removeprefix(f"{what}: ") if self.comment.startswith(f"{what}: ") else ""


def of_page(page: str, text: str) -> list[Block]:
    """The blocks of a page, with what they take from other files put in."""
    found = []
    for match in FENCE.finditer(text):
        code = SNIPPET.sub(lambda name: (ROOT / name[1]).read_text().rstrip("\n"), match["code"])
        line = text.count("\n", 0, match.start("language")) + 1
        found.append(Block(f"{page}:{line}", match["language"], code, match["comment"] or ""))
    return found


BLOCKS = [block for page, text in PAGES.items() for block in of_page(page, text)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
RUN_HERE = [each for each in PYTHON if not (each.page in ELSEWHERE or each.is_wrong or each.said("needs"))]
by_name = pytest.mark.parametrize("block", RUN_HERE, ids=lambda block: block.name)


# -- code ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, str]]]:
    """How each block that is run here has ended on each of two ranks; one process for each rank runs them all."""
    folder = tmp_path_factory.mktemp("docs")
    last = sorted(RUN_HERE, key=lambda block: "dropin" in block.code)  # after that, torch's classes are others
    blocks = [{"name": each.name, "code": each.code, "given": each.said("given")} for each in last]
    (folder / "blocks.json").write_text(json.dumps(blocks))
    program = [str(ROOT / "tests" / "docs_program.py"), "blocks.json", str(folder)]
    said = ""
    try:
        run_command(
            [str(BIN / "phalanx"), "run", "-n", "2", *program], folder, env={"PYTHONPATH": str(ROOT)}, timeout=100
        )
    except (AssertionError, subprocess.TimeoutExpired) as error:
        said = str(error)
    files = [folder / f"rank-{rank}.json" for rank in range(2)]
    return [json.loads(file.read_text()) if file.exists() else {"": {"error": said}} for file in files]


@by_name
def test_a_block_runs_on_two_ranks(block: Block, outcomes: list[dict[str, dict[str, str]]]) -> None:
    for rank, ended in enumerate(outcomes):
        assert "" not in ended, f"rank {rank} has not begun: {ended['']['error']}"
        error = ended.get(block.name, {}).get("error", "")
        assert not error, f"on rank {rank}: {error}"
    failed = [name for ended in outcomes for name, each in ended.items() if "error" in each]
    if failed:
        pytest.skip(f"not told apart from {failed[0]}, which has failed")
    assert all(block.name in ended for ended in outcomes)


def test_what_is_to_print_the_same_does(outcomes: list[dict[str, dict[str, str]]]) -> None:
    printed = [outcomes[0].get(block.name, {}).get("said", "") for block in RUN_HERE if block.said("same output")]
    assert len(printed) == 2 and printed[0] == printed[1]
    assert re.fullmatch(r"loss \d\.\d{6}\n", printed[0])


def test_every_python_block_is_run_or_marked() -> None:
    for page, test in ELSEWHERE.items():
        assert page in (ROOT / "tests" / test).read_text(), f"tests/{test} does not run {page}"
    assert len([block for block in PYTHON if block.page == "checkpoints.md"]) == 1  # that test runs the first
    assert len(PYTHON) == sum(len(re.findall("^```python", text, re.M)) for text in PAGES.values())
    known = {"", "given", "needs", "file", "same output"}
    assert {block.comment.partition(":")[0] for block in BLOCKS} <= known
    assert all(block.page == "misuse.md" for block in PYTHON if block.is_wrong)


@pytest.mark.parametrize("block", [each for each in PYTHON if each not in RUN_HERE], ids=lambda block: block.name)
def test_a_block_that_is_not_run_here_compiles(block: Block) -> None:
    compile(block.code, block.name, "exec")


@pytest.mark.ecosystem
@pytest.mark.parametrize("block", [each for each in PYTHON if each.said("needs")], ids=lambda block: block.name)
def test_a_block_that_needs_a_library_runs(block: Block, tmp_path: Path) -> None:
    if importlib.util.find_spec(block.said("needs")) is None:
        pytest.skip("`make ecosystem` installs it")
    (tmp_path / "block.py").write_text(block.code)
    run_command([sys.executable, "block.py"], tmp_path)


def test_the_blocks_of_a_page_are_found() -> None:
    text = 'one\n\n<!-- given: y = x -->\n```python\n# wrong: no\nx\n```\n\n```bash title="a"\nls\n```\n```\nout\n```\n'
    first, second, third = of_page("a.md", text)
    assert (first.name, first.code, first.said("given"), first.is_wrong) == (
        "a.md:4", "# wrong: no\nx\n", "y = x", True
    )  # fmt: skip
    assert (second.language, second.code, second.said("given"), second.is_wrong) == ("bash", "ls\n", "", False)
    assert (third.language, third.code) == ("", "out\n")


# -- commands and templates ----------------------------------------------------------------------------


SHELL = [block for block in BLOCKS if block.language == "bash"]


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.name)
def test_shell_lines_parse_and_name_what_there_is(block: Block) -> None:
    done = subprocess.run(["bash", "-n"], input=block.code, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    joined = block.code.replace("\\\n", " ")
    known = {*options._OPTIONS, "-n", "-m"}
    for options_given in re.findall(r"phalanx run ((?:-[^\n]*? )*)\S+\.py", joined):
        assert not {each.partition("=")[0] for each in re.findall(r"(?<=\s)--?\w[\w-]*", " " + options_given)} - known
    asked = set(re.findall(r"^make (\w+)", joined, re.M))
    assert asked <= targets_of((ROOT / "Makefile").read_text())


def test_the_templates_of_launchers_start_phalanx() -> None:
    job = (TEMPLATES / "job.sbatch").read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", job, re.M))
    assert {"nodes", "ntasks-per-node", "cpus-per-task", "time", "signal"} <= asked.keys()
    assert asked["ntasks-per-node"] == "1"  # one launcher on each host
    grace = re.search(r"--grace (\d+)", job)
    assert grace and int(grace[1]) < int(asked["signal"].partition("@")[2])
    pods = yaml.safe_load((TEMPLATES / "pytorchjob.yaml").read_text())
    assert (pods["apiVersion"], pods["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = pods["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"}
    hosts = sum(spec["replicas"] for spec in replicas.values())
    for spec in replicas.values():
        (container,) = spec["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"  # the operator gives its variables to this one
        (command,) = container["args"]
        assert f"--nnodes {hosts} " in command and command.startswith("exec phalanx run ")
        grace = re.search(r"--grace (\d+)", command)
        assert grace and int(grace[1]) < spec["template"]["spec"]["terminationGracePeriodSeconds"]
    compile((TEMPLATES / "ray_train.py").read_text(), "ray_train.py", "exec")


@pytest.mark.parametrize("path", sorted(TEMPLATES.iterdir()), ids=lambda path: path.name)
def test_a_template_is_shown_on_the_page(path: Path) -> None:
    assert f"(templates/{path.name})" in PAGES["hosts.md"] and f'"docs/templates/{path.name}"' in PAGES["hosts.md"]
    if path.suffix == ".sbatch":
        subprocess.run(["bash", "-n", str(path)], check=True, capture_output=True)


# -- links and the site --------------------------------------------------------------------------------


LINK = re.compile(r"\[[^\[\]]*\]\(([^()\s]+)\)")


class Configuration(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name functions of Python, without them."""


Configuration.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda loader, suffix, node: suffix)


def leaves(tree: Any) -> list[str]:
    """The pages in a part of the navigation."""
    if isinstance(tree, str):
        return [tree]
    parts = tree if isinstance(tree, list) else list(tree.values())
    return [leaf for part in parts for leaf in leaves(part)]


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "`code`", FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """What headings of a page are called in links, and names that its reference documents."""
    found = set(re.findall(r"^::: (\S+)", text, re.M))
    for heading in re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.M):
        words = re.sub(r"\[([^\[\]]*)\]\([^()]*\)", r"\1", heading)
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", words).strip().lower()))
    return found


@pytest.mark.parametrize("page", ["README.md", *PAGES])
def test_links_lead_somewhere(page: str) -> None:
    file = ROOT / page if page == "README.md" else DOCS / page
    for link in LINK.findall(without_code(file.read_text())):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        assert not name.startswith("/"), f"{link}: an absolute path"
        target = file.parent / name if name else file
        assert target.exists(), f"{link} leads nowhere"
        assert page == "README.md" or target.resolve().is_relative_to(DOCS), f"{link} is not in the site"
        assert not anchor or anchor in anchors(target.read_text()), f"{link}: there is no such heading"


@pytest.mark.parametrize("path", [*sorted(DOCS.rglob("*.*")), ROOT / "mkdocs.yml"], ids=lambda path: path.name)
def test_no_path_of_somebodys_machine(path: Path) -> None:
    found = re.findall(r"(?<![\w.~:/<])/(?:home|root|Users|mnt|opt|srv)\b[\w/]*", path.read_text())
    assert not found


def test_every_page_is_in_the_navigation_once() -> None:
    configuration = yaml.load((ROOT / "mkdocs.yml").read_text(), Configuration)
    assert sorted(leaves(configuration["nav"])) == sorted(PAGES)
    assert configuration["site_dir"] + "/" in (ROOT / ".gitignore").read_text().splitlines()


def exported(file: Path) -> list[str]:
    """The names in a module's `__all__`."""
    (found,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return found


def test_the_reference_has_every_public_name() -> None:
    documented = set(re.findall(r"^::: (\S+)", PAGES["api.md"], re.M))
    public = {f"phalanx.{name}" for name in phalanx.__all__}
    public |= {f"phalanx.checkpoint.{name}" for name in exported(ROOT / "phalanx" / "checkpoint" / "__init__.py")}
    assert not public - documented
    for name in documented - public:  # what those return
        module, _, attribute = name.rpartition(".")
        tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text())
        assert attribute in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}, name


def test_the_page_of_a_link_and_a_heading_are_read_as_written() -> None:
    text = "# One `two`: three\n\n[a](b.md#c) `[no](no.md)`\n```\n# no\n[no](no.md)\n```\n::: phalanx.x\n"
    assert LINK.findall(without_code(text)) == ["b.md#c"]
    assert anchors(text) == {"one-two-three", "phalanx.x"}
    assert leaves([{"A": ["a.md", {"B": "b.md"}]}, "c.md"]) == ["a.md", "b.md", "c.md"]
    assert len(blocks_of(text)) == 1


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    run_command(build, ROOT, env={"NO_MKDOCS_2_WARNING": "1"})
    reference = (tmp_path / "site" / "api.html").read_text()
    wanted = [*phalanx.__all__, "DistributedDataParallel.weigh", "DistributedDataParallel.no_sync"]
    assert not [name for name in wanted if f'id="phalanx.{name}"' not in reference]
    assert (tmp_path / "site" / "how_it_works.html").read_text().count('class="mermaid"') == 3
    assert (tmp_path / "site" / "templates" / "job.sbatch").exists()
    assert (tmp_path / "site" / "search" / "search_index.json").stat().st_size > 100_000
