# SPDX-License-Identifier: BSD-3-Clause
"""The simulated shell: performs the core's actions on a virtual clock and reports events.

A turn consists of pull (the parameters travel), compute, and push (the gradient travels); then the
shell reports to the core. A message takes the network's delay; bytes take the time that the shared
links give them. A worker that is cancelled stops at once in any of these phases; if it has already
computed its gradient, it reports that without sending the rest. Without a network, pull and push
take no time.

A worker announces its gradient and pushes when the core's `AdmissionQueue` admits it, unless the
network is without admission (`transfers=all`). An announced gradient that no longer counts is never
sent, even if late work is finished: that concerns only the computation.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import numpy as np

from paceline.admission import AdmissionQueue
from paceline.core.decider import Decider
from paceline.core.events import (
    Action,
    ApplyUpdate,
    Cancel,
    Event,
    Finish,
    GradientArrived,
    SendParams,
    StartTimer,
    StopRequested,
    TimerFired,
    UpdateApplied,
    WorkAbandoned,
    WorkerJoined,
    WorkerLeft,
)
from paceline.latency import TimeStream
from paceline.sim.cluster import Cluster
from paceline.sim.engine import LAST, URGENT, Engine
from paceline.sim.faults import Fault
from paceline.sim.links import Links, Transfer
from paceline.trace.event_records import Measured, record_event
from paceline.trace.schema import Ended, Record

__all__ = ["Shell"]

FAULTS_WITHOUT_UPDATE = 1000  # after so many in a row the run counts as stalled
FAULT_STREAM = 0xFA  # separates the random numbers of faults from those of computation times


@dataclass(eq=False, slots=True)
class SimulatedWorker:
    """A simulated worker."""

    id: int
    times: TimeStream
    here: bool = False
    turn: int = 0  # of its current work; 0: none
    version: int = 0
    asked_at: float = 0.0
    began: float = 0.0  # when it started to compute
    compute_s: float = 0.0  # how long it computes; 0 before it starts
    computing: bool = False
    computed: bool = False
    transfer: Transfer | None = None
    pulled_bytes: float = 0.0
    pushed_bytes: float = 0.0
    frozen_until: float = 0.0
    stalled_until: float = 0.0
    stage: int = 0  # increases with each change, so that obsolete callbacks can be ignored

    def end(self) -> None:
        """End the current work; callbacks that are still scheduled for it become obsolete."""
        self.turn = 0
        self.stage += 1
        self.computing = False
        self.transfer = None


class Shell:
    """One simulated run."""

    def __init__(
        self, decider: Decider, cluster: Cluster, on_update: Callable[[int], None]
    ) -> None:
        self._decider = decider
        self._spec = decider.ledger.spec
        self._cluster = cluster
        self._on_update = on_update
        self._engine = Engine()
        self._delay = 0.0
        self._queue: AdmissionQueue | None = None
        self._admits_at = inf  # when the queue is asked again even if nothing happens
        if cluster.network is not None:
            self._delay = cluster.network.delay
            self._links = Links(self._engine, cluster.network)
            if (transfers := cluster.network.transfers) is not None:
                self._queue = AdmissionQueue(decider, cluster.network.servers, transfers)
        self._workers = [
            SimulatedWorker(id, cluster.times.stream(id, self._spec.seed))
            for id in range(self._spec.workers)
        ]
        self._working = 0
        self._faults_since_update = 0
        self._fault_rng = np.random.default_rng([self._spec.seed, FAULT_STREAM])
        self._applied: deque[int] = deque()  # updates not yet reported to the core
        self._records: list[Record] = []
        self._end: Ended | None = None

    def run(self, until: float | None = None) -> list[Record]:
        """Run to the last update, until the given time, or until the run is stalled."""
        engine = self._engine
        for worker in self._workers:
            engine.at(0.0, self._on_join, worker, priority=URGENT)
        for fault in self._cluster.faults:
            self._schedule_fault(fault)
        if until is not None:
            engine.at(until, self._on_until, priority=LAST)
        while (self._end is None or self._working) and engine.step():
            pass
        self._records.append(self._end or self._stalled())
        return self._records

    def _stalled(self) -> Ended:
        ledger = self._decider.ledger
        reason = f"stalled: {len(ledger.members)} workers are left and nothing more can happen"
        return Ended(self._engine.now, ledger.version, reason=reason)

    # ---------------------------------------------------------------- reporting and performing

    def _handle(self, event: Event, measured: Measured | None = None) -> None:
        version = self._decider.ledger.version
        actions = self._decider.handle(event)
        self._records += record_event(event, actions, version, measured)
        for action in actions:
            self._perform(action)
        while self._applied:
            self._handle(UpdateApplied(event.time, self._applied.popleft()))
        if self._queue is not None:
            self._admit(self._queue)

    def _perform(self, action: Action) -> None:
        match action:
            case SendParams():
                self._send(self._workers[action.worker], action)
            case Cancel() if self._spec.late == "cancel" or self._has_announced(action.worker):
                self._cancel(self._workers[action.worker], action.turn)
            case ApplyUpdate():
                self._faults_since_update = 0
                self._on_update(action.update)
                if self._decider.learns_from_updates:
                    self._applied.append(action.update)
            case StartTimer():
                self._engine.at(action.at, self._on_timer, action.timer, priority=LAST)
            case Finish():
                unused = tuple(c.worker for c in action.unused)
                self._end = Ended(self._engine.now, action.version, unused)
                for worker in self._workers:  # no worker continues after the end
                    self._cancel(worker, worker.turn)
            case _:
                pass

    # -------------------------------------------------------------------------- a worker's turn

    def _send(self, worker: SimulatedWorker, action: SendParams) -> None:
        self._working += 1
        worker.turn, worker.version = action.turn, action.version
        worker.asked_at = worker.began = self._engine.now
        worker.compute_s = worker.pulled_bytes = worker.pushed_bytes = 0.0
        worker.computed = False
        worker.stage += 1
        if self._cluster.network is None:
            self._compute(worker)
        else:
            self._engine.at(self._engine.now + self._delay, self._pull, worker, worker.stage)

    def _pull(self, worker: SimulatedWorker, stage: int) -> None:
        if worker.stage == stage and self._cluster.network is not None:
            size = self._cluster.network.model_bytes

            def done() -> None:
                worker.pulled_bytes, worker.transfer = size, None
                self._compute(worker)

            worker.transfer = self._links.begin("down", worker.id, size, done)

    def _compute(self, worker: SimulatedWorker) -> None:
        worker.computing = True
        worker.began = max(self._engine.now, worker.frozen_until)
        worker.compute_s = worker.times.take(worker.began)
        ends = worker.began + worker.compute_s
        self._engine.at(ends, self._on_computed, worker, worker.stage)

    def _on_computed(self, worker: SimulatedWorker, stage: int) -> None:
        if worker.stage != stage:
            return
        worker.computing, worker.computed = False, True
        if self._cluster.network is None:
            self._report_gradient(worker, stage)
        else:
            then = self._push if self._queue is None else self._on_announced
            self._engine.at(self._engine.now + self._delay, then, worker, stage)

    def _on_announced(self, worker: SimulatedWorker, stage: int) -> None:
        if worker.stage != stage or self._queue is None:
            return
        if self._decider.would_accept(worker.id):
            self._queue.announce(worker.id, self._host_of(worker.id))
            self._admit(self._queue)
        else:  # nothing needs to be sent: the announcement is its report
            self._report_gradient(worker, stage)

    def _host_of(self, worker: int) -> str:
        """Return where a worker runs, if others run there, too."""
        network = self._cluster.network
        if network is None or network.workers_per_host == 1:
            return ""
        return str(network.host(worker))

    def _admit(self, queue: AdmissionQueue) -> None:
        """Let the workers push that the queue admits; they hear of it, and then bytes travel."""
        for id in queue.admit(self._engine.now):
            worker = self._workers[id]
            begins = self._engine.now + 2 * self._delay
            self._engine.at(begins, self._push, worker, worker.stage)
        next_at = queue.next_at
        if next_at not in (inf, self._admits_at):
            self._engine.at(next_at, self._admit, queue, priority=LAST)
        self._admits_at = next_at

    def _has_announced(self, worker: int) -> bool:
        return self._queue is not None and worker in self._queue

    def _withdraw(self, worker: SimulatedWorker) -> None:
        if self._queue is not None:
            self._queue.withdraw(worker.id)

    def _push(self, worker: SimulatedWorker, stage: int) -> None:
        if worker.stage == stage and self._cluster.network is not None:
            size = self._cluster.network.model_bytes

            def done() -> None:
                worker.pushed_bytes, worker.transfer = size, None
                if self._queue is not None:
                    self._queue.arrived(worker.id, self._engine.now)
                self._report_gradient(worker, stage)

            worker.transfer = self._links.begin("up", worker.id, size, done)

    def _report_gradient(self, worker: SimulatedWorker, stage: int) -> None:
        if worker.stage == stage:
            now = self._engine.now
            turn, version = worker.turn, worker.version
            event = GradientArrived(now, worker.id, turn, version, self._cluster.batch)
            self._report(worker, event, worker.compute_s)

    def _report(self, worker: SimulatedWorker, event: Event, compute_s: float) -> None:
        measured = Measured(worker.asked_at, compute_s, worker.pulled_bytes, worker.pushed_bytes)
        worker.end()
        self._working -= 1
        self._handle(event, measured)

    def _cancel(self, worker: SimulatedWorker, turn: int) -> None:
        self._withdraw(worker)
        at = self._engine.now + self._delay
        self._engine.at(at, self._on_cancel, worker, turn, priority=URGENT)

    def _on_cancel(self, worker: SimulatedWorker, turn: int) -> None:
        now = self._engine.now
        if not turn or worker.turn != turn:
            return
        if now < worker.frozen_until:
            self._engine.at(worker.frozen_until, self._on_cancel, worker, turn, priority=URGENT)
            return
        self._abort_transfer(worker)
        worker.stage += 1
        worker.computing = False
        report = self._report_gradient if worker.computed else self._report_abandoned
        if not worker.computed:
            worker.compute_s = min(worker.compute_s, max(0.0, now - worker.began))
        if self._delay:
            self._engine.at(now + self._delay, report, worker, worker.stage)
        else:
            report(worker, worker.stage)

    def _report_abandoned(self, worker: SimulatedWorker, stage: int) -> None:
        if worker.stage == stage:
            event = WorkAbandoned(self._engine.now, worker.id, worker.turn)
            self._report(worker, event, worker.compute_s)

    def _abort_transfer(self, worker: SimulatedWorker) -> None:
        if worker.transfer is not None:
            moved = self._links.abort(worker.transfer)
            if worker.computed:
                worker.pushed_bytes = moved
            else:
                worker.pulled_bytes = moved
            worker.transfer = None

    # --------------------------------------------------------------- joins, timers and faults

    def _on_join(self, worker: SimulatedWorker) -> None:
        worker.here = True
        self._handle(WorkerJoined(self._engine.now, worker.id))

    def _on_timer(self, timer: int) -> None:
        ledger = self._decider.ledger
        if ledger.awaits_timer(timer) and self._end is None:
            self._handle(TimerFired(self._engine.now, timer))

    def _on_until(self) -> None:
        if self._end is None:
            self._handle(StopRequested(self._engine.now))

    def _schedule_fault(self, fault: Fault) -> None:
        wait_s = self._fault_rng.exponential(fault.time) if fault.repeats else fault.time
        self._engine.at(self._engine.now + wait_s, self._on_fault, fault)

    def _on_fault(self, fault: Fault) -> None:
        candidates = [w for w in self._workers if w.here and fault.worker in (None, w.id)]
        if candidates and self._end is None:
            worker = candidates[self._fault_rng.integers(len(candidates))]
            if fault.kind == "freeze":
                self._freeze(worker, fault.lasting or 0.0)
            elif fault.kind == "stall":
                self._stall(worker, fault.lasting)
            else:
                self._kill(worker, fault.lasting)
        # Faults alone must not keep a run going that makes no progress any more.
        self._faults_since_update += 1
        if fault.repeats and self._faults_since_update < FAULTS_WITHOUT_UPDATE:
            self._schedule_fault(fault)

    def _kill(self, worker: SimulatedWorker, lasting: float | None) -> None:
        self._abort_transfer(worker)
        self._withdraw(worker)
        lost = Measured(worker.asked_at) if worker.turn else None
        self._working -= worker.turn > 0
        worker.end()
        worker.here = False
        worker.frozen_until = 0.0
        if lasting is not None:
            self._engine.at(self._engine.now + lasting, self._on_return, worker)
        self._handle(WorkerLeft(self._engine.now, worker.id, "killed"), lost)

    def _on_return(self, worker: SimulatedWorker) -> None:
        if self._end is None:
            self._on_join(worker)

    def _freeze(self, worker: SimulatedWorker, lasting: float) -> None:
        still_frozen_until = max(worker.frozen_until, self._engine.now)
        worker.frozen_until = max(worker.frozen_until, self._engine.now + lasting)
        if worker.computing:
            worker.compute_s += worker.frozen_until - still_frozen_until
            worker.stage += 1
            ends = worker.began + worker.compute_s
            self._engine.at(ends, self._on_computed, worker, worker.stage)

    def _stall(self, worker: SimulatedWorker, lasting: float | None) -> None:
        ends = inf if lasting is None else self._engine.now + lasting
        worker.stalled_until = max(worker.stalled_until, ends)
        self._links.set_stalled(worker.id, True, worker.transfer)
        if lasting is not None:
            self._engine.at(ends, self._on_stall_over, worker)

    def _on_stall_over(self, worker: SimulatedWorker) -> None:
        if self._engine.now >= worker.stalled_until:
            self._links.set_stalled(worker.id, False, worker.transfer)
