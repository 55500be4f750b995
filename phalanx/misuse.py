"""Wrong uses that Phalanx sees, by name; each can be silenced by it.

What is seen here runs, and trains on something else than its author thinks, or fails later and elsewhere.
docs/misuse.md shows the wrong and the right code for each name. Where the checks are is said there too; this
file only keeps the list, and knows nobody.
"""

from __future__ import annotations

import sys
import warnings

from phalanx.errors import MisuseError, MisuseWarning

NAMES = {
    "backward-in-two-threads": "backward of one wrapped model in two threads at a time",
    "clip-before-sync": "gradients clipped or changed in place before they are synchronised",
    "no-set-epoch": "a second pass over a sampler of torch's whose epoch has not been set",
    "rank-zero-collective": "a collective inside a block that only rank 0 runs",
    "replica-drift": "copies of the model that are not equal any more",
    "same-seed": "ranks with one seed, although one for each rank was asked for",
    "step-in-backward": "an optimizer that steps while backward is running",
    "unsynchronised-step": "an optimizer that steps on gradients that are not synchronised",
    "wrapped-twice": "parameters that belong to two wrapped models",
}
"""What can be silenced."""

silenced: set[str] = set()
"""What has been."""

_NOT_THE_USERS = {"phalanx", "torch", "contextlib"}


def silence(*names: str) -> None:
    """Have this process say nothing any more about wrong uses of these names; see docs/misuse.md.

    Errors among them are then not raised either, and what was called goes on. Every rank silences the same;
    "replica-drift" is a RankMismatchError at the next step otherwise. Raises MisuseError for an unknown name.
    """
    for name in names:
        if name not in NAMES:
            raise MisuseError(f"phalanx.silence({name!r}): there is no such name", f"one of {', '.join(NAMES)}")
    silenced.update(names)


def warn(name: str, what: str, instead: str, rank: int | None = None) -> None:
    """Warn of a wrong use, with the line of the user's code that is running."""
    if name in silenced:
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and _package(frame.f_globals) in _NOT_THE_USERS:
        frame = frame.f_back
    warnings.warn_explicit(
        MisuseWarning(name, what, instead, rank), MisuseWarning, frame.f_code.co_filename, frame.f_lineno
    )


def refuse(name: str, what: str, instead: str, rank: int | None = None) -> None:
    """Raise MisuseError for a wrong use, unless it is silenced."""
    if name not in silenced:
        raise MisuseError(f"{what} (to go on all the same: phalanx.silence({name!r}))", instead, rank)


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
