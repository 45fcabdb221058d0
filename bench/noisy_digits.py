# SPDX-License-Identifier: BSD-3-Clause
"""Train a small network on handwritten digits, with small batches, until it reaches an accuracy.

For pilots.py. The arguments are the learning rate and the test accuracy at which to stop. Every
worker evaluates the version that it computes at, and logs the mean of its last evaluations: without
that, a lucky update would end the training.
"""

import sys
from collections import deque
from statistics import fmean

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import paceline

rate, goal = map(float, sys.argv[1:])
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
test = torch.arange(len(images)) % 5 == 0
loader = DataLoader(TensorDataset(images[~test], labels[~test]), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
run = paceline.join()
model, optimizer, loader = run.prepare(model, optimizer, loader)
evaluations = deque(maxlen=20)
accuracy = 0.0
while not run.finished:
    for inputs, targets in loader:
        if accuracy >= goal:  # it was logged with the last gradient
            run.stop()
        with torch.no_grad():
            correct = model(images[test]).argmax(1) == labels[test]
        evaluations.append(correct.float().mean().item())
        if len(evaluations) == evaluations.maxlen:
            accuracy = fmean(evaluations)
        run.log(accuracy=accuracy)
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
