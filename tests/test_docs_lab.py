# SPDX-License-Identifier: BSD-3-Clause
"""The example trial in docs/lab.md prints what the page shows."""

import re
from pathlib import Path

import pytest

from paceline.lab.threads import one_thread

PAGE = Path(__file__).parents[1] / "docs" / "lab.md"


def block(language):
    (body,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return body


@pytest.mark.usefixtures("mnist")
def test_example_trial_prints_what_the_page_shows(data_folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "data").symlink_to(data_folder)
    monkeypatch.chdir(tmp_path)
    with one_thread():
        exec(compile(block("python"), str(PAGE), "exec"), {"__name__": "page"})
    printed, shown = capsys.readouterr().out.splitlines(), block("text").splitlines()
    assert len(printed) == len(shown) == 6
    for here, there in zip(printed, shown, strict=True):
        time, accuracy = re.findall(r"[\d.]+", here)
        shown_time, shown_accuracy = re.findall(r"[\d.]+", there)
        assert time == shown_time
        assert float(accuracy) == pytest.approx(float(shown_accuracy), abs=10)  # sums are rounded
