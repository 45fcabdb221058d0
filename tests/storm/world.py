# SPDX-License-Identifier: BSD-3-Clause
"""Processes that run one at a time, on a virtual clock, in an order that a seed decides.

Theory of operation
    Each simulated process runs real code in threads of its own, but only one thread runs at a time:
    the others wait for their turn. A thread gives its turn away where real code would wait for the
    OS (for messages, for time, for the disk). The scheduler then picks one of the threads whose
    wait is over. If there is none, it moves the clock to the time at which the next wait ends.
    So a run of several processes is one sequence of steps, and the same seed gives the same one.

    A process is killed where it waits, or at any other point at which it touches the outside. Its
    threads then unwind with `Killed`, but everything that they try to do on the way fails: for the
    rest of the world the process ended at that point, as with SIGKILL.

    A thread that doesn't give its turn back within a minute of real time is in an endless loop. The
    world then ends, and says where the thread is.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import traceback
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf
from random import Random
from typing import Any

__all__ = ["BEGIN_S", "Deadlock", "Endless", "Killed", "LeftBehind", "Process", "Task", "World"]

STEPS_MAX = 40_000  # of one world; a run that takes more never ends
TIME_MAX_S = 100_000.0
STEP_S = 1e-6  # computing takes time, too: a clock that stood still would let code spin for ever
TURN_MAX_S = 60  # of real time, which a turn of milliseconds takes only in an endless loop
UNWIND_MAX_S = 5  # likewise, for a thread that was interrupted in an endless loop
BEGIN_S = 1000.0  # the time at which every world begins
LOOK_AROUND = 0.2  # how often a poll that doesn't wait lets others run first


class Killed(BaseException):
    """Unwinds the threads of a process that was killed."""


class Deadlock(AssertionError):
    """Nothing will ever happen again, but the world hasn't ended."""


class Endless(AssertionError):
    """The world takes more steps or time than any sound run."""


class LeftBehind(AssertionError):
    """A process that ended by itself left something behind, or holds too much while it runs."""


class Task:
    """One thread of a process."""

    def __init__(self, process: Process, work: Callable[[], None], name: str) -> None:
        self.process = process
        self.name = name
        self.is_done = False
        self.is_met: Callable[[], bool] = lambda: True
        self.until = -inf  # it is woken at this time at the latest
        self.error: BaseException | None = None
        self.on_torn: Callable[[], None] | None = None  # does a part of what a kill interrupts
        self._work = work
        self._turn = threading.Lock()  # free only while this thread may take its turn
        self._turn.acquire()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def _main(self) -> None:
        self._turn.acquire()
        try:
            if self.process.is_alive:
                self._work()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.is_done = True
            self.process.world.give_back_turn()

    def take_turn(self) -> None:
        """Let this thread run; called by the scheduler."""
        self._turn.release()

    def wait_turn(self) -> None:
        """Wait until the scheduler lets this thread run again."""
        self._turn.acquire()

    def finish(self) -> None:
        """Wait until the thread has exited."""
        self._thread.join()

    def stack(self) -> str:
        """Return where the thread is."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else "it has exited"

    def interrupt(self) -> None:
        """Have `Killed` raised in the thread, wherever it is."""
        ident, error = ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(Killed)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)

    @property
    def is_current(self) -> bool:
        """Whether it is this thread's turn."""
        return self.process.world.current is self

    # As a background thread of the real code.

    def is_alive(self) -> bool:
        """Return whether the thread is still running."""
        return not self.is_done

    def join(self) -> None:
        """Wait until the thread has ended."""
        self.process.world.wait_for(lambda: self.is_done)


