# SPDX-License-Identifier: BSD-3-Clause
"""What a run tells: its trace, the numbers in it, and figures. Simulated and real runs alike."""
