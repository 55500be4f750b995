"""Which parameters a flush synchronises: all of them, unless the user has set policies per layer. Pure.

A policy synchronises its parameters every k-th flush, or never. Between, gradients of an every-k policy
are held back: they accumulate where the optimizer does not see them. Every rank must set the same
policies between the same two steps; the tickets' masks and counts tell if one has not.

What is synchronised together is a round, with a ticket of its own and a ledger of the items that its
gradients are the mean of. The first round of a flush is that of the parameters without a policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

Every = int | str
NEVER, ALWAYS = "never", "always"


@dataclass(frozen=True)
class Round:
    """Parameters that are synchronised together; None means all of the model."""

    members: frozenset[int] | None
    ledger: int = 0


@dataclass
class Policy:
    """Parameters whose names match `pattern` are synchronised every `every`-th flush, or never."""

    pattern: str
    every: Every
    members: frozenset[int] = frozenset()
    flushes: int = 0

    @property
    def is_due(self) -> bool:
        """Whether the flush counted last synchronises these parameters."""
        return self.every == ALWAYS or (self.every != NEVER and self.flushes % int(self.every) == 0)


@dataclass(frozen=True)
class Rounds:
    """The rounds of one flush, and the parameters to hold back after it."""

    due: tuple[Round, ...]
    held: frozenset[int] = frozenset()


_EVERYTHING = Rounds((Round(None),))


@dataclass
class Schedule:
    """The policies of one model, in the order in which they were set; for a parameter the last one counts."""

    policies: list[Policy] = field(default_factory=list)
    coming: list[int] = field(default_factory=list)
    """The ledgers of the rounds that a flush still has of which this rank has followed a part."""
    _names: Sequence[str] = ()

    def name(self, names: Sequence[str]) -> None:
        """Resolve the patterns against these parameter names."""
        self._names = names
        taken: set[int] = set()
        for policy in reversed(self.policies):
            policy.members = matching(names, policy.pattern) - taken
            taken |= policy.members

    def set(self, pattern: str, every: Every) -> frozenset[int]:
        """Set a policy; return the parameters it applies to. Raises ValueError for an impossible `every`."""
        if every not in (NEVER, ALWAYS) and not (isinstance(every, int) and every >= 1):
            raise ValueError(f'every={every!r} is neither a positive number, "always" nor "never"')
        self.policies = [policy for policy in self.policies if policy.pattern != pattern]
        if every not in (ALWAYS, 1) or self.policies:
            self.policies.append(Policy(pattern, every))
        self.name(self._names)
        return matching(self._names, pattern)

    @property
    def ledgers(self) -> range:
        """The numbers of all ledgers: 0 for parameters without a policy, then one for each policy."""
        return range(1 + len(self.policies))

    def due(self, everything: frozenset[int], local: frozenset[int]) -> Rounds:
        """The rounds of the next flush, with the parameters in `local` left out. Counts the flush."""
        self.coming = []
        if not self.policies:
            return Rounds((Round(everything - local),)) if local else _EVERYTHING
        governed = frozenset().union(*(policy.members for policy in self.policies))
        rounds = [Round(everything - local - governed)]
        held: set[int] = set()
        for ledger, policy in enumerate(self.policies, 1):
            policy.flushes += 1
            if policy.every == NEVER or not policy.members - local:
                continue
            if policy.is_due:
                rounds.append(Round(policy.members - local, ledger))
            else:
                held |= policy.members - local
        return Rounds(tuple(rounds), frozenset(held))

    def round_of(self, members: frozenset[int] | None) -> Round:
        """The round of another rank's flush, by its members."""
        for ledger, policy in enumerate(self.policies, 1):
            if members and members <= policy.members:
                return Round(members, ledger)
        return Round(members)

    def followed(self, each: Round, local: frozenset[int]) -> None:
        """Keep count with the ranks whose flush this one has followed, with the parameters in `local` left out."""
        if each.ledger == 0:
            for policy in self.policies:
                policy.flushes += 1
            self.coming = [ledger for ledger, p in enumerate(self.policies, 1) if p.members - local and p.is_due]
        else:
            self.coming = [ledger for ledger in self.coming if ledger > each.ledger]

    def held(self) -> frozenset[int]:
        """The parameters that the flush counted last leaves to a later one."""
        waiting = (policy.members for policy in self.policies if policy.every != NEVER and not policy.is_due)
        return frozenset().union(*waiting)


def matching(names: Sequence[str], pattern: str) -> frozenset[int]:
    """Numbers of the names that match a shell-style pattern; a prefix of whole parts matches too."""
    return frozenset(
        index for index, name in enumerate(names) if fnmatchcase(name, pattern) or fnmatchcase(name, pattern + ".*")
    )
