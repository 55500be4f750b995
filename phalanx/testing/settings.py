"""The options of a test world, checked once at the door."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from phalanx.errors import MisuseError

MARGIN = 5.0
"""Seconds that a group's own timeout is longer than the world's, so that the world's report comes first."""


@dataclass(frozen=True)
class Settings:
    """How the ranks of a test world are joined, and for how long they may run; times are in seconds."""

    n: int
    backend: str | None
    timeout: float
    grace: float
    group_timeout: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.n < 1:
            raise MisuseError(f"phalanx.testing.run with {self.n} ranks", "run(n, fn) with n at least 1")
        if self.timeout <= 0:
            raise MisuseError(f"phalanx.testing.run with timeout={self.timeout}", "a timeout of more than 0 seconds")

    @property
    def patience(self) -> timedelta:
        """The timeout of the default process group."""
        seconds = self.timeout + MARGIN if self.group_timeout is None else self.group_timeout
        return timedelta(seconds=seconds)
