# SPDX-License-Identifier: BSD-3-Clause
"""The simulator and the planner: the same decisions as in a real run, on a virtual clock."""
