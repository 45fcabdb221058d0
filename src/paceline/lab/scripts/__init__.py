# SPDX-License-Identifier: BSD-3-Clause
"""Scripts that the lab runs on real processes, as a user would run a script of their own."""
