"""Train with Lightning's Trainer or Fabric; print every loss on rank 0. Arguments: program, strategy, batch size."""

import sys
from contextlib import nullcontext

import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def data(size=128):
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


def network():
    # No bias before the normalisation: its gradient is nothing but rounding, which Adam would blow up.
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()

    def training_step(self, batch, index):
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("train", loss, on_step=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs, batch, index):
        self.print(f"loss {self.trainer.callback_metrics['train'].item():.9f}")

    def validation_step(self, batch, index):
        self.log("valid", F.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self):
        self.print(f"valid loss {self.trainer.callback_metrics['valid'].item():.9f}")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


class InOrder(Regression):
    """Ranks share each batch of one process."""

    def train_dataloader(self):
        sampler = DistributedSampler(data(), self.trainer.world_size, self.trainer.global_rank, shuffle=False)
        return DataLoader(data(), int(sys.argv[3]), sampler=sampler)


class GAN(LightningModule):
    """Manual optimization: two optimizers, backward inside of the wrapped forward."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = network(), nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch, index):
        first, second = self.optimizers()
        fake = self.generator(batch[0])
        loss = F.softplus(-self.critic(fake)).mean()
        self.toggle_optimizer(first)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        second.zero_grad()
        told = F.softplus(-self.critic(batch[1])).mean() + F.softplus(self.critic(fake.detach())).mean()
        self.manual_backward(told)
        second.step()
        self.untoggle_optimizer(second)
        self.print(f"loss {loss.item():.9f} loss {told.item():.9f}")

    def configure_optimizers(self):
        models = self.generator, self.critic
        return [torch.optim.Adam(model.parameters(), 0.01, betas=(0.5, 0.9)) for model in models], []


def train(model, strategy, size, **options):
    devices = 1 if strategy == "single" else 2
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy="auto" if devices == 1 else strategy, max_epochs=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
        num_sanity_val_steps=0, **options,
    )  # fmt: skip
    valid = DataLoader(data(32), size) if isinstance(model, Regression) else None
    trainer.fit(model, None if isinstance(model, InOrder) else DataLoader(data(), size), valid)
    if valid is not None:
        trainer.validate(model, valid, verbose=False)


def fabric(strategy, size):
    """Fabric with gradient accumulation and clipping."""
    run = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    run.launch()
    model = network()
    model, optimizer = run.setup(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9))
    loader = run.setup_dataloaders(DataLoader(data(), size, shuffle=True))
    for epoch in range(2):
        for index, (x, y) in enumerate(loader):
            last = index % 2 == 1
            with run.no_backward_sync(model, enabled=not last) if not last else nullcontext():
                loss = F.mse_loss(model(x), y)
                run.backward(loss / 2)
            if last:
                run.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
            mean = run.all_reduce(loss.detach(), reduce_op="mean")
            run.print(f"epoch {epoch} loss {mean.item():.9f}")


if __name__ == "__main__":
    program, strategy, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if strategy == "phalanx":
        import phalanx.integrations.lightning  # noqa: F401 (registers the name)
    seed_everything(1, verbose=False)
    if program == "fit":
        train(Regression(), strategy, size, gradient_clip_val=0.5)
    elif program == "accumulate":
        train(Regression(), strategy, size, accumulate_grad_batches=2)
    elif program == "sync_batchnorm":
        train(InOrder(), strategy, size, sync_batchnorm=True, use_distributed_sampler=False)
    elif program == "gan":
        train(GAN(), strategy, size)
    else:
        fabric(strategy, size)
