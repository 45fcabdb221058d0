# SPDX-License-Identifier: BSD-3-Clause
"""Batch norm that keeps the mini-batches of workers apart, and weight norm.

When the mini-batches of G workers go through a network in one pass, each must be normalized with
its own mean and variance, as it would be on its worker. `BatchNorm` calls torch's kernel once per
worker, which is the fastest way to do this for G from 1 to 64. Folding workers into channels costs
four copies of the batch, and a formula in plain tensor operations many more.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d

from paceline.errors import SpecError

__all__ = ["BatchNorm", "WeightNormConv2d", "set_groups"]


class BatchNorm(nn.BatchNorm2d):
    """Batch norm that uses the statistics of each worker's own mini-batch in training.

    The running statistics become the average of those that the workers would have computed, all
    starting from the same ones: (1 - m) old + m (mean of the groups' statistics).
    """

    groups: int = 1
    """Number of equally large mini-batches that a batch is concatenated from."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.groups == 1:
            return super().forward(input)
        if len(input) % self.groups:
            raise SpecError(
                f"cannot split a batch of {len(input)} into {self.groups} equal mini-batches; "
                "call set_groups with the number of mini-batches in the batch"
            )
        means = input.new_zeros(self.groups, self.num_features)
        variances = torch.zeros_like(means)
        parts = [
            # With a momentum of 1, torch replaces the running statistics by those of the group.
            batch_norm(part, mean, var, self.weight, self.bias, True, 1.0, self.eps)
            for part, mean, var in zip(input.chunk(self.groups), means, variances, strict=True)
        ]
        self._update_running(means.mean(0), variances.mean(0))
        return torch.cat(parts)

    def _update_running(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)  # as each worker would
        momentum = self.momentum
        if momentum is None:  # in torch, this means the plain average of all batches
            momentum = 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean, momentum)
        self.running_var.lerp_(variance, momentum)


def set_groups(model: nn.Module, groups: int) -> None:
    """Set how many equally large mini-batches the model's next batches consist of."""
    if groups < 1:
        raise SpecError(f"groups must be >= 1, got {groups}")
    for module in model.modules():
        if isinstance(module, BatchNorm):
            module.groups = groups


class WeightNormConv2d(nn.Conv2d):
    """A convolution that learns the direction and the length of each kernel separately.

    The kernel of an output channel is gain * weight / |weight| (Salimans and Kingma 2016). The
    initial kernels are those of He initialization for a ReLU. Unlike torch's parametrization, this
    module can be pickled.
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
