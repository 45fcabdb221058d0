# SPDX-License-Identifier: BSD-3-Clause
"""The networks of the experiments, in plain torch, one family a file.

Every network keeps the mini-batches of several workers apart when they go through it in one pass,
concatenated along dimension 0: the gradient of the mean of their losses is the mean of the
gradients that each would have given alone. Those that look at the whole batch (batch norm) are told
how many there are, by `norm.set_groups`. First weights come from torch's random numbers, so
`torch.manual_seed` fixes them; nothing here loads data or knows of schedules.
"""
