# SPDX-License-Identifier: BSD-3-Clause
"""What must hold after every storm, whatever went wrong."""

from __future__ import annotations

import signal
from pathlib import Path

import torch

from paceline.core.events import Fate
from paceline.errors import (
    CheckpointError,
    InternalError,
    PacelineError,
    SpecError,
    TraceError,
)
from paceline.run.launch.hangs import STOP_WORKERS_S
from paceline.run.launch.run_folder import finished_at
from paceline.run.server.checkpoint import Archive, Saved
from paceline.run.settings import Settings
from paceline.trace.reader import read_trace
from paceline.trace.schema import FINISHED, Ended, Gap, Gradient, Restored, Trace, Update
from paceline.watch.audit import audit
from paceline.watch.gaps import check_complete
from storm.excuses import Launch, servers_without_records, why_it_may_fail
from storm.fates import problems_with_fates
from storm.host import Host
from storm.reference import Reference, State, momentum_in
from storm.scenario import Scenario
from storm.script import make_model

__all__ = ["Violation", "check_end", "check_launch", "check_laws"]


UNEXPECTED = (TraceError.exit_code, CheckpointError.exit_code, InternalError.exit_code)
"""Exit codes that no process of these runs may have."""

END_S = 10.0  # after the grace period, for the server to write the rest and everybody to exit
SLOW = (
    *("clock leaps", "slow disk", "very slow disk", "freeze server", "lock server"),
    "freeze other server",
)
STOPPED = 128 + signal.SIGTERM


class Violation(AssertionError):
    """A law was broken."""


# ------------------------------------------------------------------------------ after each launch


def check_launch(host: Host, settings: Settings) -> None:
    """Check what must hold whenever a launcher has exited."""
    launch = Launch.last(host.world.story)
    for process in host.world.processes:
        if process.code in UNEXPECTED:
            raise Violation(f"{process.name} exited with {process.code}")
        if process.is_alive and process.name != "liar":
            raise Violation(f"{process.name} outlives the launcher")
    host.world.processes = [p for p in host.world.processes if p.is_alive]
    left = host.disk.open_files
    if left:
        raise Violation(f"left open: {left}")
    _check_took(host, settings, launch)
    if host.code == 0:
        _check_success(host, settings)
    elif host.code is not None and not launch.reason:
        raise Violation(f"exit code {host.code}, but nobody says why")
    is_disk_bad = launch.had("slow disk", "very slow disk") or launch.says("DISK is full")
    if host.code == STOPPED and not is_disk_bad and not launch.lost_server:
        _check_stopped(host, settings)


def _check_took(host: Host, settings: Settings, launch: Launch) -> None:
    """Check that nobody was waited for for too long after the end."""
    ended_at = host.kernel.observed.ended_at
    if ended_at is None or launch.had(*SLOW):
        return
    if host.disk.busy_until > ended_at:
        return  # nobody knows how long a very slow disk takes
    if launch.lost_server or host.code is None:
        return  # the next server ends the run again
    took_s = host.world.now - ended_at
    grace_s = max(settings.grace_s, STOP_WORKERS_S) if host.code == STOPPED else settings.grace_s
    if took_s > grace_s + END_S:
        raise Violation(f"the launcher exited {took_s:.0f} s after the end")


def _check_success(host: Host, settings: Settings) -> None:
    """Exit code 0: the asked-for version is in weights.pt, and the trace has its end."""
    trace = read_trace(host.run_dir / "trace.jsonl")
    end = _end_of(trace)
    if end is None:
        raise Violation("exit code 0, but the trace has no end")
    goal = settings.spec.steps
    stops = host.script.style == "stops the run"
    if goal is not None and end.reason == FINISHED and end.version != goal and not stops:
        raise Violation(f"finished at version {end.version}, but the goal is {goal}")
    if not (host.run_dir / "weights.pt").exists():
        raise Violation("exit code 0, but there is no weights.pt")


def _check_stopped(host: Host, settings: Settings) -> None:
    """A run that was stopped is saved."""
    path = host.run_dir / "trace.jsonl"
    trace = _read(path, may_be_torn=False) if path.exists() else None
    if trace is None or not _version_of(trace):
        return  # there is nothing to save
    if _end_of(trace) is None:
        raise Violation("the run was stopped, but the trace has no end")
    saved = _load(host)
    newest = 0 if saved is None else saved.version
    if settings.checkpoint_every != "0" and newest != _version_of(trace):
        raise Violation(f"stopped at version {_version_of(trace)}, but {newest} was saved")


def _read(path: Path, may_be_torn: bool) -> Trace:
    """Return a trace; `may_be_torn`: its last server was killed, perhaps while it wrote a line."""
    trace = read_trace(path, is_growing=True)
    return read_trace(path) if _end_of(trace) and not may_be_torn else trace


def _version_of(trace: Trace) -> int:
    """Return the last version that the trace has."""
    version = 0
    for record in trace.records:
        if isinstance(record, Update):
            version = record.update
        elif isinstance(record, Restored):
            version = record.version
    return version


def _end_of(trace: Trace) -> Ended | None:
    """Return the last record, if it is the end of the run."""
    end = trace.records[-1] if trace.records else None
    return end if isinstance(end, Ended) else None


