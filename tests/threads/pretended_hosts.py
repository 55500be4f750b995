"""Ranks of one process that take each other for ranks on several hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from phalanx.group.group import Group


def pretend_hosts(monkeypatch: pytest.MonkeyPatch, sizes: Sequence[int]) -> None:
    """Have groups made from now on take their ranks for hosts of `sizes` ranks, in order of rank."""
    host_of = [host for host, size in enumerate(sizes) for _ in range(size)]
    make = Group.__init__

    def made(self: Group, board: Any, *arguments: Any) -> None:
        make(self, board, *arguments)
        self.near = [peer for peer in self.near if host_of[peer[1].peer] == host_of[board.rank]]
        self.here = sorted([self.rank, *(place for place, _, _ in self.near)])

    monkeypatch.setattr(Group, "__init__", made)
