"""Spellings of options that people bring from torchrun, put into ours before the command line is parsed."""

from __future__ import annotations

from collections.abc import Sequence

_OURS = {"--nproc-per-node": "--ranks", "--dropin": "--drop-in"}
_COUNTED_BY_US = {"gpu": "auto", "cpu": "auto"}  # what torchrun calls one rank per device or core
_NOT_NEEDED = {"--standalone"}
_MEETING = "one host needs none, several meet at --master-addr and --master-port"
_INSTEAD = {
    "--rdzv-backend": _MEETING,
    "--rdzv-endpoint": _MEETING,
    "--rdzv-id": _MEETING,
    "--max-restarts": "have the scheduler start the command again, with --resume auto",
    "--redirects": "--log-dir writes the output of every rank, and the console shows it too",
    "--tee": "--log-dir writes the output of every rank, and the console shows it too",
}


def in_ours(argv: Sequence[str], takes_value: Sequence[str]) -> list[str]:
    """The command line with the options before the script in our spelling; what follows it is left alone.

    `takes_value` are our options whose value is the next word. A bare `--drop-in` becomes `--drop-in=all`: argparse
    would take the script for its value. Raises ValueError for an option of torchrun's that has no counterpart.
    """
    words, read = list(argv), []
    while words and words[0].startswith("-") and words[0] != "--":
        name, equals, value = words.pop(0).partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if name in _NOT_NEEDED:
            continue
        if name in _INSTEAD:
            raise ValueError(f"{name} is torchrun's: {_INSTEAD[name]}")
        name, theirs = _OURS.get(name, name), name in _OURS
        if not equals and name == "--drop-in":
            equals, value = "=", "all"
        elif not equals and name in takes_value and words:
            equals, value = " ", words.pop(0)
        value = _COUNTED_BY_US.get(value, value) if theirs else value
        read += [name, value] if equals == " " else [name + equals + value]
    return read + words
