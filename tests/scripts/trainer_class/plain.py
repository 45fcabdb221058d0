# SPDX-License-Identifier: BSD-3-Clause
"""A trainer class with callbacks teaches a small GPT to sort numbers.

The trainer draws from an endless sampler, and stops after a number of iterations.
"""

import argparse
import json
from collections import defaultdict
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler


class SortDataset(Dataset):
    """Sequences of digits, each followed by the same digits in order."""

    def __init__(self, count, seed, length=4, digits=3):
        self.length, self.digits = length, digits
        generator = torch.Generator().manual_seed(seed)
        self.sequences = torch.randint(digits, (count, length), generator=generator)

    def __len__(self):
        return len(self.sequences)

    def get_block_size(self):
        return 2 * self.length - 1

    def __getitem__(self, idx):
        inp = self.sequences[idx]
        cat = torch.cat((inp, torch.sort(inp)[0]))
        x, y = cat[:-1].clone(), cat[1:].clone()
        y[: self.length - 1] = -1  # only the sorted half is to be predicted
        return x, y


class GPT(nn.Module):
    def __init__(self, vocab_size, block_size, n_embd=32, n_head=2, n_layer=2):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        layer = nn.TransformerEncoderLayer(
            n_embd, n_head, 4 * n_embd, dropout=0.0, batch_first=True, norm_first=True
        )
        self.h = nn.TransformerEncoder(layer, n_layer, enable_nested_tensor=False)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(block_size))

    def configure_optimizers(self, config):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        no_decay = [p for p in self.parameters() if p.dim() < 2]
        groups = [
            {"params": decay, "weight_decay": config.weight_decay},
            {"params": no_decay, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas)

    def forward(self, idx, targets=None):
        t = idx.size(1)
        x = self.wte(idx) + self.wpe(torch.arange(t, device=idx.device))
        logits = self.lm_head(self.h(x, mask=self.mask[:t, :t], is_causal=True))
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss

    @torch.no_grad()
    def generate(self, idx, max_new_tokens):
        for _ in range(max_new_tokens):
            logits, _ = self(idx)
            idx = torch.cat((idx, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
        return idx


class Trainer:
    @staticmethod
    def get_default_config():
        return SimpleNamespace(
            num_workers=0,
            max_iters=150,
            batch_size=32,
            learning_rate=1e-3,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            grad_norm_clip=1.0,
        )

    def __init__(self, config, model, train_dataset):
        self.config = config
        self.model = model
        self.optimizer = None
        self.train_dataset = train_dataset
        self.callbacks = defaultdict(list)
        self.iter_num = 0

    def add_callback(self, onevent, callback):
        self.callbacks[onevent].append(callback)

    def trigger_callbacks(self, onevent):
        for callback in self.callbacks.get(onevent, []):
            callback(self)

    def run(self):
        model, config = self.model, self.config
        self.optimizer = model.configure_optimizers(config)
        train_loader = DataLoader(
            self.train_dataset,
            sampler=RandomSampler(self.train_dataset, replacement=True, num_samples=int(1e10)),
            shuffle=False,
            batch_size=config.batch_size,
            num_workers=config.num_workers,
        )
        model.train()
        self.iter_num = 0
        data_iter = iter(train_loader)
        while True:
            try:
                batch = next(data_iter)
            except StopIteration:
                data_iter = iter(train_loader)
                batch = next(data_iter)
            x, y = batch
            _, self.loss = model(x, y)
            model.zero_grad(set_to_none=True)
            self.loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.grad_norm_clip)
            self.optimizer.step()
            self.trigger_callbacks("on_batch_end")
            self.iter_num += 1
            if config.max_iters is not None and self.iter_num >= config.max_iters:
                break


@torch.no_grad()
def accuracy(model, dataset):
    model.eval()
    inp = dataset.sequences
    out = model.generate(inp, dataset.length)[:, dataset.length :]
    model.train()
    return (out == torch.sort(inp)[0]).all(1).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description="Teach a small GPT to sort")
    parser.add_argument("--max-iters", type=int, default=150)
    parser.add_argument("--seed", type=int, default=3407)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    train_dataset, test_dataset = SortDataset(2000, seed=1), SortDataset(200, seed=2)
    model = GPT(train_dataset.digits, train_dataset.get_block_size())
    config = Trainer.get_default_config()
    config.max_iters = args.max_iters
    trainer = Trainer(config, model, train_dataset)
    accuracies, saved = [], []

    def batch_end_callback(trainer):
        if trainer.iter_num % 10 == 0:
            print(f"iter {trainer.iter_num}: train loss {trainer.loss.item():.5f}")
        if (trainer.iter_num + 1) % 50 == 0:
            accuracies.append(accuracy(trainer.model, test_dataset))
            print(f"iter {trainer.iter_num}: {accuracies[-1]:.1%} sorted correctly")
            if accuracies[-1] == max(accuracies):
                torch.save(trainer.model.state_dict(), "model.pt")
                saved.append(trainer.iter_num)

    trainer.add_callback("on_batch_end", batch_end_callback)
    trainer.run()
    torch.save(trainer.model.state_dict(), "last.pt")
    facts = {
        "iterations": trainer.iter_num,
        "validations": len(accuracies),
        "checkpoints": len(saved),
        "accuracy": accuracy(trainer.model, test_dataset),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
