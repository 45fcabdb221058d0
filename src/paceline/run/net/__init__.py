# SPDX-License-Identifier: BSD-3-Clause
"""Messages, connections and transports between the processes of a run."""
