# SPDX-License-Identifier: BSD-3-Clause
"""The networks of the experiments in plain torch, one family per file.

The mini-batches of several workers can go through a network in one pass, concatenated along
dimension 0, without affecting each other: the gradient of the mean of their losses is the mean of
their separate gradients. Layers that look at the whole batch (batch norm) must know how many
mini-batches it holds; `normalization.set_groups` tells them. Initial weights come from torch's
default generator, so `torch.manual_seed` fixes them. Nothing here loads data or knows about
schedules.
"""
