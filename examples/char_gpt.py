"""A character-level GPT, trained on the text of Python's own standard library.

    phalanx run -n 2 examples/char_gpt.py
    phalanx run -n 2 --resume auto examples/char_gpt.py --steps 4000    # goes on from the last checkpoint
    python examples/char_gpt.py --steps 50 --files 20

With gradient accumulation, resume, an evaluation of each held-out character once, and a tracker. The loss is in
bits per character; the metrics go to runs/gpt/metrics.csv, the weights to runs/gpt/checkpoints.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import Dataset

import phalanx
from phalanx import DistributedDataParallel

CHARACTERS = 128  # ASCII; others become question marks
BASE_BATCH, BASE_LR = 32, 1e-3  # the learning rate is for this batch, and scaled for others


class Windows(Dataset):
    """Pieces of `context` characters of a text, and for each character the next one."""

    def __init__(self, text: bytes, context: int) -> None:
        self.text, self.context = torch.frombuffer(bytearray(text), dtype=torch.uint8), context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.text[index * self.context :][: self.context + 1].long()
        return piece[:-1], piece[1:]


class Block(nn.Module):
    """Attention to what came before, then a perceptron, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attend(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.project(scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.perceptron(self.norms[1](x))


class GPT(nn.Module):
    """Predicts each next character."""

    def __init__(self, context: int, layers: int, width: int, heads: int = 4) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(CHARACTERS, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        self.head = nn.Linear(width, CHARACTERS)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.blocks(self.characters(text) + self.places.weight[: text.shape[1]]))


def bits(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss in bits per character."""
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / math.log(2)


def evaluate(ddp: nn.Module, batches: phalanx.loader) -> tuple[float, int]:
    """Return the loss over the whole held-out text and the number of characters in it, each counted once."""
    with torch.no_grad():
        parts = [(bits(ddp, inputs, targets).item(), targets.numel()) for inputs, targets in batches]
    count = sum(n for _, n in parts)
    counts = phalanx.mean(count) * phalanx.world_size()
    return phalanx.mean(sum(loss * n for loss, n in parts) / max(count, 1), count), round(counts)


def endless(batches: phalanx.loader) -> Iterator[tuple[Tensor, Tensor]]:
    """Go through the data again and again; the loader moves its epoch on by itself."""
    while True:
        yield from batches


def main(args: argparse.Namespace) -> None:
    """Train for so many steps, evaluating and saving on the way."""
    phalanx.init()
    phalanx.seed(0)
    plan = phalanx.batch_plan(args.per_rank, args.accumulate)
    files = sorted(Path(json.__file__).parents[1].glob("*.py"))[: args.files]
    text = "".join(file.read_text(errors="replace") for file in files).encode("ascii", "replace")
    held_out = len(text) // 10
    batches = phalanx.loader(Windows(text[:-held_out], args.context), plan.total // plan.accumulate)
    test_data = Windows(text[-held_out:], args.context)
    test = phalanx.loader(test_data, plan.total // plan.accumulate, shuffle=False, pad=False)
    ddp = DistributedDataParallel(GPT(args.context, args.layers, args.width))
    optimizer = torch.optim.AdamW(ddp.parameters(), BASE_LR, weight_decay=0.01)
    schedule = phalanx.ScaledLR(optimizer, BASE_BATCH, plan.total, "sqrt", warmup_steps=20)

    checkpoints = Path(args.folder) / "checkpoints"
    state = {"model": ddp, "optimizer": optimizer, "scheduler": schedule, "sampler": batches}
    start = phalanx.checkpoint.resume(checkpoints, **state)
    step = start.step if start else 0
    tracker = phalanx.tracker("csv", dir=args.folder, config=vars(args), purge_step=step + 1)
    stream = endless(batches)
    with phalanx.checkpoint.preemption() as stop:
        while step < args.steps:
            inputs, targets = next(stream)
            with ddp.accumulate(every=args.accumulate) as syncs:
                loss = bits(ddp, inputs, targets)
                ddp.weigh(loss, targets.numel()).backward()
            if not syncs:
                continue
            phalanx.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            step += 1
            tracker.log({"loss": loss}, step, n=targets.numel())
            if step % args.evaluate_every == 0:
                held_out_loss, count = evaluate(ddp, test)
                tracker.log({"held-out loss": held_out_loss}, step, average=False)
                if phalanx.is_main():
                    print(f"step {step}: {held_out_loss:.4f} bits per character over {count}", flush=True)
            if stop or step % args.save_every == 0:
                phalanx.checkpoint.save(checkpoints, step=step, keep=2, **state)
            if stop:
                return tracker.finish("killed")
    phalanx.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small GPT on Python's standard library.")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--evaluate-every", type=int, default=200, help="steps")
    parser.add_argument("--per-rank", type=int, default=8, help="pieces of text per micro-batch and rank")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step")
    parser.add_argument("--context", type=int, default=128, help="characters per piece")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--files", type=int, default=None, help="read only so many files")
    parser.add_argument("--folder", default="runs/gpt")
    main(parser.parse_args())
