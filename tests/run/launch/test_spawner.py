# SPDX-License-Identifier: BSD-3-Clause
"""The fork server has the interface of what starts processes."""

import signal

from forked import ForkedScript
from paceline.run.launch.spawner import Spawner


def methods(kind):
    return {name for name in vars(kind) if not name.startswith("_")}


def test_fork_server_is_a_spawner(forkserver):
    assert all(callable(getattr(forkserver, name)) for name in methods(Spawner))


def test_fork_server_has_room_for_every_process(forkserver):
    assert forkserver.waiting() == {}


def test_signal_to_a_process_that_has_exited_does_nothing(forkserver, tmp_path):
    path = tmp_path / "script.py"
    path.write_text("pass", encoding="utf-8")
    process = ForkedScript(forkserver, path)
    assert process.code() == 0
    process.output()
    forkserver.signal(process.pid, signal.SIGTERM)
    assert forkserver.ask_stack(process.pid) is None
