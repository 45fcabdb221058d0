# SPDX-License-Identifier: BSD-3-Clause
"""`paceline work`: start workers for a run whose server is elsewhere."""

import os
import sys
from pathlib import Path
from typing import NoReturn

from paceline.cli.verb_options import ServeOptions, WorkOptions
from paceline.errors import SpecError
from paceline.run.launch.environment import Identity, check_private, variables
from paceline.run.launch.forkserver import ForkServer
from paceline.run.launch.work_launcher import WorkLauncher
from paceline.run.net.address import tcp_address
from paceline.run.net.tls import TlsFiles, client_context
from paceline.run.settings import Settings
from paceline.spec import RunSpec

__all__ = ["become", "head_address", "run", "tls_files"]


def run(options: WorkOptions) -> NoReturn:
    """Start the workers, wait until they have ended, exit with their code."""
    if options.number is not None and options.processes > 1:
        raise SpecError("--number is the number of one worker; leave it out with --processes")
    who = Identity(
        head_address(options.connect),
        options.token_file.resolve(),
        Path(),
        options.number,
        tls=tls_files(options),
    )
    _check(options.script, who)
    settings = Settings(
        spec=RunSpec(workers=options.processes),
        restart=options.restart,
        output=options.output,
        script=str(options.script),
        arguments=tuple(options.arguments or ()),
    )
    with ForkServer(options.script) as forkserver:
        launcher = WorkLauncher(who, settings, forkserver)
        forkserver.start()
        code = launcher.run()
    raise SystemExit(code)


def become(options: ServeOptions, who: Identity) -> NoReturn:
    """Replace this process by Python with the script, as a process of a run."""
    script = options.script
    if script is None:
        raise SpecError("no script given")
    _check(script, who)
    sys.stdout.flush()
    command = [sys.executable, str(script), *(options.arguments or ())]
    os.execve(sys.executable, command, {**os.environ, **variables(who)})


def _check(script: Path, who: Identity) -> None:
    """Raise SpecError if the script, the token or a TLS file can't be used."""
    if not script.is_file():
        raise SpecError(f"script {script} does not exist")
    if who.tls is not None:
        client_context(who.tls)  # raises if they can't be used
    who.token()  # raises if it can't be read
    check_private(who.token_file)


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
