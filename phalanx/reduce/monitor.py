"""Looking on while a reducer works: what checks of a model need to hear of, and no more."""

from __future__ import annotations

from collections.abc import Sequence


class Monitor:
    """Hears what a reducer does. This one does nothing with it."""

    heard: Sequence[int] = ()
    """The digests that the tickets of the last flush carried, by rank; empty if all tickets were the same."""

    def begins(self) -> None:
        """A backward begins: nothing of this model has been accumulated but perhaps one parameter."""

    def kept_local(self) -> None:
        """A backward has ended whose gradients all stay local."""

    def flushing(self) -> int:
        """A flush begins. Returns the digest that this rank's tickets are to carry: 16 bits, 0 for none."""
        return 0
