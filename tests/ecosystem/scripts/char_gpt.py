"""The shape of minGPT's DDP trainer: dataclass configurations, a Trainer class, AMP switches, snapshots."""

import os
from dataclasses import asdict, dataclass

import torch
import torch.nn as nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

TEXT = "the quick brown fox jumps over the lazy dog. pack my box with five dozen liquor jugs. " * 40


@dataclass
class GPTConfig:
    vocab_size: int = 0
    block_size: int = 16
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 32
    dropout: float = 0.0


@dataclass
class OptimizerConfig:
    learning_rate: float = 3e-3
    weight_decay: float = 0.1


@dataclass
class TrainerConfig:
    max_steps: int = 50
    batch_size: int = 8
    grad_norm_clip: float = 1.0
    use_amp: bool = True
    snapshot_path: str = "gpt_snapshot.pt"
    save_every: int = 25


@dataclass
class Snapshot:
    model_state: dict
    optimizer_state: dict
    finished_step: int


class CharDataset(Dataset):
    def __init__(self, data, block_size):
        chars = sorted(set(data))
        self.stoi = {ch: i for i, ch in enumerate(chars)}
        self.vocab_size, self.block_size, self.data = len(chars), block_size, data

    def __len__(self):
        return len(self.data) - self.block_size

    def __getitem__(self, idx):
        codes = [self.stoi[s] for s in self.data[idx : idx + self.block_size + 1]]
        return torch.tensor(codes[:-1]), torch.tensor(codes[1:])


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn = nn.MultiheadAttention(config.n_embd, config.n_head, config.dropout, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd), nn.GELU(), nn.Linear(4 * config.n_embd, config.n_embd)
        )

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.tok_emb = nn.Embedding(config.vocab_size, config.n_embd)
        self.pos_emb = nn.Parameter(torch.zeros(1, config.block_size, config.n_embd))
        self.blocks = nn.Sequential(*[Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.head.weight = self.tok_emb.weight
        nn.init.normal_(self.tok_emb.weight, std=0.02)

    def forward(self, idx, targets=None):
        x = self.tok_emb(idx) + self.pos_emb[:, : idx.size(1)]
        logits = self.head(self.ln_f(self.blocks(x)))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


def create_optimizer(model, config):
    decay = [p for p in model.parameters() if p.dim() >= 2]
    plain = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))


class Trainer:
    def __init__(self, config, model, optimizer, train_dataset):
        self.config = config
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        self.train_dataset = train_dataset
        self.loader = DataLoader(
            train_dataset, batch_size=config.batch_size, shuffle=False, sampler=DistributedSampler(train_dataset)
        )
        self.model, self.optimizer, self.step = model, optimizer, 0
        self.scaler = torch.amp.GradScaler("cpu", enabled=config.use_amp)
        self._load_snapshot()
        self.model = DDP(self.model)

    def _load_snapshot(self):
        if not os.path.exists(self.config.snapshot_path):
            return
        snapshot = Snapshot(**torch.load(self.config.snapshot_path, map_location="cpu", weights_only=True))
        self.model.load_state_dict(snapshot.model_state)
        self.optimizer.load_state_dict(snapshot.optimizer_state)
        self.step = snapshot.finished_step

    def _save_snapshot(self):
        model = self.model
        raw_model = model.module if hasattr(model, "module") else model
        torch.save(
            asdict(Snapshot(raw_model.state_dict(), self.optimizer.state_dict(), self.step)), self.config.snapshot_path
        )

    def _run_batch(self, source, targets):
        with torch.set_grad_enabled(True), torch.amp.autocast("cpu", dtype=torch.bfloat16, enabled=self.config.use_amp):
            _, loss = self.model(source, targets)
        self.optimizer.zero_grad(set_to_none=True)
        if self.config.use_amp:
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
            self.optimizer.step()
        return loss.item()

    def train(self):
        for source, targets in self.loader:
            if self.step >= self.config.max_steps:
                return
            loss = self._run_batch(source, targets)
            self.step += 1
            if self.global_rank == 0:
                print(f"[RANK {self.global_rank}] step {self.step} loss {loss:.9f}", flush=True)
                if self.step % self.config.save_every == 0:
                    self._save_snapshot()


def main():
    init_process_group(backend="gloo")
    torch.manual_seed(1 + int(os.environ["RANK"]))
    dataset = CharDataset(TEXT, GPTConfig.block_size)
    model = GPT(GPTConfig(vocab_size=dataset.vocab_size))
    for use_amp in (False, True):
        config = TrainerConfig(use_amp=use_amp, max_steps=25, snapshot_path=f"gpt-{use_amp}.pt")
        Trainer(config, model, create_optimizer(model, OptimizerConfig()), dataset).train()
    destroy_process_group()


if __name__ == "__main__":
    main()
