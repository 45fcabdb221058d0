# SPDX-License-Identifier: BSD-3-Clause
"""Files of data sets are taken from the folder, or fetched: whole and checked, or not at all."""

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
from paceline.lab.data import a9a, cifar10, mnist, text, tiny_imagenet
from paceline.lab.data.files import Source, locate

BODY = bytes(range(256)) * 9_000  # more than one piece


@dataclass
class Server:
    """A real server on this machine; what it answers can be set."""

    url: str = ""
    body: bytes = BODY
    length: int | None = len(BODY)  # that it tells
    status: int = 200
    asked: list[str] = field(default_factory=list)
    meeting: Barrier | None = None  # of all who ask, before anyone is answered


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
            """Nothing: the test looks at `asked`."""

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


def test_a_missing_file_is_fetched_and_put_in_its_place(server: Server, tmp_path: Path) -> None:
    told: list[tuple[int, int | None]] = []
    path = locate(tmp_path / "new", source_at(server), lambda *args: told.append(args))
    assert path == tmp_path / "new/set/file.bin"
    assert path.read_bytes() == BODY
    assert [path.name for path in path.parent.iterdir()] == ["file.bin"]
    assert told[-1] == (len(BODY), len(BODY))
    assert [size for size, _ in told] == sorted(size for size, _ in told)
    assert len(told) > 1


def test_a_file_that_is_there_is_not_fetched(server: Server, tmp_path: Path) -> None:
    locate(tmp_path, source_at(server))
    locate(tmp_path, source_at(server))
    assert server.asked == ["/file.bin"]


def test_a_file_in_another_packing_will_do(server: Server, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old/file.xz").touch()
    source = Source("set/file.bin", server.url, "", others=("old/file.gz", "old/file.xz"))
    assert locate(tmp_path, source) == tmp_path / "old/file.xz"
    assert server.asked == []


def test_a_server_that_does_not_tell_the_length_is_fine(server: Server, tmp_path: Path) -> None:
    server.length = None
    told: list[tuple[int, int | None]] = []
    path = locate(tmp_path, source_at(server), lambda *args: told.append(args))
    assert path.read_bytes() == BODY
    assert told[-1] == (len(BODY), None)


def refused(folder: Path, source: Source) -> str:
    """Why the file cannot be had; nothing of it is left."""
    with pytest.raises(SpecError) as caught:
        locate(folder, source)
    assert [path for path in folder.rglob("*") if path.is_file()] == []
    message = str(caught.value)
    assert "\n" not in message
    for part in (source.path, str(folder), source.url, "--data DIR"):
        assert part in message
    return message


def test_a_folder_that_is_none_is_told_as_that(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match=r"nothing can be written \(Not a directory\)"):
        locate(tmp_path / "file", source_at(server))


def test_what_ends_too_early_is_not_kept(server: Server, tmp_path: Path) -> None:
    server.body = BODY[:1_000_000]
    assert f"1000000 of {len(BODY)} bytes" in refused(tmp_path, source_at(server))


def test_what_ends_too_early_is_not_kept_where_the_length_is_not_told(
    server: Server, tmp_path: Path
) -> None:
    server.body, server.length = BODY[:-1], None
    assert hashlib.sha256(BODY[:-1]).hexdigest() in refused(tmp_path, source_at(server))


def test_what_has_another_checksum_is_not_kept(server: Server, tmp_path: Path) -> None:
    message = refused(tmp_path, source_at(server, sha256="0" * 64))
    assert f"{hashlib.sha256(BODY).hexdigest()} instead of {'0' * 64}" in message


def test_a_page_that_is_gone_is_told_with_its_number(server: Server, tmp_path: Path) -> None:
    server.status = 404
    assert "404" in refused(tmp_path, source_at(server))


def test_without_a_network_the_way_out_is_told(server: Server, tmp_path: Path) -> None:
    closed = source_at(server, url="http://127.0.0.1:1/file.bin")  # where nobody listens
    assert "Connection refused" in refused(tmp_path, closed)


def test_a_host_without_an_address_is_told(server: Server, tmp_path: Path) -> None:
    nowhere = source_at(server, url="http://nowhere.invalid/file.bin")
    assert "urlopen" not in refused(tmp_path, nowhere)


def test_a_failed_fetch_leaves_the_way_open_for_the_next(server: Server, tmp_path: Path) -> None:
    server.body = BODY[:-1]
    refused(tmp_path, source_at(server))
    server.body = BODY
    assert locate(tmp_path, source_at(server)).read_bytes() == BODY


def test_a_folder_that_cannot_be_made_is_told(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match=r"set/file.bin is not in .*--data DIR"):
        locate(tmp_path / "file", source_at(server))


def test_what_lies_in_the_place_of_a_file_and_is_none_is_told(
    server: Server, tmp_path: Path
) -> None:
    (tmp_path / "set/file.bin").mkdir(parents=True)
    with pytest.raises(SpecError, match=r"set/file.bin cannot be read \(Is a directory\)"):
        locate(tmp_path, source_at(server))


def test_two_processes_may_fetch_the_same_at_once(server: Server, tmp_path: Path) -> None:
    server.meeting = Barrier(2)  # nobody is answered before both have found it missing
    source = source_at(server)
    program = (
        "import sys, pathlib\n"
        "from paceline.lab.data.files import Source, locate\n"
        "print(locate(pathlib.Path(sys.argv[1]), Source(*sys.argv[2:])))\n"
    )
    command = [sys.executable, "-c", program, tmp_path, source.path, source.url, source.sha256]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = [process.communicate(timeout=60)[0].strip() for process in running]
    assert printed == [str(tmp_path / "set/file.bin")] * 2
    assert len(server.asked) == 2
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "set/file.bin"]
    assert (tmp_path / "set/file.bin").read_bytes() == BODY


def test_files_at_hand_under_their_official_names_have_the_official_checksums(
    data_folder: Path,
) -> None:
    sources = [s for m in (mnist, cifar10, tiny_imagenet, text, a9a) for s in m.SOURCES]
    found = [source for source in sources if (data_folder / source.path).is_file()]
    if not found:
        pytest.skip(f"no file in {data_folder} has its official name")
    for source in found:
        data = (data_folder / source.path).read_bytes()
        assert (source.path, hashlib.sha256(data).hexdigest()) == (source.path, source.sha256)
