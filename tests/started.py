# SPDX-License-Identifier: BSD-3-Clause
"""The server of a run and its workers, started apart from each other, as users start them."""

import socket
import subprocess
from collections.abc import Iterable
from pathlib import Path

from cli_fixtures import SCRIPT

__all__ = ["Started", "lines_until"]


class Started:
    """The server and the hosts of one run, all in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs: list[subprocess.Popen[str]] = []
        with socket.create_server(("127.0.0.1", 0)) as sock:
            self.address = f"127.0.0.1:{sock.getsockname()[1]}"
        (folder / "token").write_text("a" * 64)
        (folder / "token").chmod(0o600)

    def start(self, verb: str, *words: object) -> subprocess.Popen[str]:
        """Start a program with the token of the run."""
        pipe = subprocess.PIPE
        command = [SCRIPT, verb, "--token-file", "token", *map(str, words)]
        program = subprocess.Popen(command, cwd=self.folder, stdout=pipe, stderr=pipe, text=True)
        self.programs.append(program)
        return program

    def serve(self, path: Path, workers: int, *words: object) -> subprocess.Popen[str]:
        """Start the server."""
        words = ("-w", workers, "--listen", self.address, "--out", "run", *words)
        return self.start("serve", *words, path, self.folder)

    def work(self, path: Path, *words: object) -> subprocess.Popen[str]:
        """Start workers."""
        return self.start("work", "--connect", self.address, *words, path, self.folder)

    def close(self) -> None:
        """End what still runs."""
        for program in self.programs:
            program.kill()
            program.communicate()


def lines_until(stream: Iterable[str], text: str) -> list[str]:
    """Return the lines of a stream up to the first one with this text."""
    lines = []
    for line in stream:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(lines)
