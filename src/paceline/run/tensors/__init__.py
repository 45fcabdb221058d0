# SPDX-License-Identifier: BSD-3-Clause
"""The tensors of a run: their layout, sums, optimizer steps and state."""
