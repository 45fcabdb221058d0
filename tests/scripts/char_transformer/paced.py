# SPDX-License-Identifier: BSD-3-Clause
"""A character transformer: random crops of one text, and a learning rate that is set by hand."""

import json
import math

import torch
from torch import nn
from torch.nn import functional as F

import paceline

# -----------------------------------------------------------------------------
eval_interval = 40
eval_iters = 5
log_interval = 20
batch_size = 16
block_size = 24
n_layer, n_head, n_embd, dropout = 2, 2, 32, 0.0
learning_rate, min_lr = 5e-3, 1e-3
max_iters = 160
warmup_iters = 16
weight_decay, beta1, beta2, grad_clip = 1e-1, 0.9, 0.99, 1.0
# -----------------------------------------------------------------------------

torch.manual_seed(1337)

text = "".join(f"{a} + {b} = {a + b}; " for a in range(40) for b in range(20))
letters = sorted(set(text))
stoi = {letter: number for number, letter in enumerate(letters)}
data = torch.tensor([stoi[letter] for letter in text])
splits = {"train": data[: int(0.9 * len(data))], "val": data[int(0.9 * len(data)) :]}


def get_batch(split):
    source = splits[split]
    ix = torch.randint(len(source) - block_size, (batch_size,))
    x = torch.stack([source[i : i + block_size] for i in ix])
    y = torch.stack([source[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd)
        )

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (
            part.view(b, t, n_head, c // n_head).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(n_embd, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(len(letters), n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*(Block() for _ in range(n_layer)))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, len(letters), bias=False)
        self.lm_head.weight = self.wte.weight  # weight tying
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        logits = self.lm_head(self.ln_f(self.blocks(x)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def estimate_loss():
    model.eval()
    out = {
        split: sum(model(*get_batch(split))[1].item() for _ in range(eval_iters)) / eval_iters
        for split in splits
    }
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


model = GPT()
decay = [p for p in model.parameters() if p.dim() >= 2]
no_decay = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0}]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2))

run = paceline.join()
model, optimizer = run.prepare(model, optimizer)

best_val_loss, evaluations, checkpoints, rates = 1e9, [], 0, []
X, Y = get_batch("train")
iter_num = 0
while True:
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        evaluations.append(losses["val"])
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if losses["val"] < best_val_loss:
            best_val_loss = losses["val"]
            if iter_num > 0:
                checkpoint = {"model": model.state_dict(), "iter_num": iter_num}
                torch.save(checkpoint, "ckpt.pt")
                checkpoints += 1
    logits, loss = model(X, Y)
    X, Y = get_batch("train")  # fetch the next batch while the model works
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    rates.append(optimizer.param_groups[0]["lr"])
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % log_interval == 0:
        print(f"iter {iter_num}: loss {loss.item():.4f}")
    iter_num += 1
    if iter_num > max_iters:
        break

facts = {
    "iterations": iter_num,
    "validations": len(evaluations),
    "checkpoints": checkpoints,
    "lr": rates[-1],
    "before": evaluations[0],
    "loss": evaluations[-1],
}
print(json.dumps(facts))
