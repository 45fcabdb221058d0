# SPDX-License-Identifier: BSD-3-Clause
"""Which Paceline this is."""

__all__ = ["RELEASE"]

RELEASE = "0.1.0"
