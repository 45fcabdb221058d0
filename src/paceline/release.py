# SPDX-License-Identifier: BSD-3-Clause
"""The version number of this release."""

__all__ = ["RELEASE"]

RELEASE = "0.1.0"
