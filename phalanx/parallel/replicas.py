"""Comparing the replicas of a model in full: checksums of all tensors from every rank, and what to say of them."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import torch

from phalanx.errors import RankMismatchError, ReplicaDriftError, name_ranks
from phalanx.group import ticket
from phalanx.group.group import Group
from phalanx.parallel.pieces import checksum

UNKNOWN = -1
_HEAD = struct.Struct("<qIqII")
_SHOWN = 3

_CALL = "a comparison of the replicas"
_HINT = """Usual causes, and what to write instead:
  a checkpoint loaded on some ranks only: phalanx.checkpoint.load(path, ...) on every rank, or load before wrapping
  optimizer.step(), or an assignment to parameters, in code that only some ranks run: run it on every rank
  optimizers that differ (learning rate, restored state): build and load them alike on every rank
  parameters that are meant to differ: ddp.sync_policy(pattern, every="never"), on every rank
A single odd rank after none of these has a bit of its memory flipped. To train on without this check, write
ddp.drift_check = False or phalanx.silence("replica-drift"), on every rank."""


@dataclass(frozen=True)
class Note:
    """What a rank says beside its checksums: its step, the hash of its piece, its writes to parameters (or UNKNOWN)."""

    step: int
    piece: int = 0
    writes: int = UNKNOWN


@dataclass(frozen=True)
class Comparison:
    """What the ranks have said, by rank; one that only follows says nothing. `kept` are not to be compared."""

    notes: dict[int, Note]
    sums: dict[int, array[int]]
    kept: dict[int, frozenset[int]]

    @property
    def apart(self) -> frozenset[int]:
        """The numbers of the tensors that some rank does not want to be compared."""
        return frozenset().union(*self.kept.values())

    @property
    def differing(self) -> list[int]:
        """The numbers of the tensors that are not equal on all ranks."""
        columns, apart = zip(*self.sums.values(), strict=True), self.apart
        return [index for index, column in enumerate(columns) if len(set(column)) > 1 and index not in apart]

    def groups(self, index: int) -> list[list[int]]:
        """The ranks that agree about a tensor with one another, the largest group first."""
        together: dict[int, list[int]] = {}
        for rank, sums in self.sums.items():
            together.setdefault(sums[index], []).append(rank)
        return sorted(together.values(), key=lambda ranks: (-len(ranks), ranks))

    def written(self) -> str:
        """Say which ranks have written to their parameters more often than others; empty if none has."""
        counts: dict[int, list[int]] = {}
        for rank, note in self.notes.items():
            counts.setdefault(note.writes, []).append(rank)
        if len(counts) == 1 or UNKNOWN in counts:
            return ""
        told = ", ".join(f"{count} times on {name_ranks(ranks)}" for count, ranks in sorted(counts.items()))
        return f"Since the step before, parameters were written to in place {told}.\n"


def compare(
    core: Group, names: Sequence[str], tensors: Sequence[torch.Tensor], apart: frozenset[int], note: Note
) -> Comparison:
    """Compare `tensors` on all ranks. A collective; tensors whose numbers are `apart` on some rank do not count.

    Raises RankMismatchError on every rank if their models have different names.
    """
    sums, bitmap = array("I", map(checksum, tensors)), ticket.bits(apart, len(tensors))
    of_names = crc32("\n".join(names).encode())
    head = _HEAD.pack(note.step, note.piece, note.writes, of_names, len(bitmap))
    notes, heard, kept, listings = {}, {}, {}, {}
    for rank, payload in enumerate(core.exchange(head + bitmap + sums.tobytes(), _CALL)):
        if not payload:
            continue
        step, piece, writes, listing, size = _HEAD.unpack_from(payload)
        notes[rank], listings[rank] = Note(step, piece, writes), listing
        kept[rank] = frozenset(ticket.members(payload[_HEAD.size : _HEAD.size + size]))
        heard[rank] = array("I", payload[_HEAD.size + size :])
    if len(set(listings.values())) > 1:
        calls = {rank: f"a comparison of {len(heard[rank])} tensors (names {listings[rank]:08x})" for rank in heard}
        raise RankMismatchError(calls, core.rank, "The models of these ranks have different parameters.")
    return Comparison(notes, heard, kept)


def error(
    core: Group, names: Sequence[str], tensors: Sequence[torch.Tensor], found: Comparison, last_equal: int, step: int
) -> ReplicaDriftError:
    """Build the error for what `found` has differing. A collective, since every rank shows what it has."""
    differing = found.differing
    first = differing[0]
    said = core.exchange(_describe(tensors[first], found.sums[core.rank][first]).encode(), _CALL)
    return ReplicaDriftError(
        found.groups(first), [names[index] for index in differing], last_equal, step, core.rank,
        {rank: text.decode() for rank, text in enumerate(said) if text}, found.written() + _HINT,
    )  # fmt: skip


def _describe(tensor: torch.Tensor, checksum: int) -> str:
    values = tensor.detach().to_dense().cpu() if tensor.layout is not torch.strided else tensor.detach().cpu()
    begins = ", ".join(f"{value:.6g}" for value in values.reshape(-1)[:_SHOWN].tolist())
    wide = torch.complex128 if values.is_complex() else torch.float64
    return f"norm {values.to(wide).norm().item():.9g}, begins {begins} (checksum {checksum:08x})"
