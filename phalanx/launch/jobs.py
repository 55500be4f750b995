"""Running jobs of this host, found without a register: each rank's listening socket says in its name who it is.

Ranks that share a process belong together, as do all ranks of a world: that is a job. Names are read from
/proc/net/unix; that their process and user are what they say is asked of the kernel.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.status.asking import PREFIX, Peer, ask_peers, listener_of
from phalanx.status.process import descendants

_SOCKETS = Path("/proc/net/unix")
_NAME = re.compile(rf"@({PREFIX}-\d+-(?P<rank>\d+)-(?P<size>\d+)-(?P<world>[0-9a-f]+))$", re.MULTILINE)
_ANSWER_SECONDS = 1.0


@dataclass(frozen=True)
class Seat:
    """A rank of this host: its socket's name, and the process and user that listen there."""

    unix: str
    pid: int
    uid: int
    rank: int
    size: int
    world: str


@dataclass(frozen=True)
class World:
    """The ranks of one world that are on this host."""

    seats: tuple[Seat, ...]

    @property
    def pids(self) -> set[int]:
        """Their processes."""
        return {seat.pid for seat in self.seats}

    @property
    def size(self) -> int:
        """The number of all its ranks, on whatever host."""
        return self.seats[0].size

    def run_and_peers(self) -> tuple[str, list[Peer]]:
        """The name of the run and all ranks; if no rank answers, only those of this host."""
        for seat in self.seats:
            said = ask_peers(seat.unix, _ANSWER_SECONDS)
            if said is not None:
                return said["run"], said["peers"]
        return "", [Peer(seat.rank, seat.pid, os.uname().nodename, seat.unix) for seat in self.seats]


def worlds(own_only: bool) -> list[World]:
    """All worlds with ranks on this host, of this user only or of whoever may be asked."""
    together: dict[str, list[Seat]] = {}
    for seat in _seats():
        if seat.uid == os.geteuid() or (not own_only and os.geteuid() == 0):
            together.setdefault(seat.world, []).append(seat)
    return [World(tuple(sorted(seats, key=lambda seat: seat.rank))) for seats in together.values()]


def jobs(found: Sequence[World]) -> list[World]:
    """One world for each job: its largest, where its processes are in several."""
    chosen: list[World] = []
    for world in sorted(found, key=lambda world: (-world.size, -len(world.seats), world.seats[0].world)):
        if not any(world.pids & other.pids for other in chosen):
            chosen.append(world)
    return chosen


def of_process(found: Iterable[World], pid: int) -> list[World]:
    """The worlds of a process or of processes that it has started."""
    family = {pid} | descendants(pid)
    return [world for world in found if world.pids & family]


def of_run(found: Iterable[World], name: str) -> list[World]:
    """The worlds of a run, by the name that its launcher has given it."""
    return [world for world in found if world.run_and_peers()[0] == name]


def _seats() -> list[Seat]:
    try:
        table = _SOCKETS.read_text()
    except OSError:
        return []
    seats = {}
    for found in _NAME.finditer(table):
        name = found[1]
        if name not in seats and (caller := listener_of(name)) is not None:
            rank, size = int(found["rank"]), int(found["size"])
            seats[name] = Seat(name, caller.pid, caller.uid, rank, size, found["world"])
    return list(seats.values())
