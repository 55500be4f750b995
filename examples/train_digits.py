"""Train a small convolutional network on scikit-learn's handwritten digits, on any number of ranks.

    phalanx run -n 2 examples/train_digits.py
    python examples/train_digits.py
    torchrun --nproc-per-node 2 examples/train_digits.py

or from a script or a notebook cell, with `main` imported from here: `phalanx.spawn(main, nprocs=2)`.
The figures of the run go to runs/digits/summary.json and the weights to runs/digits/model.pt.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx import DistributedDataParallel, DistributedSampler

TOTAL_BATCH_SIZE = 64  # over all ranks, so that the result does not depend on their number
say = phalanx.rank_zero_only(print)


def digits_net() -> nn.Module:
    """Return the network, about 70 thousand parameters, for 8 x 8 images."""
    return nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Conv2d(24, 48, 3, padding=1),
        nn.BatchNorm2d(48),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.4),
        nn.Linear(48 * 4 * 4, 80),
        nn.ReLU(),
        nn.Dropout(0.4),
        nn.Linear(80, 10),
    )


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test set, split alike on every rank and in every run."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    labels = torch.tensor(labels)
    train, test = train_test_split(torch.arange(len(labels)), test_size=361, random_state=0, stratify=labels)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def main(rank: int | None = None, epochs: int = 15, folder: str = "runs/digits") -> None:
    """Train, evaluate and save. `phalanx.spawn` passes a rank, which `phalanx.init` knows anyway."""
    phalanx.init()
    torch.manual_seed(phalanx.rank())  # dropout differs between ranks; the weights become rank 0's
    train, test = digits()
    batch_size = max(1, TOTAL_BATCH_SIZE // phalanx.world_size())
    sampler = DistributedSampler(train)
    batches = DataLoader(train, batch_size, sampler=sampler)
    test_batches = DataLoader(test, 256, sampler=DistributedSampler(test, shuffle=False, pad=False))

    ddp = DistributedDataParallel(digits_net())
    optimizer = torch.optim.AdamW(ddp.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, epochs * len(batches))
    say_header(ddp)

    samples, seconds = 0, 0.0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        began, loss_sum, seen = time.perf_counter(), 0.0, 0
        for images, labels in phalanx.progress(batches, f"epoch {epoch + 1}/{epochs}"):
            optimizer.zero_grad()
            loss = cross_entropy(ddp(images), labels, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            schedule.step()
            loss_sum += loss.item() * len(labels)
            seen += len(labels)
        seconds += time.perf_counter() - began
        loss_sum, seen = summed(loss_sum, seen)
        samples += int(seen)
        accuracy, _ = evaluate(ddp, test_batches)
        say(f"epoch {epoch + 1:2d}/{epochs}  loss {loss_sum / seen:.4f}  held-out accuracy {accuracy:.2%}")

    accuracy, counted = evaluate(ddp, test_batches)
    sync_seconds, train_seconds = summed(ddp.sync_seconds, seconds)
    checkpoint = Path(folder) / "model.pt"
    summary = {
        "accuracy": accuracy,
        "samples_per_second": samples * phalanx.world_size() / train_seconds,
        "sync_share": sync_seconds / train_seconds,
        "world_size": phalanx.world_size(),
        "checkpoint": str(checkpoint),
    }
    save(ddp.module, checkpoint, summary)
    say(f"accuracy {accuracy:.2%} over the whole test set ({counted} images, each counted once)")
    say(f"{summary['samples_per_second']:.0f} samples per second")
    say(f"{summary['sync_share']:.1%} of the training time in synchronisation")
    say(f"checkpoint {checkpoint}, which loads into the plain model")
    phalanx.shutdown()


def evaluate(ddp: DistributedDataParallel, batches: DataLoader) -> tuple[float, int]:
    """Return the accuracy over all ranks' shares, and the number of images in them."""
    ddp.eval()
    with torch.no_grad():
        results = [(int((ddp(images).argmax(1) == labels).sum()), len(labels)) for images, labels in batches]
    ddp.train()
    correct, counted = summed(sum(right for right, _ in results), sum(count for _, count in results))
    return correct / counted, int(counted)


def summed(*values: float) -> list[float]:
    """Add up each value over all ranks."""
    totals = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(totals)
    return totals.tolist()


def say_header(ddp: DistributedDataParallel) -> None:
    """Print where and how this run takes place."""
    hosts = [""] * phalanx.world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    say(
        f"world {phalanx.world_size()} | hosts {len(set(hosts))} | transport {ddp.transport} | "
        f"threads per rank {torch.get_num_threads()}"
    )


@phalanx.rank_zero_only
def save(model: nn.Module, checkpoint: Path, summary: dict) -> None:
    """Write weights and figures, whole or not at all, and see that the weights load into the plain model."""
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), checkpoint.with_suffix(".tmp"))
    os.replace(checkpoint.with_suffix(".tmp"), checkpoint)
    plain = digits_net()
    plain.load_state_dict(torch.load(checkpoint, weights_only=True))
    for name, value in model.state_dict().items():
        if not torch.equal(plain.state_dict()[name], value):
            raise RuntimeError(f"{checkpoint} has other values for {name} than the trained model")
    (checkpoint.parent / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--folder", default="runs/digits")
    main(**vars(parser.parse_args()))
