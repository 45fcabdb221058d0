# SPDX-License-Identifier: BSD-3-Clause
"""The trace of a run: one schema and one reader for simulated and real runs."""
