# SPDX-License-Identifier: BSD-3-Clause
"""The runtime: real processes and real tensors around the same core. Read `server/server.py` first."""