# ---------------------------------------------------------------------------------- after the run


def check_end(host: Host, scenario: Scenario) -> None:
    """Check that the run could not have ended better."""
    if host.code != 0 and not why_it_may_fail(host, scenario):
        raise Violation(f"nothing was wrong with the script or the disk, but exit code {host.code}")


def check_laws(host: Host, scenario: Scenario) -> None:
    """Check the trace, the weights and the checkpoints of a run."""
    _check_files(host, scenario)
    if host.code == 0:
        host.disk.lose_power()  # everything that success promises was synced
        _check_success(host, scenario.settings)
        _check_files(host, scenario)


def _check_files(host: Host, scenario: Scenario) -> None:
    settings, path = scenario.settings, host.run_dir / "trace.jsonl"
    saved = _load(host)
    has_header = path.exists() and b"\n" in path.read_bytes()
    if not has_header or host.code == SpecError.exit_code:
        return  # a run that lost power could not be resumed: the server was killed, the disk full
    trace = _read(path, Launch.last(host.world.story).lost_server)
    if trace.records:
        audit(trace)
    if not scenario.has("full disk"):
        check_complete(trace, path.name, finished_at(host.run_dir))
    lost = servers_without_records(host.world.story)
    for problem in problems_with_fates(trace, host.script.computed, host.script.told, lost):
        raise Violation(problem)
    _check_no_batch_is_forgotten(host, trace)
    reference = Reference(trace, host.script.computed, settings)
    if reference.problems:
        raise Violation(reference.problems[0])
    # A full disk may keep the records of a version, and the gap that stands for them, from being
    # written, although there is room for its checkpoint meanwhile.
    is_cut = _end_of(trace) is None and any("DISK is full" in line for line in host.world.story)
    if saved is not None and (reference.knows(saved.version) or not is_cut):
        _check_checkpoint(saved, reference)
    if host.code == 0:
        _check_weights(host, trace, reference, saved)


def _check_checkpoint(saved: Saved, reference: Reference) -> None:
    if what := reference.difference(saved.version, _state_in(saved)):
        raise Violation(f"the checkpoint of version {saved.version} is wrong: {what}")


def _accepted(trace: Trace, stream: int) -> set[int]:
    """Return the batches of a stream whose gradients the last server accepted."""
    found: set[int] = set()
    for record in trace.records:
        if isinstance(record, Restored):
            found.clear()
        elif isinstance(record, Gradient) and record.fate is Fate.ACCEPTED:
            found |= {n for use in record.uses if use.stream == stream for n in use.numbers}
    return found


def _check_no_batch_is_forgotten(host: Host, trace: Trace) -> None:
    """Check that batches which were given back or lost with their worker were leased again.

    A new batch is leased only when none of these is left. A batch whose gradient was accepted isn't
    leased again, even if the run ends before its update is made; a trace with a gap doesn't know
    all of these.
    """
    end, observed = _end_of(trace), host.kernel.observed
    marks = [record for record in trace.records if isinstance(record, Gap | Restored)]
    has_gap = bool(marks) and isinstance(marks[-1], Gap)
    if end is None or observed.ended_at is None or has_gap:
        return
    restored = [record for record in marks if isinstance(record, Restored)]
    before = restored[-1].data if restored else []
    for stream, (_, _, undone) in enumerate(end.data):
        forgotten = {number for of, number in observed.forgotten if of == stream}
        if stream < len(before) and observed.following.get(stream, 0) > before[stream][1]:
            held = {number for of, number in observed.holders if of == stream}
            forgotten |= set(before[stream][2]) - held
        if found := sorted((forgotten & set(undone)) - _accepted(trace, stream)):
            raise Violation(f"batch {found[0]} was never done, but later ones were leased")


def _load(host: Host) -> Saved | None:
    archive = Archive(host.run_dir / "checkpoints", lambda _: None)
    try:
        return archive.load()
    except PacelineError as error:
        raise Violation(f"the checkpoints can't be read: {error}") from None


def _state_in(saved: Saved) -> State:
    shard = saved.shard
    average = None if shard["average"] is None else shard["average"][0]
    momentum = momentum_in(shard["optimizers"][0])
    return State(shard["parameters"][0], shard["buffers"][0], average, momentum)


def _check_weights(host: Host, trace: Trace, reference: Reference, saved: Saved | None) -> None:
    """Check the files of weights, also if a gap in the trace hides what they should be."""
    end = _end_of(trace)
    assert end is not None
    averaged = host.run_dir / "weights-averaged.pt"
    found = _weights_in(host.run_dir / "weights.pt")
    if averaged.exists():
        found = found._replace(average=_weights_in(averaged).parameters)
    if what := reference.difference(end.version, found):
        raise Violation(f"weights.pt isn't version {end.version}: {what}")
    if saved is None or saved.version != end.version:
        return
    if what := found.difference(_state_in(saved)):
        raise Violation(f"weights.pt isn't the checkpoint of version {end.version}: {what}")


def _weights_in(path: Path) -> State:
    model = make_model()
    model.load_state_dict(torch.load(path, weights_only=True))
    return State([p.detach() for p in model.parameters()], model.mean)
