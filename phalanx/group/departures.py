"""Ranks that have ended before they came to the meeting, of which no link can tell.

The launcher writes into the folder of the run which ranks have ended. Whoever waits for one of them to
appear looks there, and need not wait for a timeout.
"""

from __future__ import annotations

import signal
from pathlib import Path

from phalanx.errors import PeerLostError
from phalanx.launch.environment import Place, variable

_FOLDER = "PHALANX_RUN_DIR"


def check(peer: int, rank: int, size: int, call: str) -> None:
    """Raise PeerLostError if the launcher of this world of `size` ranks has seen `peer` end."""
    folder = variable(_FOLDER, "")
    if not folder:
        return
    place = Place.from_environment()
    if (place.rank, place.world_size) != (rank, size):
        return  # some other world, made inside of a launched one
    try:
        text = (Path(folder) / f"rank-{peer}.gone").read_text()
    except OSError:
        return
    raise PeerLostError(peer, rank, call, f"its process ended{_how(text)} before it got there")


def _how(text: str) -> str:
    try:
        code = int(text)
        return f" with exit code {code}" if code >= 0 else f" by {signal.Signals(-code).name}"
    except ValueError:
        return ""
