# SPDX-License-Identifier: BSD-3-Clause
"""Data files are found or downloaded, completely and checked, or not at all."""

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Barrier, Thread

import pytest

from paceline.errors import SpecError
from paceline.lab.data import a9a, cifar10, mnist, shakespeare, tiny_imagenet
from paceline.lab.data.download import Source, locate

BODY = bytes(range(256)) * 9_000  # more than one chunk


@dataclass
class Server:
    """A real HTTP server on this machine, with configurable answers."""

    url: str = ""
    body: bytes = BODY
    length: int | None = len(BODY)  # the announced length
    status: int = 200
    asked: list[str] = field(default_factory=list)
    meeting: Barrier | None = None  # requests wait here for each other before any is answered


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append(self.path)
            if state.meeting is not None:
                state.meeting.wait(timeout=30)
            self.send_response(state.status)
            if state.length is not None:
                self.send_header("Content-Length", str(state.length))
            self.end_headers()
            self.wfile.write(state.body)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing; tests look at `asked`."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        state.url = f"http://127.0.0.1:{http.server_address[1]}"
        thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        http.shutdown()
        thread.join()


def source_at(server: Server, **changes: str) -> Source:
    known = {
        "path": "set/file.bin",
        "url": f"{server.url}/file.bin",
        "sha256": hashlib.sha256(BODY).hexdigest(),
    }
    return Source(**(known | changes))


def test_missing_file_is_downloaded(server: Server, tmp_path: Path) -> None:
    calls: list[tuple[int, int | None]] = []
    path = locate(tmp_path / "new", source_at(server), lambda *args: calls.append(args))
    assert path == tmp_path / "new/set/file.bin"
    assert path.read_bytes() == BODY
    assert [path.name for path in path.parent.iterdir()] == ["file.bin"]
    assert calls[-1] == (len(BODY), len(BODY))
    assert [size for size, _ in calls] == sorted(size for size, _ in calls)
    assert len(calls) > 1


def test_existing_file_is_not_downloaded(server: Server, tmp_path: Path) -> None:
    locate(tmp_path, source_at(server))
    locate(tmp_path, source_at(server))
    assert server.asked == ["/file.bin"]


def test_file_in_another_packing_is_used(server: Server, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old/file.xz").touch()
    source = Source("set/file.bin", server.url, "", others=("old/file.gz", "old/file.xz"))
    assert locate(tmp_path, source) == tmp_path / "old/file.xz"
    assert server.asked == []


def test_download_without_content_length_works(server: Server, tmp_path: Path) -> None:
    server.length = None
    calls: list[tuple[int, int | None]] = []
    path = locate(tmp_path, source_at(server), lambda *args: calls.append(args))
    assert path.read_bytes() == BODY
    assert calls[-1] == (len(BODY), None)


def refused(folder: Path, source: Source) -> str:
    """Return the error of a failed download, and check that nothing of it is left."""
    with pytest.raises(SpecError) as caught:
        locate(folder, source)
    assert [path for path in folder.rglob("*") if path.is_file()] == []
    message = str(caught.value)
    assert "\n" not in message
    for part in (source.path, str(folder), source.url, "--data DIR"):
        assert part in message
    return message


def test_data_folder_that_is_a_file_is_reported(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match=r"not writable \(Not a directory\)"):
        locate(tmp_path / "file", source_at(server))


def test_truncated_download_is_discarded(server: Server, tmp_path: Path) -> None:
    server.body = BODY[:1_000_000]
    assert f"1000000 of {len(BODY)} bytes" in refused(tmp_path, source_at(server))


def test_truncated_download_without_content_length_is_discarded(
    server: Server, tmp_path: Path
) -> None:
    server.body, server.length = BODY[:-1], None
    assert hashlib.sha256(BODY[:-1]).hexdigest() in refused(tmp_path, source_at(server))


def test_download_with_wrong_checksum_is_discarded(server: Server, tmp_path: Path) -> None:
    message = refused(tmp_path, source_at(server, sha256="0" * 64))
    assert f"expected SHA-256 {'0' * 64}, got {hashlib.sha256(BODY).hexdigest()}" in message


def test_http_error_is_reported_with_its_status(server: Server, tmp_path: Path) -> None:
    server.status = 404
    assert "404" in refused(tmp_path, source_at(server))


def test_refused_connection_is_reported(server: Server, tmp_path: Path) -> None:
    closed = source_at(server, url="http://127.0.0.1:1/file.bin")  # nobody listens there
    assert "Connection refused" in refused(tmp_path, closed)


def test_unknown_host_is_reported(server: Server, tmp_path: Path) -> None:
    nowhere = source_at(server, url="http://nowhere.invalid/file.bin")
    assert "urlopen" not in refused(tmp_path, nowhere)


def test_download_works_after_a_failed_one(server: Server, tmp_path: Path) -> None:
    server.body = BODY[:-1]
    refused(tmp_path, source_at(server))
    server.body = BODY
    assert locate(tmp_path, source_at(server)).read_bytes() == BODY


def test_folder_that_cannot_be_created_is_reported(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match=r"set/file.bin is not in .*--data DIR"):
        locate(tmp_path / "file", source_at(server))


def test_folder_in_place_of_the_file_is_reported(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set/file.bin").mkdir(parents=True)
    with pytest.raises(SpecError, match=r"cannot read .*set/file.bin \(Is a directory\)"):
        locate(tmp_path, source_at(server))


def test_two_processes_can_download_the_same_file_at_once(server: Server, tmp_path: Path) -> None:
    server.meeting = Barrier(2)  # both processes find the file missing
    source = source_at(server)
    program = (
        "import sys, pathlib\n"
        "from paceline.lab.data.download import Source, locate\n"
        "print(locate(pathlib.Path(sys.argv[1]), Source(*sys.argv[2:])))\n"
    )
    command = [sys.executable, "-c", program, tmp_path, source.path, source.url, source.sha256]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=60)[0].strip() for process in running]
    assert printed == [str(tmp_path / "set/file.bin")] * 2
    assert len(server.asked) == 2
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "set/file.bin"]
    assert (tmp_path / "set/file.bin").read_bytes() == BODY


def test_files_with_official_names_have_the_official_checksums(
    data_folder: Path,
) -> None:
    sources = [s for m in (mnist, cifar10, tiny_imagenet, shakespeare, a9a) for s in m.SOURCES]
    found = [source for source in sources if (data_folder / source.path).is_file()]
    if not found:
        pytest.skip(f"no file in {data_folder} has its official name")
    for source in found:
        data = (data_folder / source.path).read_bytes()
        assert (source.path, hashlib.sha256(data).hexdigest()) == (source.path, source.sha256)
