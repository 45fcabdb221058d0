# SPDX-License-Identifier: BSD-3-Clause
"""`torch.save` in a run: files are never torn, and saving the same file twice is pointed out."""

import io
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from failures import TRAINING
from paceline.run.launch.environment import Identity
from paceline.run.saving import PATHS_MAX, make_saves_atomic

# -------------------------------------------------------------------------------------- one process


@pytest.fixture
def save(monkeypatch, tmp_path):
    """Return a function that makes `torch.save` that of a worker."""
    plain = torch.save
    monkeypatch.setattr(torch, "save", plain)  # restored later
    monkeypatch.setattr(torch.serialization, "save", plain)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "spec.json").touch()

    def become(worker):
        torch.save = plain
        make_saves_atomic(Identity("unix:@nowhere", Path("no-token"), run_dir, worker))
        return torch.save

    return become


def test_saved_file_is_the_one_that_plain_torch_writes(save, tmp_path):
    values = {"a": torch.arange(5.0), "b": [1, "two"]}
    torch.save(values, tmp_path / "model.pt")
    plain = (tmp_path / "model.pt").read_bytes()
    (tmp_path / "other").mkdir()
    save(0)(values, str(tmp_path / "other" / "model.pt"))
    assert (tmp_path / "other" / "model.pt").read_bytes() == plain
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["model.pt"]
    save(0)(values, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert torch.load(tmp_path / "old.pt")["b"] == [1, "two"]


def test_file_objects_and_devices_are_written_as_usual(save):
    file = io.BytesIO()
    save(0)([1], file)
    file.seek(0)
    assert torch.load(file) == [1]
    save(0)([1], os.devnull)


def test_link_stays_and_its_target_is_replaced(save, tmp_path):
    link, target = tmp_path / "link.pt", tmp_path / "target.pt"
    link.symlink_to(target)
    save(0)([1], link)
    assert link.is_symlink()
    assert torch.load(target) == [1]


def test_permissions_of_a_replaced_file_are_kept(save, tmp_path):
    path = tmp_path / "model.pt"
    path.touch()
    path.chmod(0o640)
    save(0)([1], path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_failed_save_leaves_the_old_file_and_nothing_else(save, tmp_path):
    path = tmp_path / "here" / "model.pt"
    path.parent.mkdir()
    save(0)([1], path)
    with pytest.raises(Exception, match="pickle"):
        save(0)(lambda: None, path)
    assert torch.load(path) == [1]
    assert [one.name for one in path.parent.iterdir()] == ["model.pt"]


def test_missing_folder_raises_what_torch_raises(save, tmp_path):
    with pytest.raises(RuntimeError, match="does not exist"):
        save(0)([1], tmp_path / "missing" / "model.pt")


def test_second_worker_at_a_path_is_told_once(save, tmp_path, capsys):
    one, other = tmp_path / "one.pt", tmp_path / "other.pt"
    for path in (one, other, one):
        save(0)([1], path)
    assert capsys.readouterr().err == ""
    save(1)([1], other)
    assert capsys.readouterr().err == (
        f"worker 0 and worker 1 have both saved to {other}; to save in one worker only, write: "
        "if run.is_first: torch.save(...)\n"
    )
    for worker in (1, 2, None):
        save(worker)([1], one)
    assert capsys.readouterr().err == ""


def _save_to_open_file(saves, path):
    with path.open("wb") as file:
        saves([1], file)
    assert torch.load(path) == [1]


def test_second_worker_that_opens_a_file_is_told_once(save, tmp_path, capsys):
    path = tmp_path / "model.pt"
    _save_to_open_file(save(0), path)
    assert capsys.readouterr().err == ""
    _save_to_open_file(save(1), path)
    assert capsys.readouterr().err == (
        f"worker 0 and worker 1 have both opened {path} and saved to it, so it may be corrupt; to "
        "save in one worker only, write: if run.is_first:, and then open() and torch.save() inside "
        "it\n"
    )
    _save_to_open_file(save(2), path)
    save(2)([1], path)
    assert capsys.readouterr().err == ""


def test_open_file_and_path_are_the_same_file(save, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(0)([1], tmp_path / "model.pt")
    _save_to_open_file(save(1), Path("model.pt"))
    assert "worker 0 and worker 1 have both opened" in capsys.readouterr().err


def test_open_files_of_one_worker_and_without_a_path_are_not_pointed_out(save, tmp_path, capsys):
    reading, writing = os.pipe()
    for worker in (0, 1):
        saves = save(worker)
        saves([1], io.BytesIO())
        _save_to_open_file(saves, tmp_path / f"model-{worker}.pt")
        with tempfile.TemporaryFile() as unnamed, tempfile.NamedTemporaryFile() as named:
            saves([1], unnamed)
            saves([1], named)
        with open(writing, "wb", closefd=False) as pipe:
            saves([1], pipe)
        with (tmp_path / "removed.pt").open("wb") as removed:
            (tmp_path / "removed.pt").unlink()
            saves([1], removed)
    os.close(reading)
    os.close(writing)
    assert capsys.readouterr().err == ""


def test_worker_that_was_restarted_is_not_told(save, tmp_path, capsys):
    for _ in range(2):
        save(0)([1], tmp_path / "model.pt")
    assert capsys.readouterr().err == ""


def test_only_the_first_paths_are_remembered(save, tmp_path):
    saves = save(0)
    for number in range(PATHS_MAX + 5):
        saves([number], tmp_path / f"{number}.pt")
    assert len(list((tmp_path / "run" / "saves").iterdir())) == PATHS_MAX


# -------------------------------------------------------------------------------------------- a run

SAVING = (
    TRAINING
    + """
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
large = torch.zeros(300_000)
torn = 0
while not run.finished:
    optimizer.zero_grad()
    loss_of(run.worker, run.version).backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "large": large}, OUT / "last.pt")
    try:
        torch.load(OUT / "last.pt")
    except Exception:
        torn += 1
keep(run, torn=torn)
"""
)


@pytest.mark.parametrize("policy", ["sync", "async"])
def test_workers_that_save_to_one_path_never_tear_the_file(launch, policy):
    ran = launch(SAVING, workers=3, steps=30, policy=policy, min_workers=3)
    assert ran.code == 0
    assert [kept["torn"] for kept in ran.kept.values()] == [0, 0, 0]
    [told] = ran.err.splitlines()
    assert "have both saved to" in told
    assert told.endswith("to save in one worker only, write: if run.is_first: torch.save(...)")
    assert sorted(torch.load(ran.folder / "last.pt")) == ["large", "model"]
    assert not list(ran.folder.glob(".last.pt*"))


def test_workers_that_save_to_one_open_file_are_told_once(launch):
    source = SAVING.replace('OUT / "last.pt")\n    try', 'open(OUT / "last.pt", "wb"))\n    try')
    assert "open(" in source
    ran = launch(source, workers=3, steps=10, min_workers=3)
    assert ran.code == 0
    [told] = ran.err.splitlines()
    assert "have both opened" in told
    assert str(ran.folder / "last.pt") in told


def test_script_that_saves_in_one_worker_is_told_nothing(launch):
    source = SAVING.replace("    torch.save(", "    if run.is_first: torch.save(")
    ran = launch(source.replace("torch.load", "(lambda _: None)"), workers=3, steps=3)
    assert (ran.code, ran.err) == (0, "")


WHOLE = """
import copy
model = nn.Sequential(nn.Linear(2, 300), nn.BatchNorm1d(300), nn.LSTM(300, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = paceline.join()
model, optimizer = run.prepare(model, optimizer)
while not run.finished:
    optimizer.zero_grad()
    model(torch.randn(8, 2))[0].square().sum().backward()
    if run.is_first:
        torch.save(model, OUT / "saved.pt")
        torch.save(copy.deepcopy(model), OUT / "copied.pt")
        torch.save({"model": model, "best": copy.deepcopy(model.state_dict())}, OUT / "inside.pt")
    optimizer.step()
if run.is_first:
    torch.save(model, OUT / "ended.pt")
"""

LOAD = """
import sys
sys.modules["paceline"] = None  # importing it raises ImportError
import torch
for path in sys.argv[1:]:
    model = torch.load(path, weights_only=False)
    model = model["model"] if isinstance(model, dict) else model
    model.load_state_dict(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 2))[0].square().sum().backward()
    optimizer.step()
    for module in model.modules():
        names = [name for name in vars(module) if name.endswith("_hooks")]
        assert not [name for name in names if getattr(module, name)]
    for parameter in model.parameters():
        assert not parameter._backward_hooks and not parameter._post_accumulate_grad_hooks
    print("loaded")
"""


def test_whole_models_and_copies_load_without_paceline(launch):
    ran = launch(WHOLE, workers=2, steps=2)
    assert (ran.code, ran.err) == (0, "")
    paths = [ran.folder / f"{name}.pt" for name in ("saved", "copied", "inside", "ended")]
    command = [sys.executable, "-c", LOAD, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "loaded\n" * len(paths), "")
