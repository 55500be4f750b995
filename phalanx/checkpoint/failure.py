"""The error of a disk that does not take a checkpoint, or does not give it back."""

from __future__ import annotations

from phalanx.errors import PhalanxError


class CheckpointError(PhalanxError):
    """A checkpoint cannot be written or read: the disk, the folder, or what is in it. Raised on every rank.

    Fields: `what` (what happened, to which file), `instead` (what to do), `rank` (who reports, or None), `peer` (the
    rank that it happened to, if this one was only told; or None).
    """

    def __init__(self, what: str, instead: str = "", rank: int | None = None, peer: int | None = None) -> None:
        self.what, self.instead, self.rank, self.peer = what, instead, rank, peer
        where = "" if rank is None else f"[rank {rank}] "
        super().__init__(where + what + (f"\nInstead: {instead}" if instead else ""))
