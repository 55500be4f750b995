"""Real processes with real loader workers that prefetch: stops and resumes, and evaluation, count each item once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

import phalanx
from phalanx.testing import run

N = 61


class Stream(IterableDataset):
    """Shuffled by torch's random numbers, and sharded by worker by itself, as one process would want it."""

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(N).tolist()
        info = torch.utils.data.get_worker_info()
        return iter(order if info is None else order[info.id :: info.num_workers])


def make(kind: str, ranks: int) -> torch.utils.data.DataLoader:
    options = {"num_workers": 2, "prefetch_factor": 3, "multiprocessing_context": "fork"}
    if kind == "stream":
        return phalanx.loader(Stream(), 3 * ranks, **options)
    if kind == "batches":
        inner = BatchSampler(RandomSampler(range(N)), 3, False)
        return phalanx.loader(range(N), batch_sampler=inner, pad=False, **options)
    return phalanx.loader(range(N), 3 * ranks, pad=False, **options)


def stop(rank: int, kind: str, ranks: int, state: dict | None, steps: int) -> tuple[list[int], dict]:
    """Go on from a state for some steps, with 6 batches prefetched; return what came and the state then."""
    torch.set_num_threads(1)
    loader = make(kind, ranks)
    if state is not None:
        loader.load_state_dict(state)
        assert loader.epoch == 0
    batches, seen = iter(loader), []
    for _ in range(steps + (rank if kind == "stream" else 0)):
        seen += next(batches, torch.tensor([])).tolist()
    return seen, loader.state_dict()


@pytest.mark.parametrize("kind", ["items", "batches", "stream"])
def test_a_run_stopped_twice_sees_each_item_once(kind: str) -> None:
    seen: list[int] = []
    state = None
    for ranks, steps in ((2, 3), (3, 2), (2, 30)):
        parts, states = zip(*run(ranks, stop, kind, ranks, state, steps, over="processes", timeout=90), strict=True)
        assert all(other == states[0] for other in states)
        seen, state = seen + [item for part in parts for item in part], states[0]
        assert len(seen) < N or state["finished"]
    assert sorted(seen) == list(range(N))


def evaluate(rank: int) -> tuple[list[int], float]:
    torch.set_num_threads(1)
    model = phalanx.DistributedDataParallel(torch.nn.Linear(1, 1))
    loader = phalanx.loader(torch.arange(float(N)).reshape(N, 1), 8, num_workers=1, multiprocessing_context="fork")
    with torch.no_grad():
        outputs = [{"x": batch[:, 0], "y": model.module(batch)[:, 0]} for batch in loader]
    whole = phalanx.gather(outputs, loader)
    return whole["x"].long().tolist(), whole["y"].sum().item()


def test_evaluation_over_padded_shares_counts_each_item_once() -> None:
    (items, total), (same_items, same_total) = run(2, evaluate, over="processes", timeout=90)
    assert items == same_items == list(range(N))
    assert total == same_total
