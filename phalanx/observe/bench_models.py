"""The four models of the benchmark, each with a synthetic batch: what a training step computes.

They are small on purpose and differ in what makes synchronisation dear: few parameters and a
very short step (digits), hundreds of tiny parameters (deep), convolutions with BatchNorm
buffers (resnet), large matrices (gpt). Model and batch follow from a seed alone. The batch is
one rank's share, so that the local step costs the same on any number of ranks.

Add a model: write the module, a function that makes a batch, and one line in `WORKLOADS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """A model, its batch and its loss, and how many steps a measurement needs.

    `rounds` blocks of `block` timed steps are measured for each variant; short steps need many.
    """

    name: str
    title: str
    module: Callable[[], nn.Module]
    make_batch: Callable[[torch.Generator], Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    learning_rate: float
    block: int
    rounds: int
    max_norm: float | None = None  # what gradients are clipped to in each step

    def build(self, seed: int) -> nn.Module:
        """Return the model with the weights that `seed` gives; the global generator is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.module()

    def batch(self, seed: int) -> Batch:
        """Return the inputs and targets of one step of one rank."""
        return self.make_batch(torch.Generator().manual_seed(seed))


def count_parameters(model: nn.Module) -> int:
    """Return the number of trainable elements of `model`."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


# Digits: the smallest step that anybody trains, nearly all overhead.


def digits_mlp() -> nn.Module:
    """Return a perceptron on 8x8 images: 29,610 parameters."""
    return nn.Sequential(nn.Linear(64, 224), nn.ReLU(), nn.Linear(224, 64), nn.ReLU(), nn.Linear(64, 10))


def _digits_batch(generator: torch.Generator) -> Batch:
    images = torch.randn(64, 64, generator=generator)
    return images, torch.randint(10, (64,), generator=generator)


# Deep: 600 parameters of which none is larger than 4 KiB.


def deep_mlp() -> nn.Module:
    """Return 300 layers of Linear(32, 32): 316,800 parameters.

    No activation, orthogonal weights: at this depth anything else lets the gradients vanish or
    grow without bound, and a comparison of gradients that are all zero would prove nothing.
    """
    layers = [nn.Linear(32, 32) for _ in range(300)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def _deep_batch(generator: torch.Generator) -> Batch:
    return torch.randn(32, 32, generator=generator), torch.randn(32, 32, generator=generator)


# Resnet: convolutions, and buffers that are broadcast at each training forward.


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut (He et al. 2015, figure 2)."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outer),
            nn.ReLU(),
            nn.Conv2d(outer, outer, 3, padding=1, bias=False),
            nn.BatchNorm2d(outer),
        )
        same = inner == outer and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def residual_network() -> nn.Module:
    """Return a residual network on 3x32x32 images, ten classes: 5,138,250 parameters."""
    widths = [64, 64, 64, 128, 128, 256, 256, 256, 256]
    blocks = [ResidualBlock(a, b, 1 if a == b else 2) for a, b in pairwise(widths)]
    stem = [nn.Conv2d(3, 64, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)]
    return nn.Sequential(*stem, *blocks, *head)


def _images_batch(generator: torch.Generator) -> Batch:
    images = torch.randn(8, 3, 32, 32, generator=generator)
    return images, torch.randint(10, (8,), generator=generator)


# GPT: a decoder-only transformer, pre-norm, as in Radford et al. 2019.

VOCABULARY, CONTEXT, WIDTH, HEADS, DEPTH = 4096, 128, 256, 8, 6


class DecoderBlock(nn.Module):
    """Causal self-attention and a four times wider perceptron, each on a residual branch."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        joined = self.query_key_value(self.attention_norm(x))
        heads = joined.view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        output: Tensor = x + self.mlp(self.mlp_norm(x))
        return output


class Gpt(nn.Module):
    """Token and position embeddings, decoder blocks, a head of its own: 6,868,992 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(DecoderBlock() for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token: (batch, length) to (batch, length, vocabulary)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(places))))
        return logits


def _tokens_batch(generator: torch.Generator) -> Batch:
    tokens = torch.randint(VOCABULARY, (3, CONTEXT + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


WORKLOADS: dict[str, Workload] = {
    w.name: w
    for w in (
        Workload("digits", "MLP 64-224-64-10", digits_mlp, _digits_batch,
                 F.cross_entropy, 0.01, block=20, rounds=60),
        Workload("deep", "300 layers of Linear(32, 32)", deep_mlp, _deep_batch,
                 F.mse_loss, 1e-4, block=6, rounds=40),
        Workload("resnet", "residual network on 3x32x32", residual_network, _images_batch,
                 F.cross_entropy, 0.01, block=3, rounds=24),
        Workload("gpt", "GPT of 6 blocks, width 256", Gpt, _tokens_batch,
                 _next_token_loss, 0.01, block=2, rounds=20),
    )
}  # fmt: skip
