# SPDX-License-Identifier: BSD-3-Clause
"""Groups of servers with agents of hosts, for the tests of what these exchange."""

import pytest

from host_group import Agent
from paceline.run.settings import Settings
from paceline.spec import RunSpec
from server_group import Group


@pytest.fixture
def agents_of(tmp_path):
    closing = []

    def make(policy="sync", workers=3, agents=1, servers=3, **options):
        """Return a group whose servers are there, and this many agents."""
        make = options.pop("make", None)
        spec = RunSpec(workers=workers, steps=100)
        settings = Settings(spec=spec, policy=policy, checkpoint_every="0", **options)
        group = Group(tmp_path, settings, make, servers=servers)
        closing.append(group)
        group.start_servers()
        found = [Agent(group) for _ in range(agents)]
        closing.extend(found)
        return group, *found

    yield make
    for one in closing:
        one.close()
