# SPDX-License-Identifier: BSD-3-Clause
"""`paceline work`: join a run as one of its workers."""

import os
import sys
from typing import NoReturn

from paceline.cli.verb_options import ServeOptions, WorkOptions
from paceline.errors import SpecError
from paceline.run.launch.environment import Identity, check_private, variables
from paceline.run.net.address import tcp_address
from paceline.run.net.tls import TlsFiles, client_context

__all__ = ["become", "head_address", "run", "tls_files"]


def run(options: WorkOptions) -> None:
    """Become the worker: replace this process by Python with the script."""
    folder = options.script.parent
    who = Identity(
        head_address(options.connect),
        options.token_file.resolve(),
        folder,
        options.number,
        tls=tls_files(options),
    )
    become(options, who)


def become(options: WorkOptions | ServeOptions, who: Identity) -> NoReturn:
    """Replace this process by Python with the script, as a process of a run."""
    script = options.script
    if script is None or not script.is_file():
        raise SpecError("no script given" if script is None else f"script {script} does not exist")
    if who.tls is not None:
        client_context(who.tls)  # raises if they can't be used
    who.token()  # raises if it can't be read
    check_private(who.token_file)
    sys.stdout.flush()
    command = [sys.executable, str(script), *(options.arguments or ())]
    os.execve(sys.executable, command, {**os.environ, **variables(who)})


def head_address(text: str) -> str:
    """Return the address of the server to connect to; raises SpecError if it isn't one."""
    address = tcp_address(text)
    if address.endswith(":0"):
        raise SpecError(f"--connect needs the port of the server, got {text}")
    return address


def tls_files(options: WorkOptions | ServeOptions) -> TlsFiles | None:
    """Return the files for TLS, with absolute paths; None: connections aren't encrypted."""
    paths = [options.tls_cert, options.tls_key, options.tls_ca]
    if not any(paths):
        return None
    return TlsFiles(*["" if path is None else str(path.resolve()) for path in paths])