class Process:
    """A simulated process: its threads, and what the OS knows about it."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.pid = next(world.pids)
        self.is_alive = True
        self.is_frozen = False  # it was sent SIGSTOP
        self.has_joined = False  # it is a worker with read-only parameters
        self.has_left = False  # it is a worker that left with notice
        self.is_locked = False  # its threads wait for each other for ever, as in a dead lock
        self.code: int | None = None  # its exit code; negative: the signal that killed it
        self.disk_waits = 0  # how many of its threads wait for the disk
        self.points = 0  # how often it has touched the outside
        self.dies_at: float = inf  # the point at which it is killed
        self.failure: tuple[str, int] | None = None  # the error that ended its script, its code
        self.tasks: list[Task] = []
        self.open_files: list[Any] = []
        self.on_exit: list[Callable[[], None]] = []  # what the OS does when it is gone
        world.processes.append(self)

    def spawn(self, work: Callable[[], None], name: str) -> Task:
        """Start a thread."""
        task = Task(self, work, f"{self.name}/{name}")
        self.tasks.append(task)
        self.world.tasks.append(task)
        return task

    def exit(self, code: int) -> None:
        """End the process; the OS closes everything that it has open."""
        if not self.is_alive:
            return
        if code >= 0:
            self._check_left()
        self.is_alive, self.is_frozen, self.is_locked, self.code = False, False, False, code
        self.world.note(f"{self.name} exits with {code}")
        for task in self.tasks:
            if code < 0 and task.on_torn is not None:
                task.on_torn()
            task.on_torn = None
        for file in self.open_files:
            file.close()
        for call in self.on_exit:
            call()
        self.on_exit.clear()

    def _check_left(self) -> None:
        """Report what a process that ends by itself leaves to the OS."""
        left = [str(file.name) for file in self.open_files if not file.closed]
        left += [task.name for task in self.tasks if task.is_alive() and not task.is_current]
        if left:
            self.world.leaks.append(f"{self.name} exits, but leaves: {', '.join(left)}")

    @property
    def is_paused(self) -> bool:
        """Whether none of its threads runs."""
        return self.is_frozen or self.is_locked

    def touch(self) -> None:
        """Note that it touches the outside; this may be where it is killed."""
        if not self.is_alive:
            raise Killed
        self.points += 1
        if self.points >= self.dies_at:
            self.world.points_hit += 1
            self.exit(-9)
            raise Killed


class World:
    """All processes, their clock, and what is going to happen."""

    def __init__(self, seed: int) -> None:
        self.random = Random(f"world {seed}")
        self.now = BEGIN_S
        self.wall_offset_s = 1e9  # of the clock that users set, which may jump
        self.pids = count(100)
        self.processes: list[Process] = []
        self.tasks: list[Task] = []
        self.current: Task | None = None
        self.steps = 0
        self.story: list[str] = []  # what has happened, for people
        self.folder = ""  # whose name isn't part of the story: it differs each time
        self.points_hit = 0  # how many processes were killed at a chosen point
        self.leaks: list[str] = []  # what processes left behind
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._idle = threading.Lock()  # free only when a thread has given its turn back
        self._idle.acquire()

    def note(self, text: str) -> None:
        """Add a line to the story."""
        shown = text.replace(self.folder, "FOLDER") if self.folder else text
        self.story.append(f"{self.now - BEGIN_S:10.4f}  {shown}")

    def at(self, time: float, event: Callable[[], None] = lambda: None) -> None:
        """Have this happen at that time; by default, only look again whose wait is over."""
        heappush(self._events, (time, next(self._numbers), event))

    def after(self, seconds: float, event: Callable[[], None] = lambda: None) -> None:
        """Have this happen in that many seconds."""
        self.at(self.now + seconds, event)

    # ------------------------------------------------------------------------ called by processes

    @property
    def process(self) -> Process:
        """The process that is running."""
        assert self.current is not None
        return self.current.process

    def touch(self) -> None:
        """Note that the running process touches the outside."""
        if self.current is not None:
            self.current.process.touch()

    def monotonic(self) -> float:
        """Return the time."""
        return self.now

    def wall_time(self) -> float:
        """Return the time of the clock that users set."""
        return self.now + self.wall_offset_s

    def sleep(self, seconds: float) -> None:
        """Wait for this long."""
        self.wait_for(lambda: False, seconds)

    def wait_for(self, is_met: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until this is met, or for this long; return whether it is."""
        task = self.current
        assert task is not None, "only processes wait"
        task.process.touch()
        if timeout_s == 0 and self.random.random() > LOOK_AROUND:
            return is_met()
        task.is_met = is_met
        task.until = inf if timeout_s is None else self.now + max(0.0, timeout_s)
        self.give_back_turn()
        task.wait_turn()
        task.process.touch()
        return is_met()

    def let_others_run(self) -> None:
        """Give the turn away without waiting for anything; this is no point of its own."""
        task = self.current
        assert task is not None
        task.is_met = lambda: True
        self.give_back_turn()
        task.wait_turn()
        if not task.process.is_alive:
            raise Killed

    def give_back_turn(self) -> None:
        """Let the scheduler continue."""
        self._idle.release()

    # -------------------------------------------------------------------------------- the scheduler

    def run(self, is_over: Callable[[], bool]) -> None:
        """Let everything happen until the world is over."""
        while not is_over():
            self.steps += 1
            if self.steps > STEPS_MAX or self.now > TIME_MAX_S:
                raise Endless(f"not over after {self.steps} steps and {self.now - BEGIN_S:.0f} s")
            while self._events and self._events[0][0] <= self.now:
                heappop(self._events)[2]()
            ready = [task for task in self.tasks if self._is_ready(task)]
            if ready:
                self._resume(self.random.choice(ready))
            else:
                self._move_clock()
            if self.leaks:
                raise LeftBehind(self.leaks[0])

    def _is_ready(self, task: Task) -> bool:
        process = task.process
        if task.is_done:
            return False
        if not process.is_alive:
            return True  # it unwinds
        return not process.is_paused and (self.now >= task.until or task.is_met())

    def _resume(self, task: Task) -> None:
        self.now += STEP_S
        self._give_turn(task)
        if task.is_done:
            self.tasks.remove(task)
            task.finish()
            if task.error is not None:
                raise task.error

    def _give_turn(self, task: Task) -> None:
        """Let a thread run until it gives its turn back."""
        self.current = task
        task.take_turn()
        if not self._is_idle_within(TURN_MAX_S):
            raise Endless(f"{task.name} runs without end:\n{task.stack()}")
        self.current = None

    def _is_idle_within(self, seconds: int) -> bool:
        """Wait until no thread runs; time in which all of this was stopped hardly counts."""
        return any(self._idle.acquire(timeout=1.0) for _ in range(seconds))

    def _move_clock(self) -> None:
        times = [task.until for task in self.tasks if not task.process.is_paused]
        times += [self._events[0][0]] if self._events else []
        time = min(times, default=inf)
        if time == inf:
            waiting = ", ".join(task.name for task in self.tasks)
            raise Deadlock(f"everything waits for ever: {waiting}")
        self.now = time

    def end(self) -> None:
        """Kill all processes, and wait until their threads are gone."""
        for process in self.processes:
            process.exit(-9)
        if self.current is not None:  # it is in an endless loop
            self.current.interrupt()
            if not self._is_idle_within(UNWIND_MAX_S):
                self.tasks.remove(self.current)  # not even this ends it
            self.current = None
        for task in list(self.tasks):
            while not task.is_done:
                self._give_turn(task)
            task.finish()
        self.tasks.clear()
        self._events.clear()
