# SPDX-License-Identifier: BSD-3-Clause
"""Starting, watching and ending the processes of a run on one machine."""
