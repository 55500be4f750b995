"""Reading a model: its entries for the plan, and whether all ranks have the same."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence

import torch
from torch import nn

from phalanx.errors import MisuseError
from phalanx.group.process_group import PhalanxProcessGroup
from phalanx.group.ticket import Operation
from phalanx.reduce.memory import form_of
from phalanx.reduce.plan import Entry, first_difference

_SAID = struct.Struct("<Qq")


def entries_of(named: Sequence[tuple[str, torch.nn.Parameter]], sparse_names: frozenset[str]) -> list[Entry]:
    """Describe parameters for the plan."""
    return [
        Entry(
            name, tuple(p.shape), str(p.dtype).removeprefix("torch."), p.element_size(), str(p.device),
            name in sparse_names, _strides_of(p),
        )
        for name, p in named
    ]  # fmt: skip


def _strides_of(parameter: torch.Tensor) -> tuple[int, ...] | None:
    """The strides that its gradients get in memory, if they say more than its shape; not those of single elements."""
    form = form_of(parameter)
    in_order = torch.empty(form.shape, device="meta").stride()
    strides = [(own, usual) for own, usual, size in zip(form.strides, in_order, form.shape, strict=True) if size > 1]
    return None if all(own == usual for own, usual in strides) or not parameter.numel() else tuple(form.strides)


def sparse_parameters(module: nn.Module) -> frozenset[str]:
    """Names of parameters that receive sparse gradients: embeddings made with sparse=True."""
    return frozenset(
        f"{prefix}.weight".lstrip(".")
        for prefix, child in module.named_modules()
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse
    )


def _entry(
    name: str, shape: list[int], dtype: str, itemsize: int, device: str, sparse: bool, strides: list[int] | None
) -> Entry:
    return Entry(name, tuple(shape), dtype, itemsize, device, sparse, None if strides is None else tuple(strides))


def compare_models(group: PhalanxProcessGroup, entries: Sequence[Entry], fingerprint: int, number: int) -> int:
    """Agree that all ranks have the same model; return its number, new among the models of this group.

    `number` is the one it had before, or -1. Raises MisuseError on every rank, naming the first differing
    parameter, if the models differ.
    """
    core = group.core
    # Ranks may have wrapped different numbers of models (a copy on rank 0 only): the largest count decides.
    wish = core.models_numbered if number < 0 else number
    said = core.exchange(_SAID.pack(fingerprint, wish), "DistributedDataParallel(...)", Operation.WRAP)
    heard = [_SAID.unpack(each) for each in said]
    if len({fingerprint for fingerprint, _ in heard}) == 1:
        agreed: int = max(wished for _, wished in heard)
        core.models_numbered = max(core.models_numbered, agreed + 1)
        return agreed
    listing = json.dumps([[e.name, e.shape, e.dtype, e.itemsize, e.device, e.sparse, e.strides] for e in entries])
    listings = core.exchange(listing.encode(), "DistributedDataParallel(...)", Operation.WRAP)
    models = {rank: [_entry(*each) for each in json.loads(text)] for rank, text in enumerate(listings)}
    counts = {rank: len(model) for rank, model in models.items()}
    odd = next((rank for rank in counts if counts[rank] != counts[core.rank]), None)
    what = "DDP expects same model across all ranks, but "
    if odd is not None:
        # The beginning of this sentence is torch's: code matches on it.
        what += (
            f"Rank {core.rank} has {counts[core.rank]} params, while rank {odd} has inconsistent {counts[odd]} params; "
        )
    difference = first_difference(models) or "the bucket sizes (bucket_cap_mb) differ"
    raise MisuseError(what + difference, "build the same model on every rank before wrapping it", core.rank)
