# SPDX-License-Identifier: BSD-3-Clause
"""Settings that several experiments share: the simulated workers, and the learning rates to try."""

__all__ = ["CHEN", "FACTORS"]

CHEN = "98.83% lognormal:1.603s,0.042 | 0.97% lognormal:2.66s,0.094 | 0.2% exp:1.81s,shift=1.603s"
"""Workers whose gradients arrive as Chen et al. measured; the experiment `stragglers` fits this."""

FACTORS = (0.1, 1 / 3, 1.0, 3.0)
"""Multiples of a learning rate to try, the same for every rule."""
