"""Image classification with all that a run needs: resume, exact evaluation, tracker, learning-rate schedule.

    phalanx run -n 2 examples/image_classification.py
    phalanx run -n 2 --resume auto examples/image_classification.py    # goes on from the last checkpoint
    python examples/image_classification.py --epochs 2

scikit-learn's handwritten digits, shifted at random by up to a pixel. Stop it at any moment, with Ctrl-C, SIGTERM
or SIGKILL, and resume it, on any number of ranks: each image is seen once per epoch all the same. The metrics
go to runs/images/metrics.csv, the weights to runs/images/checkpoints.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy, pad
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import Dataset

import phalanx
from phalanx import DistributedDataParallel

BASE_BATCH, BASE_LR = 64, 0.05  # the learning rate is for this batch, and scaled for others


class Digits(Dataset):
    """8 x 8 images and labels; with `shifts`, moved by up to a pixel in each direction."""

    def __init__(self, held_out: bool, shifts: bool) -> None:
        images, labels = load_digits(return_X_y=True)
        halves = train_test_split(range(len(labels)), test_size=361, random_state=0, stratify=labels)
        self.images = torch.tensor(images[halves[held_out]] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
        self.labels, self.shifts = torch.tensor(labels[halves[held_out]]), shifts

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index]
        if self.shifts:
            top, left = torch.randint(3, (2,)).tolist()
            image = pad(image, (1, 1, 1, 1))[:, top : top + 8, left : left + 8]
        return image, self.labels[index]


def network() -> nn.Module:
    """A small convolutional network, about 60 thousand parameters."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 24), (24, 48)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    layers += [nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.4), nn.Linear(768, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*layers)


def evaluate(ddp: nn.Module, batches: phalanx.loader) -> tuple[float, int]:
    """Return the accuracy over the whole set and the number of images in it, each counted once."""
    ddp.eval()
    with torch.no_grad():
        outputs = [(ddp(images).argmax(1), labels) for images, labels in batches]
    ddp.train()
    guesses, labels = phalanx.gather(outputs, batches)
    return (guesses == labels).float().mean().item(), len(labels)


def main(epochs: int, total_batch: int, log_every: int, save_every: int, folder: str) -> None:
    """Train, evaluate after each epoch, keep the newest two checkpoints and the best."""
    phalanx.init()
    phalanx.seed(0)
    plan = phalanx.batch_plan(total=total_batch)
    batches = phalanx.loader(Digits(held_out=False, shifts=True), plan.total)
    test = phalanx.loader(Digits(held_out=True, shifts=False), 128 * plan.ranks, shuffle=False, pad=False)
    ddp = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(ddp.parameters(), BASE_LR, momentum=0.9, weight_decay=5e-4, nesterov=True)
    steps = epochs * len(batches)
    cosine = CosineAnnealingLR(optimizer, T_max=steps - steps // 10)
    schedule = phalanx.ScaledLR(optimizer, BASE_BATCH, plan.total, warmup_steps=steps // 10, after=cosine)

    checkpoints = Path(folder) / "checkpoints"
    state = {"model": ddp, "optimizer": optimizer, "scheduler": schedule, "sampler": batches}
    start = phalanx.checkpoint.resume(checkpoints, **state)
    step = start.step if start else 0
    config = {"epochs": epochs, "total_batch": plan.total, "ranks": plan.ranks}
    tracker = phalanx.tracker("csv", dir=folder, config=config, purge_step=step + 1)
    with phalanx.checkpoint.preemption() as stop:
        for epoch in range(batches.epoch, epochs):
            for images, labels in phalanx.progress(batches, f"epoch {epoch + 1}/{epochs}"):
                optimizer.zero_grad()
                loss = cross_entropy(ddp(images), labels, label_smoothing=0.1)
                loss.backward()
                optimizer.step()
                schedule.step()
                step += 1
                if step % log_every == 0:
                    tracker.log({"loss": loss, "lr": schedule.get_last_lr()[0]}, step, n=len(labels))
                if stop or step % save_every == 0:
                    phalanx.checkpoint.save(checkpoints, step=step, keep=2, **state)
                if stop:
                    return tracker.finish("killed")
            accuracy, count = evaluate(ddp, test)
            tracker.log({"accuracy": accuracy}, step, average=False)
            phalanx.checkpoint.save(checkpoints, step=step, keep=2, metric=accuracy, mode="max", **state)
            if phalanx.is_main():
                print(f"epoch {epoch + 1}: step {step}, accuracy {accuracy:.2%} over {count} images", flush=True)
    phalanx.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Classify handwritten digits.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--total-batch", type=int, default=64, help="images per step, over all ranks")
    parser.add_argument("--log-every", type=int, default=5, help="steps")
    parser.add_argument("--save-every", type=int, default=50, help="steps")
    parser.add_argument("--folder", default="runs/images")
    main(**vars(parser.parse_args()))
