# SPDX-License-Identifier: BSD-3-Clause
"""Scripts in the styles of well-known examples do in a run what their authors meant.

Each runs with three workers under sync and under one other rule, without any option that says how
long: the script decides. Every worker executes the whole script, so every worker's facts can be
checked.
"""

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.run.launch.forkserver import ForkServer
from paceline.run.launch.launcher import Launcher
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from paceline.trace.reader import read_trace
from paceline.watch.audit import audit
from script_facts import MEANT, SCRIPTS, WITH_EQUAL_EPOCHS, facts_in

WORKERS = 3
OTHER_RULES = ("backup:1", "async")


def _facts(run_dir: Path, worker: int) -> dict[str, Any] | None:
    log = (run_dir / "output" / f"worker-{worker}.log").read_text()
    assert "Traceback" not in log
    return facts_in(log.splitlines())


def _check_saved_files(folder: Path) -> None:
    """Check that the files that the script saved are whole, and need no Paceline to load."""
    saved = list(folder.iterdir())
    assert saved
    for path in saved:
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None, path.name
        assert b"paceline" not in path.read_bytes()


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        (name, rule)
        for number, name in enumerate(MEANT)
        for rule in ("sync", OTHER_RULES[number % 2])
    ],
)
def test_script_does_in_a_run_what_its_author_meant(
    name: str,
    rule: str,
    forkserver: ForkServer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, run_dir = tmp_path / "work", tmp_path / "run"
    folder.mkdir()
    run_dir.mkdir()
    settings = Settings(
        spec=RunSpec(workers=WORKERS),
        policy=rule,
        script=str(SCRIPTS / name / "paced.py"),
        folder=str(folder),
        restart=False,
    )
    code = Launcher(settings, run_dir, forkserver).run()
    printed = capsys.readouterr()

    assert code == 0, printed.out + printed.err
    assert (run_dir / "finished").exists()
    audit(read_trace(run_dir / "trace.jsonl"))
    facts = _facts(run_dir, 0)
    assert facts is not None, printed.out + printed.err
    MEANT[name](facts)
    if rule == "sync":  # all workers saved the same weights
        assert facts.get("loss_of_best") == facts.get("best_loss")
    _check_saved_files(folder)
    for worker in range(1, WORKERS):
        others = _facts(run_dir, worker)
        if name in WITH_EQUAL_EPOCHS:
            assert others is not None
            assert others["epochs"] == others["validations"] == facts["epochs"]
    if rule == "sync" and name == "image_classification":
        _check_last_weights(folder / "last.pt", run_dir / "weights.pt")


def _check_last_weights(saved: Path, exported: Path) -> None:
    """Check that the script saved the weights of the run's last version."""
    expected = torch.load(exported)
    actual = torch.load(saved)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
