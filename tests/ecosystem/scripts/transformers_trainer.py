"""transformers' Trainer on a tiny GPT-2 made from a configuration: accumulation, clipping, evaluation, resuming."""

import sys

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed


class Tokens(Dataset):
    def __init__(self, size, seed):
        self.tokens = torch.randint(0, 32, (size, 12), generator=torch.Generator().manual_seed(seed))
        self.tokens[:, 1::2] = self.tokens[:, 0::2]  # something to learn

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Say(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        for name in ("loss", "eval_loss"):
            if state.is_world_process_zero and name in (logs or {}):
                print(f"{name.replace('_', ' ')} {float(logs[name]):.9f}", flush=True)


def main(folder):
    set_seed(5)
    config = GPT2Config(vocab_size=32, n_positions=12, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0,
                        attn_pdrop=0)  # fmt: skip
    model = GPT2LMHeadModel(config)
    arguments = TrainingArguments(
        folder, use_cpu=True, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=50,
        learning_rate=1e-2, logging_steps=1, eval_strategy="steps", eval_steps=25, save_steps=30, max_grad_norm=1.0,
        report_to=[], disable_tqdm=True, seed=5,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Tokens(403, 0), eval_dataset=Tokens(30, 1), callbacks=[Say()])
    trainer.train()
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-30")


if __name__ == "__main__":
    main(sys.argv[1])
