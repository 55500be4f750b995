"""What the README shows works: every block of code in it is run.

A comment before a block says how. `<!-- file: NAME -->` puts a Python block under that name into the folder
where later blocks run. `<!-- targets -->` means shell lines that are too long to run here: they must be
`make` with targets of the Makefile.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.commands import run_command

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(
    r"(?:^<!-- (?P<comment>.+?) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its code, and the comment before it."""

    language: str
    code: str
    comment: str

    @property
    def file(self) -> str | None:
        return self.comment.removeprefix("file: ") if self.comment.startswith("file: ") else None


def blocks_of(text: str) -> list[Block]:
    """Return the fenced blocks of a Markdown text, in order."""
    return [Block(m["language"], m["code"], m["comment"] or "") for m in BLOCK.finditer(text)]


README = (ROOT / "README.md").read_text()
BLOCKS = blocks_of(README)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that the README names."""
    for block in BLOCKS:
        if block.file:
            (tmp_path / block.file).write_text(block.code)
    return tmp_path


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.language + block.code.partition("\n")[0])
def test_a_block_of_the_readme_works(block: Block, folder: Path) -> None:
    if block.comment == "targets":
        unknown = targets_asked_for(block.code) - targets_of((ROOT / "Makefile").read_text())
        assert not unknown, f"no such target in the Makefile: {unknown}"
        return
    if block.language == "python":
        (folder / "block.py").write_text(block.code)
        run_command([sys.executable, "block.py"], folder)
    else:
        run_command(["bash", "-euo", "pipefail", "-c", block.code], folder)


def test_every_block_is_one_that_is_run() -> None:
    assert len(BLOCKS) == README.count("\n```") // 2
    assert {block.language for block in BLOCKS} == {"bash", "python"}
    assert {block.comment.partition(":")[0] for block in BLOCKS} <= {"", "file", "targets"}


def test_the_blocks_of_a_text_are_found() -> None:
    text = "one\n\n<!-- file: a.py -->\n```python\nx\n```\n\n"
    text += "<!-- targets -->\n```bash\nmake all\n```\n```bash\ny\nz\n```\n"
    assert [(b.language, b.code, b.file) for b in blocks_of(text)] == [
        ("python", "x\n", "a.py"),
        ("bash", "make all\n", None),
        ("bash", "y\nz\n", None),
    ]


def test_only_make_counts_as_targets() -> None:
    assert targets_asked_for("make train\nmake test bench\n") == {"train", "test", "bench"}
    assert targets_of("A := b\nall: one two\n\ttouch: no\none:\n") == {"all", "one"}
    with pytest.raises(ValueError):
        targets_asked_for("rm -rf /\n")


def targets_asked_for(code: str) -> set[str]:
    """Return the targets of lines that are `make TARGET...`."""
    targets: set[str] = set()
    for line in code.splitlines():
        program, *names = shlex.split(line, comments=True)
        if program != "make":
            raise ValueError(f"not a line of make: {line}")
        targets.update(names)
    return targets


def targets_of(makefile: str) -> set[str]:
    """Return the targets that a Makefile has rules for."""
    return set(re.findall(r"^([\w-]+):(?!=)", makefile, re.MULTILINE))
