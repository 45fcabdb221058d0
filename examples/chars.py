# SPDX-License-Identifier: BSD-3-Clause
"""Train a character language model on Python source code from the standard library.

$ paceline run --workers 4 --policy backup:1 --steps 300 examples/chars.py
server    | 300 updates of 28800 samples in 15.0 s
worker 0  | 2.04 bits per character on the test set
worker 0  |     def __uning):
worker 0  |         ('if arg, _getattr(msbion__(self, False):
"""

import argparse
import inspect
import math
import typing

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline

parser = argparse.ArgumentParser(description="Train a character language model.")
parser.add_argument("--lr", type=float, default=0.005)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

torch.manual_seed(args.seed)
text = "".join(map(inspect.getsource, [argparse, inspect, typing]))
letters = sorted(set(text))
code = {letter: number for number, letter in enumerate(letters)}
codes = torch.tensor([code[letter] for letter in text])
pieces = codes.unfold(0, 33, 32)  # 32 characters each, plus the next character as target
test = torch.arange(len(pieces)) % 20 == 0  # every twentieth piece is for testing
loader = DataLoader(TensorDataset(pieces[~test]), batch_size=32, shuffle=True)


class Writer(nn.Module):
    def __init__(self, letters, width=96):
        super().__init__()
        self.embedding = nn.Embedding(letters, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, letters)

    def forward(self, codes, state=None):
        outputs, state = self.gru(self.embedding(codes), state)
        return self.head(outputs), state

    def loss(self, pieces):
        scores, _ = self(pieces[:, :-1])
        return cross_entropy(scores.flatten(0, 1), pieces[:, 1:].flatten())

    @torch.no_grad()
    def sample(self, codes, length):
        scores, state = self(codes)
        for _ in range(length):
            codes = torch.cat([codes, scores[-1:].softmax(-1).multinomial(1)[0]])
            scores, state = self(codes[-1:], state)
        return codes


model = Writer(len(letters))
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

run = paceline.join()
model, optimizer, loader = run.prepare(model, optimizer, loader)

for _ in range(args.epochs):
    for (batch,) in loader:
        optimizer.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.log(loss=loss.item())

if run.is_first:
    print(f"{model.loss(pieces[test]).item() / math.log(2):.2f} bits per character on the test set")
    begin = torch.tensor([code[letter] for letter in "    def "])
    print("".join(letters[number] for number in model.sample(begin, 150)))
