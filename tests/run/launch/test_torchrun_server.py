# SPDX-License-Identifier: BSD-3-Clause
"""How worker 0 starts the server; test_torchrun_runs.py has real runs."""

import pytest
from torch.distributed import HashStore

from paceline.errors import SpecError
from paceline.run.launch.run_folder import mark_finished
from paceline.run.launch.torchrun_server import ServerPlace, StoredServer, start_server
from paceline.run.settings import Settings
from paceline.spec import RunSpec

PLACE = ServerPlace(
    workers=2, own_host="127.0.0.1", known_host="node0", is_only_host=True, may_restart=False
)


@pytest.mark.parametrize("words", ["-w 3", "--workers 3", "--workers=3", "-w3"])
def test_number_of_workers_is_that_of_torchrun(monkeypatch, words):
    monkeypatch.setenv("PACELINE_OPTIONS", f"--steps 5 {words}")
    with pytest.raises(SpecError, match="must not have --workers"):
        start_server(PLACE, HashStore(), ["train.py"])


def test_options_that_no_shell_could_read_are_refused(monkeypatch):
    monkeypatch.setenv("PACELINE_OPTIONS", "--out 'runs")
    with pytest.raises(SpecError, match=r"must have options of paceline run.*No closing"):
        start_server(PLACE, HashStore(), ["train.py"])


def test_run_whose_folder_is_on_another_host_cannot_be_resumed(tmp_path):
    store = HashStore()
    StoredServer(address="tcp:10.0.0.5:1", run_dir=str(tmp_path / "none")).write(store)
    with pytest.raises(SpecError, match="is not on this host: worker 0 was on another one"):
        start_server(PLACE, store, ["train.py"])


def test_restart_after_the_end_of_the_run_tells_all_workers_that_it_is_over(tmp_path, capfd):
    """Another worker may fail when the run has already finished."""
    (tmp_path / "train.py").touch()
    settings = Settings(spec=RunSpec(workers=2), script=str(tmp_path / "train.py"))
    settings.write(tmp_path / "spec.json")
    (tmp_path / "weights.pt").touch()
    mark_finished(tmp_path, 20)
    store = HashStore()
    StoredServer(address="tcp:127.0.0.1:0", run_dir=str(tmp_path)).write(store)
    with pytest.raises(SystemExit) as end:
        start_server(PLACE, store, ["train.py"])
    assert end.value.code == 0
    assert "has already finished after 20 updates" in capfd.readouterr().err
    assert StoredServer.wait(store) == StoredServer(is_over=True, run_dir=str(tmp_path))


@pytest.mark.parametrize(
    ("own_host", "is_only_host", "listens_at"),
    [
        ("10.0.0.5", True, "127.0.0.1"),
        ("10.0.0.5", False, "10.0.0.5"),
        ("127.0.1.1", False, "0.0.0.0"),  # the name of the host is in its own /etc/hosts
    ],
)
def test_server_listens_where_its_workers_are(own_host, is_only_host, listens_at):
    place = ServerPlace(
        workers=2,
        own_host=own_host,
        known_host="node0",
        is_only_host=is_only_host,
        may_restart=False,
    )
    assert place.host == listens_at
