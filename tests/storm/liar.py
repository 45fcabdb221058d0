# SPDX-License-Identifier: BSD-3-Clause
"""A peer that knows the token, follows the protocol, and then tells one lie.

It is a real worker with a real script. Only its end of the connection is changed: in one of its
turns it sends something else than the worker wanted to. If the server doesn't notice, the liar goes
on for some turns, and then vanishes.
"""

from __future__ import annotations

from dataclasses import replace
from math import nan
from typing import Any

import msgspec

from paceline.leases import Use
from paceline.run.launch.environment import Identity
from paceline.run.net import messages
from paceline.run.net.in_process import InProcessWorker
from paceline.run.net.tcp_worker import TcpWorker
from paceline.run.script import WorkerRun
from paceline.run.tensors.state_spec import OptionChange
from storm.host import Host, exit_code_of
from storm.scenario import Fault
from storm.world import Process

__all__ = ["LIES", "tell_lies"]

HONEST_TURNS = 3  # at most, before the lie
TURNS_AFTER = 4  # at most, after a lie that nobody noticed
CONNECTIONS = 3  # that it makes at most
OUT_OF_PLACE = 0.25  # how often it pretends to be one of the run's own workers
NUMBERS = (50, 999_999)  # otherwise

CHANGES: dict[str, dict[str, Any]] = {
    "text as an option": {"options": (OptionChange(0, 0, "lr", "0.1"),)},
    "NaN as an option": {"options": (OptionChange(0, 0, "lr", nan),)},
    "an unknown option": {"options": (OptionChange(0, 0, "speed", 1.0),)},
    "an option of no group": {"options": (OptionChange(0, 7, "lr", 0.1),)},
    "impossible samples": {"samples": 2**40, "new_samples": None},
    "too many new samples": {"new_samples": 2**40},
    "batches of nobody": {"uses": (Use(0, (10_000,)),)},
    "batches of others": {"uses": (Use(0, tuple(range(12))),)},
    "no such stream": {"uses": (Use(3, (0,)),)},
    "no such optimizer": {"optimizer": 5},
    "no such parameter": {"unused": (99,)},
    "cancelled by nobody": {"cancelled": True, "sq_norm": None},
    "another norm": {"sq_norm": 1e200},
    "no norm": {"sq_norm": None},
    "too much pulled": {"pulled": (2**30,)},
}
"""Lies in the report of a gradient."""

LIES = (
    *CHANGES,
    *("NaN in the gradient", "NaN in the buffers", "a wrong turn", "a wrong version"),
    *("an older version", "the same report twice", "a state of a wrong shape", "no state"),
    *(
        "no message",
        "another spec",
        "another release",
        "a position of nobody",
        "goes on after the end",
    ),
)
"""Everything that a liar may do."""


def tell_lies(host: Host, fault: Fault) -> None:
    """Start a process that joins the run and lies, if there is a run; its `point` says how."""
    launcher, chance = host.launcher, host.world.random
    if launcher is None or not launcher.is_alive:
        return
    number = fault.worker if chance.random() < OUT_OF_PLACE else chance.choice(NUMBERS)
    process = Process(host.world, "liar")
    launcher.on_exit.append(lambda: process.exit(-9))
    lie, after = LIES[fault.point % len(LIES)], chance.randint(0, HONEST_TURNS)
    host.world.note(f"worker {number} is going to lie after {after} turns: {lie}")
    process.spawn(lambda: _lie(host, process, number, lie, after), "main")


def _lie(host: Host, process: Process, number: int, lie: str, after: int) -> None:
    who = Identity("", host.run_dir / "token", host.run_dir, number)
    script = replace(host.script, faults=[], steps={})  # it notes what it computes where all do

    left = iter(range(CONNECTIONS))

    def dialer(_: Identity, spec: Any) -> Any:
        def dial() -> Any:
            if next(left, None) is None:
                raise SystemExit(0)  # or it would be refused for ever, without a pause
            return _LyingEnd(host.dial(process, spec), host, number, lie, after)

        return dial

    def work() -> int:
        script.train(WorkerRun(who, dialer, host.system))
        return 0

    process.exit(exit_code_of(process, work))


class _LyingEnd:
    """A worker's end of a connection that changes what the worker sends, once."""

    def __init__(
        self, end: InProcessWorker | TcpWorker, host: Host, number: int, lie: str, after: int
    ) -> None:
        self._end = end
        self._host = host
        self._number = number
        self._lie = lie
        self._turns_left = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)

    def send(self, message: object) -> None:
        """Send a control message."""
        if isinstance(message, messages.Join):
            if self._lie == "another spec":
                spec = message.spec
                message = msgspec.structs.replace(
                    message, spec=msgspec.structs.replace(spec, buffers=())
                )
            elif self._lie == "another release":
                message = msgspec.structs.replace(message, release="0.0")
        self._end.send(message)

    def open_slot(self) -> Any:
        """Return the memory that came with the welcome."""
        self._host.world.note(f"a liar is worker {self._number}")
        return self._end.open_slot()

    def announce(self, report: messages.GradientReport) -> None:
        """Report a gradient, or something else."""
        self._turns_left -= 1
        if self._turns_left < -TURNS_AFTER:
            raise SystemExit(0)  # without a word
        if self._turns_left != -1:
            self._end.announce(report)
            return
        self._host.world.note(f"worker {self._number} lies: {self._lie}")
        self._end.announce(self._changed(report))

    def _changed(self, report: messages.GradientReport) -> messages.GradientReport:
        """Tell the lie, unless it was told when it joined; return the report to send after it."""
        change = CHANGES.get(self._lie, {})
        match self._lie:
            case "a wrong turn":
                change = {"turn": report.turn + 1}
            case "a wrong version":
                change = {"version": report.version + 1}
            case "an older version":
                change = {"version": max(0, report.version - 1)}
            case "NaN in the gradient":
                self._end.open_slot().slot.flats[0][0][0] = nan
            case "NaN in the buffers":
                self._spoil_buffers(report)
            case _:
                self._send_more(report)
        return msgspec.structs.replace(report, **change)

    def _send_more(self, report: messages.GradientReport) -> None:
        """Send something before the report that nobody has asked for."""
        match self._lie:
            case "the same report twice":
                self._end.announce(report)
            case "a state of a wrong shape":
                self._end.send_state(0, {"state": {0: {"momentum_buffer": [1.0]}}}, True)
            case "no state":
                self._end.send(messages.StateUpload(0, b""))
            case "no message":
                junk = self._host.world.random.randbytes(20)
                self._outbox.put_bytes(junk)
            case "a position of nobody":
                self._end.send(messages.PositionReport(77, b"nonsense"))
            case "goes on after the end":
                self._end.send(messages.ScriptEnded())
            case _:
                pass

    @property
    def _outbox(self) -> Any:
        """The queue of the messages that it sends."""
        end: Any = self._end
        return end._control.outbox if isinstance(end, TcpWorker) else end._outbox

    def _spoil_buffers(self, report: messages.GradientReport) -> None:
        """Put NaN into the buffers, and note that this is what the worker has sent."""
        self._end.open_slot().slot.buffer_flats[0][0] = nan
        computed, key = self._host.script.computed, (self._number, report.turn)
        spoiled = computed[key].new_mean.clone()
        spoiled[0] = nan
        computed[key] = computed[key]._replace(new_mean=spoiled)
