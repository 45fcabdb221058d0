# SPDX-License-Identifier: BSD-3-Clause
"""Workers that leave because their machine is about to go, as `run.worker.departure` lets them.

The goodbye travels over a connection of its own. A signal can interrupt a real worker anywhere, so
here it ends wherever it is, as soon as the server has answered or has had time to.
"""

from __future__ import annotations

import signal
from contextlib import suppress

from paceline.errors import PeerLost
from paceline.run.net.messages import LeaveRun
from paceline.run.worker.departure import GOODBYE_S
from storm.host import Host
from storm.world import Process

__all__ = ["say_goodbye"]


def say_goodbye(host: Host, worker: Process) -> None:
    """Let a worker say goodbye and exit."""
    helper = Process(host.world, f"goodbye of {worker.name}")  # what its signal handler does
    assert host.launcher is not None
    host.launcher.on_exit.append(lambda: helper.exit(-9))

    def leave() -> None:
        run = host.runs.get(worker.pid)
        if run is not None and run.departure.session:
            with suppress(PeerLost):
                end = host.kernel.dial(helper)
                end.send(LeaveRun(run.worker, run.departure.session))
                end.wait_readable(GOODBYE_S)
                end.close()
        if worker.is_alive:
            worker.has_left = True
            worker.exit(-signal.SIGTERM)
            worker.code = 0
        helper.exit(0)

    helper.spawn(leave, "main")
