# SPDX-License-Identifier: BSD-3-Clause
"""`paceline serve`: start the server of a run whose workers are elsewhere."""

from functools import partial
from pathlib import Path
from typing import NoReturn

from paceline.cli.run import Load, start
from paceline.cli.verb_options import ServeOptions
from paceline.cli.work import become, head_address, tls_files
from paceline.errors import SpecError
from paceline.run.launch.environment import Identity, check_listening, check_private
from paceline.run.launch.launcher import Reachable
from paceline.run.launch.outer_launcher import is_announced
from paceline.run.launch.run_folder import write_token
from paceline.run.net.address import is_loopback, tcp_address

__all__ = ["run"]


def run(options: ServeOptions, load: Load) -> None:
    """Start or resume the run, wait until it ends, exit with its code."""
    address = tcp_address(options.listen)
    if options.connect:
        _join_as_server(options, address)
    if options.number is not None:
        raise SpecError("--number needs --connect, the address of the first server")
    if options.token_file is None and not is_loopback(address) and not is_announced():
        raise SpecError(
            f"other hosts can reach {options.listen}, so their workers need a secret: give a "
            "--token-file, which is created if it doesn't exist, and copy it to their hosts"
        )
    if options.token_file is not None and options.token_file.exists():
        check_private(options.token_file)  # before the run's folder is created
    start(options, load, partial(_reachable, address, options.token_file))


def _join_as_server(options: ServeOptions, address: str) -> NoReturn:
    """Become another server of a run: replace this process by Python with the script."""
    if options.number is None or options.token_file is None:
        raise SpecError("--connect also needs --number, from 1 on, and --token-file")
    head = head_address(options.connect)
    check_listening(address, options.token_file)
    become(
        options,
        Identity(
            head,
            options.token_file.resolve(),
            Path(),
            worker=None,
            tls=tls_files(options),
            server=options.number,
            listen=address,
        ),
    )


def _reachable(address: str, token_file: Path | None, run_dir: Path) -> Reachable:
    """Return how workers reach the server; create the token if there is none."""
    path = token_file or run_dir / "token"
    try:
        if not path.exists():
            write_token(path)
        check_private(path)
    except OSError as error:
        raise SpecError(f"cannot write the token to {path}: {error.strerror}") from None
    check_listening(address, path)
    return Reachable(address, path.resolve())
