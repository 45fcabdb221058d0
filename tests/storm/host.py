# SPDX-License-Identifier: BSD-3-Clause
"""A simulated machine on which a run is launched, trained, killed and resumed.

The launcher's supervisor and monitor, the server and the workers are the real ones. Simulated are
the machine below them (clock, connections, disk, processes) and the script above them.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.run.launch.awake_clock import with_awake_clock
from paceline.run.launch.environment import Identity
from paceline.run.launch.monitor import RunMonitor
from paceline.run.launch.run_folder import discard_pending_spec, settings_of, write_run_files
from paceline.run.launch.stop_signals import StopSignals
from paceline.run.launch.supervisor import Supervisor
from paceline.run.net.in_process import InProcessStore
from paceline.run.script import WorkerRun
from paceline.run.server.assembly import TrainedObjects, serve_run
from paceline.run.server.part_server import PartServer
from paceline.run.settings import Settings
from paceline.run.tensors.layout import gather
from paceline.run.worker.pass_iterator import LoaderEnded
from paceline.run.worker.sampler import order_of
from storm.disk import StormDisk
from storm.network import Connections, Kernel, WatchEnd
from storm.part_network import StormPartHost
from storm.peers import Observed
from storm.processes import StormProcesses
from storm.script import ScriptFailure, StormScript
from storm.world import Process, Task, World

__all__ = ["Host", "exit_code_of"]


class _Teller(StringIO):
    """Standard output of all processes: what they print becomes part of the story."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def write(self, text: str) -> int:
        """Note each line with the name of the process that prints it."""
        name = self._world.process.name if self._world.current is not None else "-"
        for line in text.splitlines():
            if line.strip():
                self._world.note(f"{name}: {line}")
        return len(text)


