# SPDX-License-Identifier: BSD-3-Clause
"""`paceline work`: join a run as one of its workers."""

import os
import sys

from paceline.cli.verb_options import WorkOptions
from paceline.errors import SpecError
from paceline.run.launch.environment import Identity, variables
from paceline.run.net.address import tcp_address

__all__ = ["run"]


def run(options: WorkOptions) -> None:
    """Become the worker: replace this process by Python with the script."""
    if not options.script.is_file():
        raise SpecError(f"script {options.script} does not exist")
    address = tcp_address(options.connect)
    if address.endswith(":0"):
        raise SpecError(f"--connect needs the port of the server, got {options.connect}")
    who = Identity(address, options.token_file.resolve(), options.script.parent, options.number)
    who.token()  # raises if it can't be read
    sys.stdout.flush()
    command = [sys.executable, str(options.script), *(options.arguments or ())]
    os.execve(sys.executable, command, {**os.environ, **variables(who)})
