# SPDX-License-Identifier: BSD-3-Clause
"""A run on a full disk: success means that the result is on the disk, and the trace has its end.

The launcher learns how the run goes and ends even if nothing can be written.
"""

import pytest
import torch

from disk import small_disk
from failures import HELPERS, TRAINING
from paceline.cli.trace import check
from paceline.errors import TraceError
from paceline.run.launch import launcher
from paceline.run.launch.launcher import Launcher
from paceline.run.launch.run_folder import finished_at
from paceline.run.launch.screen import PlainScreen
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.trace.schema import FINISHED, Ended, Gap
from paceline.watch.audit import audit

STEPS = 60  # more than fit into the last page of the trace

SOURCE = (
    HELPERS
    + TRAINING
    + """
def fill_the_disk():
    with (OUT / "filler").open("ab", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass

if WORKER == 0 and FULL_AT == 0:
    fill_the_disk()
run = paceline.join()
freed = False
model, optimizer = run.prepare(model, optimizer)
while not run.finished:
    if run.version == FULL_AT > 0 and run.worker == 0:
        wait_until(lambda: in_the_trace(type="update", update=FULL_AT))
    if run.version >= FULL_AT and run.worker == 0 and not freed:
        fill_the_disk()  # again and again, because a file that is replaced frees a page
    if run.version == FREE_AT and run.worker == 0:
        freed = True
        wait_until((Path(__file__).parent / "lost").exists)  # a record; see `Reader`
        (OUT / "filler").unlink()
        wait_until(lambda: in_the_trace(type="gap"))
    if run.version == END_AT:
        break
    optimizer.zero_grad()
    loss_of(run.worker, run.version).backward()
    optimizer.step()
"""
)


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        yield disk.path


class Reader(PlainScreen):
    """A screen that lets the script continue once the server has said that records are lost."""

    def __init__(self, folder):
        self._folder = folder

    def line(self, text, to):
        super().line(text, to)
        if "records are lost" in text:
            (self._folder / "lost").touch()


@pytest.fixture
def launch_on(disk, script, capsys, forkserver, monkeypatch):
    """Run a script on the small disk; return the exit code and the launcher's messages."""

    def run(full_at, free_at=-1, end_at=-1, every="0"):
        source = SOURCE.replace("FULL_AT", str(full_at))
        source = source.replace("FREE_AT", str(free_at)).replace("END_AT", str(end_at))
        path = script(source)
        monkeypatch.setattr(launcher, "PlainScreen", lambda: Reader(path.parent))
        told = {"script": str(path), "arguments": (str(disk),)}
        settings = Settings(spec=RunSpec(workers=2, steps=STEPS), checkpoint_every=every, **told)
        code = Launcher(settings, disk, forkserver).run()
        shown = capsys.readouterr()
        messages = [line[12:] for line in shown.err.splitlines() if line.startswith("paceline  | ")]
        return code, messages, shown.out

    return run


def ends(disk):
    return [r.version for r in ended(disk)]


def ended(disk):
    """Return the records of the end."""
    return [r for r in read_trace(disk / "trace.jsonl").records if isinstance(r, Ended)]


def test_run_on_a_disk_that_stays_full_fails(launch_on, disk):
    code, _, out = launch_on(full_at=3)
    assert code == 1
    assert finished_at(disk) is None
    assert not (disk / "weights.pt").exists()
    # What was written of the weights is removed, and then the end may fit on the disk.
    assert FINISHED not in [record.reason for record in ended(disk)]
    assert "cannot write the trace, records are lost: No space left on device" in out
    assert "cannot write the weights: No space left on device" in out


def test_run_on_a_disk_that_is_full_from_the_beginning_fails(launch_on, disk):
    code, _, out = launch_on(full_at=0)
    assert code == 1
    assert finished_at(disk) is None
    assert not (disk / "weights.pt").exists()
    assert "cannot write the weights: No space left on device" in out


@pytest.mark.parametrize("full_at", [0, 3])
def test_run_succeeds_if_there_is_space_again_and_its_trace_says_what_is_missing(
    launch_on, disk, full_at
):
    code, _, out = launch_on(full_at, free_at=50)
    assert code == 0
    assert finished_at(disk) == STEPS
    assert torch.load(disk / "weights.pt")
    assert ends(disk) == [STEPS]
    assert "recording again; the trace lacks " in out
    trace = read_trace(disk / "trace.jsonl")
    audit(trace)
    assert any(isinstance(record, Gap) for record in trace.records)
    with pytest.raises(TraceError, match=f"are missing .* of {STEPS} updates"):
        check(disk, as_json=False)


def test_run_fails_if_only_its_end_cannot_be_saved(launch_on, disk):
    code, _, out = launch_on(full_at=STEPS - 1, every="10")
    assert code == 1
    assert finished_at(disk) is None
    assert "cannot write the weights: No space left on device" in out
    assert f"cannot write the checkpoint of version {STEPS}: No space left on device" in out


def test_early_end_is_known_without_a_trace(launch_on, disk):
    code, _, _ = launch_on(full_at=3, end_at=50)
    assert code == 1
    assert finished_at(disk) is None
