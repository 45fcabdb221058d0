# SPDX-License-Identifier: BSD-3-Clause
"""Why a run may fail although nobody made a mistake.

Each excuse needs a fault that really happened in the last launch of the run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.run.launch.environment import SERVER_LOST
from storm.host import Host
from storm.scenario import NOTICE_FAULTS, Scenario

__all__ = ["Launch", "servers_without_records", "why_it_may_fail"]

LAST_LINES = 4  # of the launcher, one of which says why the run failed
REASON = re.compile(
    r"stopping|failed|was lost|were lost|was killed|gone|gave up|was stopped|the server exited|"
    r"nothing was trained|cannot|Error:"
)
SUMMARY = re.compile(r"server#\d+: .*updates? of [\d,]+ samples? in")

LOST_SERVER = re.compile(rf"server( \d+)?#\d+ exits with (-|{SERVER_LOST})")

NO_CHECKPOINT = "there is no checkpoint: starting from the beginning"

WORKER_FAULTS = ("kill worker", "freeze worker", "cut worker")
INTERRUPTIONS = ("terminate", "terminate twice", "kill launcher", "lose power")


@dataclass(frozen=True)
class Launch:
    """The story of one launch."""

    lines: list[str]

    @classmethod
    def last(cls, story: list[str]) -> Launch:
        """Return the last launch of a story."""
        begins = [i for i, line in enumerate(story) if line.endswith("  launch")]
        return cls(story[begins[-1] :] if begins else story)

    def says(self, *texts: str) -> bool:
        """Return whether a line has one of these texts."""
        return any(text in line for line in self.lines for text in texts)

    def had(self, *kinds: str, worker: int | None = None) -> bool:
        """Return whether a fault of one of these kinds happened, to this worker if it says so."""
        of_worker = "" if worker is None else rf".*\bworker={worker}\b"
        found = re.compile(rf"FAULT .*kind='({'|'.join(kinds)})'{of_worker}")
        return any(found.search(line) for line in self.lines)

    @property
    def lost_server(self) -> bool:
        """Whether a server was killed, or the head had to start again because another one was."""
        return any(LOST_SERVER.search(line) for line in self.lines)

    @property
    def lost_process(self) -> bool:
        """Whether a server or a worker was killed, or lost the server."""
        return any(
            re.search(r"(server|server \d+|worker \d+)#\d+ exits with [^0]", line)
            for line in self.lines
        )

    @property
    def lost_any(self) -> bool:
        """Whether a process of the run was killed."""
        return any(re.search(r"#\d+ exits with -", line) for line in self.lines)

    @property
    def reason(self) -> str:
        """The last line of the launcher that says why the run didn't succeed; "": there is none."""
        said = [line for line in self.lines if re.match(r"\s*[\d.]+  launcher: ", line)]
        found = [line for line in said[-LAST_LINES:] if REASON.search(line)]
        return found[-1] if found else ""

    @property
    def is_disk_full(self) -> bool:
        """Whether the disk was full when the run was launched, or when its end was written."""
        ends = [i for i, line in enumerate(self.lines) if SUMMARY.search(line)]
        return any("DISK is full" in line for line in self.lines[ends[-1] if ends else 0 :])


def servers_without_records(story: list[str]) -> set[str]:
    """Return the servers that could not write all their records: killed, or the disk was full."""
    found, has_failed = set(), False
    for line in story:
        has_failed |= "DISK is full" in line
        if match := re.search(r"(server#\d+) exits with (-?\d+)", line):
            if has_failed or match[2] != "0":
                found.add(match[1])
            has_failed = False
    return found


def why_it_may_fail(host: Host, scenario: Scenario) -> str:
    """Return why the last launch may have failed; "": it may not."""
    launch, settings = Launch.last(host.world.story), scenario.settings
    if host.code is None or host.code >= 128:
        was_hung = any(fault.kind == "hang" for fault in host.script.fired)
        return "it was interrupted" if was_hung or launch.had(*INTERRUPTIONS) else ""
    lies = [f"a liar is worker {worker}" for worker in range(settings.spec.workers)]
    # A worker that hangs, and whose connection is cut, isn't there either.
    is_short = settings.patience_s < 10.0 or settings.spec.min_workers > 1 or launch.says("HANG of")
    excuses = {
        "the script failed": launch.says("the script fails here", "exits with 9"),
        "the script crashed": launch.had("crash worker"),
        "the disk was full": launch.is_disk_full,
        "a machine was given up": launch.had(*NOTICE_FAULTS),  # perhaps that of the last worker
        "nothing is restarted": not settings.restart and launch.lost_any,
        # The scripts may have ended before the server was killed.
        "nothing was saved": launch.lost_server and launch.says(NO_CHECKPOINT),
        # A worker of the run can't join then.
        "a liar had the number of a worker": launch.says(*lies),
        "worker 0 was lost": launch.says("worker 0 was lost")
        and _is_first_hit(host, scenario, launch),
        "too few workers were left": launch.says("workers were here for") and is_short,
    }
    return next((excuse for excuse, is_good in excuses.items() if is_good), "")


def _is_first_hit(host: Host, scenario: Scenario, launch: Launch) -> bool:
    """Return whether something went wrong with worker 0."""
    if launch.had(*WORKER_FAULTS, worker=0):
        return True
    # It computes without using the processor, so it has no longer than others.
    is_slow = scenario.settings.grace_s < 10.0 and launch.says("after the last update")
    return is_slow or any(fault.worker == 0 for fault in host.script.fired)
