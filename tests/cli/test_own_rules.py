# SPDX-License-Identifier: BSD-3-Clause
"""Where the rule of a trace is found if a user wrote it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from paceline.cli.own_rules import import_rules, rule_folders
from paceline.core.policies import parse_policy
from paceline.errors import SpecError
from paceline.trace.schema import Header, Restored, Trace

SOURCE = "from paceline import Policy\nclass Own(Policy):\n    pass\n"


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run whose script is in another folder, with a module next to it."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "rules_of_project.py").write_text(SOURCE)
    folder = tmp_path / "run"
    folder.mkdir()
    spec = {"script": str(tmp_path / "project" / "train.py"), "folder": str(tmp_path), "old": 1}
    (folder / "spec.json").write_bytes(msgspec.json.encode(spec))
    yield folder
    sys.modules.pop("rules_of_project", None)


def test_folders_are_those_of_the_run_and_the_current_one(run_dir: Path, tmp_path: Path) -> None:
    """Other settings of the run may be those of another release."""
    assert rule_folders(run_dir / "trace.jsonl") == (tmp_path / "project", tmp_path, "")
    assert rule_folders(tmp_path / "trace.jsonl") == ("",)
    (tmp_path / "spec.json").write_text("no JSON")
    assert rule_folders(tmp_path / "trace.jsonl") == ("",)


def test_imported_rules_are_found_without_their_folder(run_dir: Path) -> None:
    first = Header(source="run", policy="gone_rules:Own", workers=2)
    header = msgspec.structs.replace(first, policy="rules_of_project:Own")
    with pytest.raises(SpecError, match="there is no module rules_of_project"):
        parse_policy(header.policy)
    import_rules(Trace(first, [Restored(1.0, 0, header)]), run_dir / "trace.jsonl")
    assert str(parse_policy(header.policy)) == "rules_of_project:Own"
