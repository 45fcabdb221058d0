# SPDX-License-Identifier: BSD-3-Clause
"""What the process of a host's agent executes, in place of a script."""

from paceline.errors import SpecError
from paceline.run.launch.environment import identity
from paceline.run.server.agent_process import serve_host

__all__ = ["main"]


def main() -> None:
    """Serve the workers of this host until a signal asks to stop."""
    who = identity()
    if who is None or not who.is_agent:
        raise SpecError("only `paceline work --processes` starts the agent of a host")
    serve_host(who)


if __name__ == "__main__":
    main()
