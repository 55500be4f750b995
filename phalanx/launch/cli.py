"""The `phalanx` command. Starts in milliseconds: a command's own module is imported when it is called."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

USAGE_ERROR = 2


@dataclass(frozen=True)
class Command:
    """One subcommand: `function(argv) -> exit code` in `module`, and a line of help."""

    module: str
    function: str
    help: str


COMMANDS = {
    "run": Command("phalanx.launch.run", "main", "start a script on several ranks"),
    "doctor": Command("phalanx.launch.doctor", "main", "say what every rank of a running job is doing"),
    "bench": Command("phalanx.observe.bench", "main", "measure all-reduce and step times on this host"),
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def version() -> str:
    """The installed version of Phalanx."""
    metadata = importlib.import_module("importlib.metadata")  # costs more than the rest of the command
    try:
        return str(metadata.version("phalanx-ddp"))
    except metadata.PackageNotFoundError:
        return "(not installed)"


class _Version(argparse.Action):
    """Print the version; where it stands is read only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(f"phalanx {version()}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point of the command; returns the exit code."""
    width = max(map(len, COMMANDS))
    parser = Parser(
        prog="phalanx",
        description="Data-parallel training for PyTorch.",
        epilog="commands:\n" + "\n".join(f"  {name:{width}}  {row.help}" for name, row in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", nargs=0, action=_Version, help="show the version and exit")
    parser.add_argument("command", choices=COMMANDS, metavar="command", help="one of the commands below")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments; --help after a command shows them")
    given = parser.parse_args(argv)
    command = COMMANDS[given.command]
    code: int = getattr(importlib.import_module(command.module), command.function)(given.args)
    return code


if __name__ == "__main__":
    sys.exit(main())
