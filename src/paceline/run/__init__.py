# SPDX-License-Identifier: BSD-3-Clause
"""The runtime: real processes and tensors around the same core. Start at `server/server.py`."""
