# SPDX-License-Identifier: BSD-3-Clause
"""Paceline: data-parallel training for PyTorch that does not wait for slow workers."""