class Host:
    """The machine, and the run on it."""

    def __init__(self, world: World, folder: Path, script: StormScript, delay_max_s: float) -> None:
        self.world = world
        self.run_dir = folder
        self.script = script
        self.disk = StormDisk(world)
        self.kernel = Kernel(world, delay_max_s)
        self.system = replace(
            self.kernel.system,
            disk=self.disk,
            start_thread=self._start_thread,
            wall_time=world.wall_time,
        )
        self.kernel.system = self.system
        self.launcher: Process | None = None
        self.signals = StopSignals()
        self.code: int | None = None  # of the last launcher; None: it was killed
        self.monitor: RunMonitor | None = None  # what the launcher knows about the server
        self.is_supervising = False  # the launcher still decides on its exit code
        self.server_deaths: list[int] = []  # points of their lives at which the next servers die
        self.runs: dict[int, WorkerRun] = {}  # of workers, by pid
        self._incarnations = 0

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Note what processes print."""
        before = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = _Teller(self.world)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before

    def _start_thread(self, work: Callable[[], None], name: str) -> Task:
        return self.world.process.spawn(work, name)

    # --------------------------------------------------------------------------------- processes

    def processes(self, name: str) -> list[Process]:
        """Return the living processes whose name begins like this."""
        return [p for p in self.world.processes if p.is_alive and p.name.startswith(name)]

    def signal(self, process: Process, number: int) -> None:
        """Send a signal to a process."""
        if number == signal.SIGSTOP:
            process.is_frozen = process.is_alive
        elif number == signal.SIGCONT:
            process.is_frozen = False
        elif number == signal.SIGKILL or not self._handles(process, number):
            process.exit(-number)

    def _handles(self, process: Process, number: int) -> bool:
        listening = self.kernel.listening
        if process is self.launcher:
            self.signals.count += 1
            self.signals.last = number
            return True
        is_serving = listening is not None and listening.process is process
        return is_serving and listening is not None and listening.signal(number)

    def _start(self, who: Identity, name: str) -> Process:
        self._incarnations += 1
        process = Process(self.world, f"{name}#{self._incarnations}")
        if who.is_head and self.server_deaths:
            process.dies_at = self.server_deaths.pop(0)
        main = self._work if who.worker is not None else self._serve
        if who.worker is None and not who.is_head:
            main = self._serve_part
        process.spawn(
            lambda: process.exit(exit_code_of(process, lambda: main(process, who))), "main"
        )
        launcher = self.launcher
        assert launcher is not None
        launcher.on_exit.append(lambda: process.exit(-9))  # the OS kills what it has started
        return process

    def _serve(self, process: Process, who: Identity) -> int:
        settings = settings_of(who.run_dir)
        model, optimizer, *loaders = self.script.objects()
        orders = [order_of(loader) for loader in loaders]
        trained = TrainedObjects(gather([model], [optimizer]), [model], [], orders)
        failure = serve_run(who.run_dir, settings, trained, _ServerHost(self.kernel, process))
        if failure:
            print(f"the run failed: {failure}")
        return 1 if failure else 0

    def _serve_part(self, process: Process, who: Identity) -> int:
        model, optimizer, *_ = self.script.objects()
        whole = gather([model], [optimizer])
        PartServer(who.server, whole, StormPartHost(self.kernel, process)).serve()
        return 0

    def dial(self, process: Process, spec: Any) -> Any:
        """Connect a worker to the server, with the transport of the run."""
        if settings_of(self.run_dir).transport == "tcp":
            return self.kernel.dial_tcp(process, spec)
        return self.kernel.dial(process)

    def _work(self, process: Process, who: Identity) -> int:
        run = WorkerRun(who, lambda _, spec: lambda: self.dial(process, spec), self.system)
        self.runs[process.pid] = run
        process.on_exit.append(lambda: self.runs.pop(process.pid))
        with suppress(LoaderEnded):
            self.script.train(run)
        run.leave()
        return 0

    # ------------------------------------------------------------------------------- the launcher

    def launch(self, settings: Settings) -> None:
        """Start or resume the run."""
        self.signals.count = 0
        self.code, self.is_supervising = None, False
        self.kernel.observed = Observed()
        process = self.launcher = Process(self.world, "launcher")
        process.on_exit.append(self.kernel.close_socket)
        process.spawn(lambda: self._launch(process, settings), "main")

    def _launch(self, process: Process, settings: Settings) -> None:
        code = exit_code_of(process, lambda: self._supervise(settings))
        running = self.processes("server") + self.processes("worker")
        if running:
            names = ", ".join(child.name for child in running)
            self.world.leaks.append(f"the launcher exits with {code}, but leaves: {names}")
        self.code = code
        process.exit(code)

    def _supervise(self, settings: Settings) -> int:
        server = write_run_files(self.run_dir, settings, "unix:@storm", disk=self.disk)
        ends: list[WatchEnd] = []

        def dial() -> WatchEnd:
            ends[:] = [WatchEnd(self.kernel.dial(self.world.process))]
            return ends[0]

        def say(text: str) -> None:
            self.world.note(f"launcher: {text}")

        processes = StormProcesses(self._start, self.signal, say)
        system = with_awake_clock(self.system)
        monitor = self.monitor = RunMonitor(dial, system)
        signals: Any = self.signals
        supervisor = Supervisor(settings, processes, monitor, signals, say, system)  # type: ignore[arg-type] # the same interface
        supervisor.start(server)
        self.is_supervising = True
        handled = 0
        while not supervisor.is_done:

            def has_news(handled: int = handled) -> bool:
                has_report = any(end.has_news() for end in ends)
                return processes.has_exited or has_report or self.signals.count > handled

            self.world.wait_for(has_news, max(0.0, supervisor.wake_at - system.monotonic()))
            handled = self.signals.count
            monitor.receive()
            supervisor.step()
        monitor.close()
        self.is_supervising = False
        code = supervisor.exit_code(self.run_dir)
        discard_pending_spec(self.run_dir, self.disk)
        return code


class _ServerHost:
    """The memory and the connections of a server."""

    def __init__(self, kernel: Kernel, process: Process) -> None:
        self._kernel = kernel
        self._process = process

    def new_store(self, spec: Any, layout: Any = None) -> InProcessStore:
        """Return plain memory."""
        return InProcessStore(spec, layout)

    def listen(self, store: InProcessStore, others: Any) -> Connections:
        """Accept connections."""
        return self._kernel.listen(self._process, store, others)


def exit_code_of(process: Process, work: Callable[[], int]) -> int:
    """Return the exit code of a process that does this, and note the error that ended it."""
    try:
        return work()
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 1
    except (PacelineError, ScriptFailure) as error:
        code = error.exit_code if isinstance(error, PacelineError) else PacelineError.exit_code
        process.failure = (str(error), code)
        print(f"{type(error).__name__}: {error}")
        return code
