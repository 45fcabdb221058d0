# SPDX-License-Identifier: BSD-3-Clause
"""The server's side of a run."""
