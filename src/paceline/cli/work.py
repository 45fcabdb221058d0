# SPDX-License-Identifier: BSD-3-Clause
"""`paceline work`: join a run as one of its workers."""

import os
import sys

from paceline.cli.verb_options import WorkOptions
from paceline.errors import SpecError
from paceline.run.launch.environment import Identity, variables
from paceline.run.net.address import tcp_address
from paceline.run.net.tls import TlsFiles, client_context

__all__ = ["run"]


def run(options: WorkOptions) -> None:
    """Become the worker: replace this process by Python with the script."""
    if not options.script.is_file():
        raise SpecError(f"script {options.script} does not exist")
    address = tcp_address(options.connect)
    if address.endswith(":0"):
        raise SpecError(f"--connect needs the port of the server, got {options.connect}")
    tls = _tls_files(options)
    if tls is not None:
        client_context(tls)  # raises if they can't be used
    folder = options.script.parent
    who = Identity(address, options.token_file.resolve(), folder, options.number, tls=tls)
    who.token()  # raises if it can't be read
    sys.stdout.flush()
    command = [sys.executable, str(options.script), *(options.arguments or ())]
    os.execve(sys.executable, command, {**os.environ, **variables(who)})


def _tls_files(options: WorkOptions) -> TlsFiles | None:
    """Return the files for TLS, with absolute paths; None: connections aren't encrypted."""
    paths = [options.tls_cert, options.tls_key, options.tls_ca]
    if not any(paths):
        return None
    return TlsFiles(*["" if path is None else str(path.resolve()) for path in paths])
