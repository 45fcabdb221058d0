# SPDX-License-Identifier: BSD-3-Clause
"""Certificates for tests of TLS, made with the `openssl` command."""

import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.run.net.tls import TlsFiles

__all__ = ["Authority", "issue"]

LOOPBACK = "IP:127.0.0.1"
_NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]


def _openssl(*words: object) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is missing")
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, timeout=60)


class Authority:
    """A CA in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.cert, self.key = folder / "ca.pem", folder / "ca.key"
        _openssl(
            "req", "-x509", *_NEW_KEY, "-subj", "/CN=test CA", "-days", 2,
            "-keyout", self.key, "-out", self.cert,
        )  # fmt: skip

    def issue(self, name: str, host: str = LOOPBACK, days: int = 2) -> TlsFiles:
        """Return a new certificate for this host, its key and this CA."""
        cert, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        request, extensions = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        _openssl("req", *_NEW_KEY, "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        extensions.write_text(f"subjectAltName={host}\n", encoding="ascii")
        _openssl(
            "x509", "-req", "-in", request, "-CA", self.cert, "-CAkey", self.key,
            "-CAcreateserial", "-days", days, "-extfile", extensions, "-out", cert,
        )  # fmt: skip
        return TlsFiles(str(cert), str(key), str(self.cert))


def issue(folder: Path, name: str = "alone") -> TlsFiles:
    """Return a certificate that signs itself, and its key."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    _openssl(
        "req", "-x509", *_NEW_KEY, "-subj", f"/CN={name}", "-days", 2, "-keyout", key, "-out", cert
    )
    return TlsFiles(str(cert), str(key))
