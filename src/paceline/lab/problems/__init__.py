# SPDX-License-Identifier: BSD-3-Clause
"""What the experiments train: models with their data, one kind a file."""
