"""Several simulations at once, each in a process of its own: policies and engine counts share nothing.

One alone runs in this process. SIGINT and SIGTERM stop all of them, and what there is by then is reported; a second
one ends this process as it would have without us. No process outlives `run_all`, however it ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Event
from types import FrameType

import msgspec

from loadtest.die_with_parent import tie
from loadtest.report.capacity import Capacity, Tried, search, verdict
from loadtest.signals import hastened
from loadtest.simulate.run import Cell, Progress, Simulated, simulate

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LOOK_EVERY = 0.2  # seconds between two looks at processes' progress


class Done(msgspec.Struct, kw_only=True):
    """Outcome of a job: its runs, several of a search."""

    cell: Cell
    made: list[Simulated]
    capacity: Capacity | None = None


class JobError(Exception):
    """A process that ended without an answer."""


def run_all(jobs: Sequence[Cell], at_once: int, tell: Callable[[Progress], None]) -> tuple[list[Done], bool]:
    """Run all jobs. Return the result of each job, in order, and whether they were broken off; a job that had not begun
    by then has no result. Raises JobError, and `simulation.Broken`."""
    stop = threading.Event()
    with hastened(SIGNALS, stop.set):
        if min(len(jobs), at_once) > 1:
            return _in_processes(jobs, at_once, tell, stop), stop.is_set()
        done: list[Done] = []
        for job in jobs:
            if stop.is_set():
                break
            done.append(run_job(job, tell, stop.is_set))
        return done, stop.is_set()


def run_job(cell: Cell, tell: Callable[[Progress], None], stopped: Callable[[], bool]) -> Done:
    """Run a job in this process, until `stopped` says to end it."""

    def told(progress: Progress) -> bool:
        tell(progress)
        return stopped()

    if not cell.find_capacity:
        return Done(cell=cell, made=[simulate(cell, told)])
    made: list[Simulated] = []
    first = cell.scenario.rate or 1.0  # of a trace: times the speed it was given

    def attempt(rate: float) -> Tried | None:
        scaled = msgspec.structs.replace(cell, scenario=cell.scenario.scaled(rate / first))
        simulated = simulate(scaled, told)
        made.append(simulated)
        if simulated.stopped or simulated.problem:
            return None
        return verdict(rate, simulated.run)

    capacity = search(first, attempt)
    return Done(cell=cell, capacity=capacity, made=sorted(made, key=lambda one: one.run.rate))


# -- processes --------------------------------------------------------------------------------------------------------


def _in_processes(
    jobs: Sequence[Cell], at_once: int, tell: Callable[[Progress], None], stop: threading.Event
) -> list[Done]:
    context = multiprocessing.get_context("spawn")  # fork would take threads' locks along
    said: SimpleQueue[Progress] = context.SimpleQueue()
    over = context.Event()
    begun: list[Future[Done]] = []
    running: set[Future[Done]] = set()
    with ProcessPoolExecutor(min(at_once, len(jobs)), context, _begin, (os.getpid(), said, over)) as pool:
        try:
            while running or (len(begun) < len(jobs) and not stop.is_set()):
                if len(running) < at_once and len(begun) < len(jobs) and not stop.is_set():
                    with _signals_later():
                        begun.append(pool.submit(_job, jobs[len(begun)]))
                    running.add(begun[-1])
                    continue
                if stop.is_set():
                    over.set()
                _, running = wait(running, LOOK_EVERY, FIRST_COMPLETED)
                while not said.empty():
                    tell(said.get())
                for number, future in enumerate(begun):
                    if future.done() and (error := future.exception()) is not None:
                        raise JobError(f"the simulation of {jobs[number].name}: {error}") from error
                # The pool hears late of the end of a process that it has started beside others.
                if len(multiprocessing.active_children()) < len(running):
                    raise JobError("a process of a simulation ended without an answer")
        finally:
            over.set()  # the pool waits for all that run
    return [future.result() for future in begun]


class _Worker:
    """Process of the pool: where it tells its progress, and whether it is to stop."""

    said: SimpleQueue[Progress]
    over: Event


def _begin(parent: int, said: SimpleQueue[Progress], over: Event) -> None:
    """Begin a process. Signals to the whole group are its parent's to pass on; it ends with its parent."""
    _Worker.said, _Worker.over = said, over

    def ask(number: int, frame: FrameType | None) -> None:
        if os.getppid() != parent:
            os._exit(1)

    for number in SIGNALS:
        signal.signal(number, ask)
    tie(parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _job(job: Cell) -> Done:
    return run_job(job, _Worker.said.put, _Worker.over.is_set)


@contextmanager
def _signals_later() -> Iterator[None]:
    """Block signals while a process is started, which has them blocked until `_begin` can take them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
