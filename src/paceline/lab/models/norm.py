# SPDX-License-Identifier: BSD-3-Clause
"""Normalisation: batch norm that keeps workers apart, and weight norm.

When the mini-batches of G workers go through a network in one pass, each must be normalised with
its own mean and variance, as it would be on its worker. `BatchNorm` does so, a call of torch's
kernel for each worker: of the ways to write it this is the quickest for G from 1 to 64. Folding
workers into channels costs four copies of the batch, and doing it by hand many more.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d

from paceline.errors import SpecError

__all__ = ["BatchNorm", "WeightNormConv2d", "set_groups"]


class BatchNorm(nn.BatchNorm2d):
    """Batch norm in which each worker's mini-batch has its own statistics while training.

    Running statistics become the average of what each worker, beginning with the same ones, would
    have made of them: (1 - m) old + m (mean of the groups' statistics).
    """

    groups: int = 1
    """How many mini-batches of equal size a batch consists of, one after the other."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.groups == 1:
            return super().forward(input)
        if len(input) % self.groups:
            raise SpecError(
                f"a batch of {len(input)} cannot be {self.groups} mini-batches of equal size; "
                "call set_groups with the number of mini-batches in the batch"
            )
        means = input.new_zeros(self.groups, self.num_features)
        variances = torch.zeros_like(means)
        parts = [
            # With a momentum of 1, the running statistics become those of the group.
            batch_norm(part, mean, var, self.weight, self.bias, True, 1.0, self.eps)
            for part, mean, var in zip(input.chunk(self.groups), means, variances, strict=True)
        ]
        self._follow(means.mean(0), variances.mean(0))
        return torch.cat(parts)

    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)  # as each of the workers would
        momentum = self.momentum
        if momentum is None:  # torch's way to ask for the plain average of all batches
            momentum = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean, momentum)
        self.running_var.lerp_(variance, momentum)


def set_groups(model: nn.Module, groups: int) -> None:
    """Say of how many mini-batches of equal size the model's next batches consist."""
    if groups < 1:
        raise SpecError(f"groups must be >= 1, got {groups}")
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.groups = groups


class WeightNormConv2d(nn.Conv2d):
    """A convolution whose kernels have a direction and a length that are learnt apart.

    The kernel of an output channel is gain * weight / |weight| (Salimans and Kingma 2016). It
    begins as that of a convolution whose first weights are He's, which a ReLU is to follow. Unlike
    torch's parametrization it can be pickled.
    """

    def __init__(self, inputs: int, outputs: int, size: int, padding: int = 0) -> None:
        super().__init__(inputs, outputs, size, padding=padding)
        nn.init.kaiming_normal_(self.weight, nonlinearity="relu")
        self.gain = nn.Parameter(self._lengths().detach())

    def _lengths(self) -> Tensor:
        lengths: Tensor = self.weight.flatten(1).norm(dim=1)
        return lengths

    def forward(self, input: Tensor) -> Tensor:
        scale = self.gain / self._lengths()
        kernels = self.weight * scale[:, None, None, None]
        return conv2d(input, kernels, self.bias, padding=self.padding)
