# SPDX-License-Identifier: BSD-3-Clause
"""The simulator and the planner: they decide as a real run does, on a virtual clock."""
