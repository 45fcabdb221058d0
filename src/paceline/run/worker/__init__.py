# SPDX-License-Identifier: BSD-3-Clause
"""The worker's side of a run."""
