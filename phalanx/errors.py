"""Every exception that Phalanx raises for its users; the class says whose fault it is.

    PhalanxError(RuntimeError)
      +- MisuseError             you: a call that cannot be right; says what to write instead
      +- RankMismatchError       you disagree: the ranks are in different calls
      +- ReplicaDriftError       you disagree: the copies of the model are not equal any more
      +- PeerError               them
      |    +- PeerLostError      a rank's process ended or cannot be reached
      |    +- PeerFailedError    a rank raised an exception
      +- CollectiveTimeoutError  somebody is late: the group's timeout has passed
      +- ExhaustedError          join(throw_on_early_termination=True): a rank has run out of data
      +- InternalError           us: please report it
    MisuseWarning(UserWarning)   you: a call that is probably wrong; phalanx.silence(name) ends it

Each class builds its sentence from typed fields, so that programs read fields and people read text.
All errors subclass RuntimeError, because code written for torch.distributed catches that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class PhalanxError(RuntimeError):
    """Base of all errors that Phalanx raises."""

    def __reduce__(self) -> tuple[object, ...]:
        # Subclasses build their text from keyword fields; pickle must not call them with the text.
        return _restore, (type(self), self.args, self.__dict__)


def _restore(cls: type[PhalanxError], args: tuple[object, ...], fields: dict[str, object]) -> PhalanxError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class MisuseError(PhalanxError):
    """A call that cannot be right, with what to write instead.

    Fields: `what` (what happened and where), `instead` (what to write), `rank` (who reports, or None), `peer` (the
    rank that made the call, if this one was only told; or None).
    """

    def __init__(self, what: str, instead: str = "", rank: int | None = None, peer: int | None = None) -> None:
        self.what, self.instead, self.rank, self.peer = what, instead, rank, peer
        where = "" if rank is None else f"[rank {rank}] "
        super().__init__(where + what + (f"\nInstead: {instead}" if instead else ""))


class RankMismatchError(PhalanxError):
    """The ranks are in different calls, so no data has moved.

    Fields: `calls` (rank -> description of the call that rank is in), `rank` (who reports),
    `hint` (the usual cause).
    """

    def __init__(self, calls: Mapping[int, str], rank: int, hint: str = "") -> None:
        self.calls, self.rank, self.hint = dict(calls), rank, hint
        together: dict[str, list[int]] = {}
        for peer in sorted(self.calls):
            together.setdefault(self.calls[peer], []).append(peer)
        lines = [f"  {name_ranks(ranks)} in {call}" for call, ranks in together.items()]
        text = f"[rank {rank}] the ranks are in different calls; no data has moved:\n" + "\n".join(lines)
        super().__init__(text + (f"\n{hint}" if hint else ""))


class ReplicaDriftError(PhalanxError):
    """The copies of a wrapped model are not equal any more, though they should be.

    Fields: `parameter` (the first that differs, in the order of the model), `groups` (lists of the ranks that
    agree with one another, the largest first), `odd` (the ranks outside of the first), `differing` (the names of
    all that differ), `last_equal` (the synchronised step at which `parameter` was last seen equal; 0 is the
    wrapping, -1 none), `step` (that at which it was seen to differ), `rank` (who reports), `values` (rank -> what it
    has).
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        differing: Sequence[str],
        last_equal: int,
        step: int,
        rank: int,
        values: Mapping[int, str],
        hint: str = "",
    ) -> None:
        self.parameter, self.differing, self.values = differing[0], list(differing), dict(values)
        self.groups = [list(group) for group in groups]
        self.odd = sorted(rank for group in self.groups[1:] for rank in group)
        self.last_equal, self.step, self.rank, self.hint = last_equal, step, rank, hint
        if last_equal < 0:
            before = "It has not been seen equal"
        else:
            before = "It was last seen equal " + (
                f"in synchronised step {last_equal}" if last_equal else "when the model was wrapped"
            )
        also = f", and so do {len(differing) - 1} more ({_some(differing[1:])})" if len(differing) > 1 else ""
        lines = [f"[rank {rank}] the replicas of the model differ: {self.parameter!r} does{also}"]
        lines += [f"  {name_ranks(group)}: {self.values.get(group[0], '')}" for group in self.groups]
        lines.append(f"{before}, and differs in synchronised step {step}.")
        super().__init__("\n".join(lines) + (f"\n{hint}" if hint else ""))


class PeerError(PhalanxError):
    """Another rank is the cause. Fields: `peer` (its rank), `rank` (who reports), `call`."""

    peer: int
    rank: int
    call: str


class PeerLostError(PeerError):
    """A rank's process has ended, or it cannot be reached any more.

    Fields: `peer`, `rank`, `call` (what this rank was doing), `detail` (host, pid, signal where known).
    """

    def __init__(self, peer: int, rank: int, call: str, detail: str = "") -> None:
        self.peer, self.rank, self.call, self.detail = peer, rank, call, detail
        known = f" ({detail})" if detail else ""
        super().__init__(f"[rank {rank}] rank {peer} is gone{known}; this rank was in {call}")


class PeerFailedError(PeerError):
    """A rank raised an exception, so its part of the collective will never come.

    Fields: `peer`, `rank`, `call`, `exception` (its type and message), `traceback` (its text).
    """

    def __init__(self, peer: int, rank: int, call: str, exception: str, traceback: str = "") -> None:
        self.peer, self.rank, self.call = peer, rank, call
        self.exception, self.traceback = exception, traceback
        text = f"[rank {rank}] rank {peer} failed with {exception}; this rank was in {call}"
        if traceback:
            text += f"\nTraceback of rank {peer}:\n" + traceback.rstrip()
        super().__init__(text)


class CollectiveTimeoutError(PhalanxError):
    """The group's timeout has passed and some ranks have not arrived.

    Fields: `call`, `missing` (ranks that did not come), `rank` (who reports), `seconds`, `report` (what every
    rank was doing then; empty where they could not be asked).
    """

    def __init__(
        self, call: str, missing: Sequence[int], rank: int, seconds: float, detail: str = "", report: str = ""
    ) -> None:
        self.call, self.missing, self.rank, self.seconds = call, list(missing), rank, seconds
        self.report = report
        verb = "has" if len(self.missing) == 1 else "have"
        # "Timed out waiting 1000ms" is how c10d says it: code matches on that.
        waited = f"Timed out waiting {seconds * 1000:.0f}ms"
        text = f"[rank {rank}] {call}: {waited}: {name_ranks(self.missing)} {verb} not arrived"
        super().__init__("\n".join(part for part in (text, detail, report) if part))


class ExhaustedError(PhalanxError):
    """A rank has run out of data, and the user wants all to stop then. Raised on every rank, with torch's texts."""


class InternalError(PhalanxError):
    """A state that should be impossible; please report it with the text."""


class MisuseWarning(UserWarning):
    """A call that is probably wrong, with what to write instead; see docs/misuse.md.

    Fields: `name` (for phalanx.silence), `what`, `instead`, `rank` (or None).
    """

    def __init__(self, name: str, what: str, instead: str, rank: int | None = None) -> None:
        self.name, self.what, self.instead, self.rank = name, what, instead, rank
        where = "" if rank is None else f"[rank {rank}] "
        super().__init__(f"{where}{what}\nInstead: {instead}\nTo silence this: phalanx.silence({name!r})")


def _some(names: Sequence[str], most: int = 3) -> str:
    """Name the first few."""
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks as people do: `rank 3`, `ranks 0-2, 4`."""
    ordered = sorted(ranks)
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return ("rank " if len(ordered) == 1 else "ranks ") + text
