"""Train on four workers of a Ray cluster.

Ray starts the ranks, so that no launcher is needed: `python ray_train.py`.
"""

from __future__ import annotations

from typing import Any

import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn
from torch.utils.data import TensorDataset

import phalanx


def train(config: dict[str, Any]) -> None:
    """Run on every worker, in the process group that Ray has made."""
    phalanx.init()  # takes the world as it is
    torch.manual_seed(0)
    inputs = torch.randn(1024, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = phalanx.loader(data, total_batch_size=64)
    model = phalanx.DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    for epoch in range(config["epochs"]):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        ray.train.report({"epoch": epoch, "loss": phalanx.mean(loss, len(x))})


if __name__ == "__main__":
    trainer = TorchTrainer(
        train,
        train_loop_config={"lr": 0.1, "epochs": 3},
        torch_config=TorchConfig(backend="phalanx"),
        scaling_config=ScalingConfig(num_workers=4, resources_per_worker={"CPU": 4}),
        run_config=RunConfig(name="train", failure_config=FailureConfig(max_failures=0)),
    )
    print(trainer.fit().metrics)
