# SPDX-License-Identifier: BSD-3-Clause
"""What a shell offers when you press Tab after `--policy`.

Typer completes verbs and options by itself. A shell calls this on every Tab, so it must import
nothing heavy.
"""

__all__ = ["EXAMPLE_RULES", "complete_policy"]

EXAMPLE_RULES = {
    "sync": "wait for all workers",
    "backup:1": "wait for all but the slowest worker",
    "batchsync:4": "wait for the first 4 mini-batches from any worker",
    "deadline:0.9": "wait until a learnt deadline",
    "delayed:1": "wait for all workers, 1 update later",
    "softsync:4": "wait for any 4 gradients",
    "ssp:3": "don't wait, but no worker gets more than 3 turns ahead",
    "async": "don't wait",
}


def complete_policy(incomplete: str) -> list[tuple[str, str]]:
    """Return an example of each rule that begins like this, with its meaning."""
    return [item for item in EXAMPLE_RULES.items() if item[0].startswith(incomplete)]
