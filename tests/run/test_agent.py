# SPDX-License-Identifier: BSD-3-Clause
"""The script of an agent's process; test_agent_process.py has whole runs with agents."""

import pytest

from paceline.errors import SpecError
from paceline.run.agent import main


@pytest.mark.parametrize("role", [None, "worker"])
def test_only_a_launcher_starts_an_agent(monkeypatch, tmp_path, role):
    monkeypatch.delenv("PACELINE_ROLE", raising=False)
    if role is not None:
        variables = {"ROLE": role, "ADDRESS": "unix:@none", "TOKEN_FILE": "token", "WORKER": "0"}
        for name, value in variables.items():
            monkeypatch.setenv(f"PACELINE_{name}", value)
    with pytest.raises(SpecError, match="only `paceline work --processes` starts the agent"):
        main()
