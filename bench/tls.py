# SPDX-License-Identifier: BSD-3-Clause
"""Measure what TLS costs: the throughput of a data connection, and the time of a step over TCP.

With and without TLS in turn, over loopback, where nothing else limits the throughput. Both ends
share this machine's cores. The tables have the medians over several rounds.
"""

import argparse
import contextlib
import io
import multiprocessing
import os
import select
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

from runtime import WARM_UP, mean_step
from workloads import WORKLOADS

from paceline.run.launch.forkserver import ForkServer
from paceline.run.launch.launcher import Launcher
from paceline.run.net.data_socket import DataSocket, receive_payloads, send_payloads
from paceline.run.net.payload_stream import PayloadReceiver, PayloadSender, Span
from paceline.run.net.tls import TlsFiles, client_context, server_context, wrap_client, wrap_server
from paceline.run.settings import Settings
from paceline.spec import RunSpec

HERE = Path(__file__).parent
STREAM_BYTES = 1 << 28


def new_certificate(folder: Path) -> TlsFiles:
    """Return a certificate that signs itself, and its key."""
    files = TlsFiles(str(folder / "cert.pem"), str(folder / "key.pem"))
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=bench"
    where = ["-days", "2", "-keyout", files.key, "-out", files.cert]
    subprocess.run([*command.split(), *where], check=True, capture_output=True)
    return files


def send(address: tuple[str, int], files: TlsFiles | None, results) -> None:
    """Send a payload; report the processor time."""
    sock = socket.create_connection(address)
    if files is not None:
        sock = wrap_client(sock, client_context(files), address[0])
    sock.sendall(b"x")
    stream, sender = DataSocket(sock), PayloadSender()
    sender.add(1, [Span(memoryview(bytearray(STREAM_BYTES)))])
    began = process_time()
    while sender:
        select.select([], [stream], [])
        send_payloads(stream, sender)
    results.send(process_time() - began)


def stream(files: TlsFiles | None) -> tuple[float, float, float]:
    """Return bytes per second, and the processor seconds per byte of the sender and receiver."""
    here, there = multiprocessing.Pipe()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        arguments = (listening.getsockname(), files, there)
        sender = multiprocessing.get_context("spawn").Process(target=send, args=arguments)
        sender.start()
        sock, _ = listening.accept()
    if files is not None:
        sock = wrap_server(sock, server_context(files))
    sock.recv(1)
    data, receiver = DataSocket(sock), PayloadReceiver()
    receiver.expect(1, [Span(memoryview(bytearray(STREAM_BYTES)))])
    began, busy = perf_counter(), process_time()
    while receiver.is_expecting:
        if not data.has_unread():
            select.select([data], [], [])
        for _ in receive_payloads(data, receiver):
            break  # the sender may be gone
    took, busy = perf_counter() - began, process_time() - busy
    sending = here.recv()
    sender.join()
    data.close()
    return STREAM_BYTES / took, sending / STREAM_BYTES, busy / STREAM_BYTES


def step_s(name: str, workers: int, files: TlsFiles | None, forkserver: ForkServer) -> float:
    """Train under `sync` over TCP; return the mean seconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder, "times")
        settings = Settings(
            spec=RunSpec(workers=workers, steps=WORKLOADS[name]().steps + WARM_UP),
            script=str(HERE / "paced.py"),
            arguments=(name, str(times)),
            transport="tcp",
            tls_cert="" if files is None else files.cert,
            tls_key="" if files is None else files.key,
        )
        with contextlib.redirect_stdout(io.StringIO()):
            assert Launcher(settings, Path(folder), forkserver).run() == 0
        return mean_step(times)


def measure(options: argparse.Namespace, files: TlsFiles) -> None:
    """Measure in turn and print both tables."""
    print(f"{'data connection':16} {'GB/s':>6} {'sender s/GB':>12} {'receiver s/GB':>14}")
    rounds = [(stream(None), stream(files)) for _ in range(options.rounds)]
    for name, runs in zip(("plain", "TLS"), zip(*rounds, strict=True), strict=True):
        rate, sending, receiving = (median(column) for column in zip(*runs, strict=True))
        print(f"{name:16} {rate / 1e9:6.2f} {sending * 1e9:12.2f} {receiving * 1e9:14.2f}")
    print(f"{'model':6} {'workers':>7} {'TCP':>10} {'TLS':>10} {'TLS/TCP':>8}")
    with ForkServer() as forkserver:
        for case in options.cases.split(","):
            name, _, workers = case.partition(":")
            both = [
                [step_s(name, int(workers), one, forkserver) for one in (None, files)]
                for _ in range(options.rounds)
            ]
            plain, tls = (median(times) for times in zip(*both, strict=True))
            ratio = median(b / a for a, b in both)
            print(
                f"{name:6} {workers:>7} {1e3 * plain:7.2f} ms {1e3 * tls:7.2f} ms {ratio:8.2f}",
                flush=True,
            )


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", default="1m:4,cnn:2", help="models and numbers of workers")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(HERE)  # where the processes find the workloads
    sys.path.insert(0, str(HERE))
    with tempfile.TemporaryDirectory() as folder:
        measure(options, new_certificate(Path(folder)))


if __name__ == "__main__":
    main()
