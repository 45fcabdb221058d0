# SPDX-License-Identifier: BSD-3-Clause
"""`paceline compare`: several rules on real processes, side by side."""

import re
from contextlib import nullcontext
from importlib import import_module

import pytest

from paceline.watch.audit import audit
from paceline.watch.trace import read_trace

compare = import_module("paceline.cli.compare")  # not the verb, which has its name

SOURCE = """
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = paceline.join()
model, optimizer, loader = run.prepare(model, optimizer, loader)
for (x,) in loader:
    optimizer.zero_grad()
    loss = (model(x) - 1).square().mean()
    loss.backward()
    run.log(loss=loss.item())
    optimizer.step()
"""


@pytest.fixture
def compared(call, script, nursery, monkeypatch):
    """Call it with these words, and the script."""
    monkeypatch.setattr(compare, "Nursery", lambda _: nullcontext(nursery))

    def call_it(*words):
        path = script(SOURCE)
        return call("compare", *words, path, path.parent)

    return call_it


def test_each_rule_has_a_row_a_folder_and_its_part_of_the_report(compared, tmp_path):
    out_dir = tmp_path / "out"
    words = ("-w", 2, "--epochs", 2, "--slow", "2ms", "--target", "loss<=1e9", "--out", out_dir)
    code, out, err = compared(
        *words, "-p", "sync", "-p", "backup:1", "-p", "softsync:2,lr=constant"
    )
    assert code == 0, err
    header, *rows = re.findall(r"^(?:rule|sync|backup|softsync).*$", out, re.MULTILINE)
    columns = "rule updates/s staleness dropped step predicted off by to loss <= 1e+09 final loss"
    assert " ".join(header.split()) == columns
    assert [row.split()[0] for row in rows] == ["sync", "backup:1", "softsync:2,lr=constant"]
    for folder in ("sync", "backup-1", "softsync-2,lr=constant"):
        audit(read_trace(out_dir / folder / "trace.jsonl"))
    report = (out_dir / "report.md").read_text()
    assert all(row.rstrip() in report for row in rows)
    assert "## backup:1\n" in report
    for figure in ("rules.png", "loss.png"):
        assert (out_dir / figure).stat().st_size > 5000
        assert f"({figure})" in report


def test_without_injected_delays_nothing_is_predicted(compared):
    code, out, _ = compared("-w", 2, "--steps", 3, "-p", "sync")
    assert code == 0
    assert "predicted" not in out
    assert "runs/compare-script-1" in out


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--target", "accuracy"], "a target must be such as"),
        (["-p", "sync", "-p", "sync"], "a rule is given twice"),
        (["-p", "magic"], "magic"),
        (["-w", "2", "-p", "backup:2"], "b must be smaller"),
    ],
)
def test_wrong_input_is_told_before_anything_is_run(call, script, words, what, tmp_path):
    path = script(SOURCE)
    code, out, err = call("compare", *words, path)
    assert (code, out) == (2, "")
    assert what in err
    assert not (tmp_path / "runs").exists()


def test_a_script_that_fails_ends_the_comparison(call, script, nursery, monkeypatch):
    monkeypatch.setattr(compare, "Nursery", lambda _: nullcontext(nursery))
    code, _, err = call("compare", "-w", 2, "-p", "sync", "-p", "async", script("raise OSError"))
    assert code == 1
    assert "sync has failed, so the comparison ends" in err
    assert "async" not in err
