"""Several simulations at once, each in a process of its own: policies and engine counts share nothing.

One alone runs in this process. SIGINT and SIGTERM stop all of them, and what there is by then is reported; a second
one ends this process as it would have without us. No process outlives `run_all`, however it ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.resource_tracker import ensure_running
from types import FrameType

import msgspec

from loadtest.report.capacity import Capacity, Tried, search, verdict
from loadtest.signals import handled
from loadtest.simulate.run import Cell, Progress, Simulated, simulate

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE = 5.0  # seconds until a process that was told to end is made to


class Done(msgspec.Struct, kw_only=True):
    """Outcome of a job: its runs, several of a search."""

    cell: Cell
    made: list[Simulated]
    capacity: Capacity | None = None


class JobError(Exception):
    """A process that ended without an answer."""


class Stop:
    """Whether somebody has asked for the end."""

    def __init__(self) -> None:
        self.asked = False


def processors() -> int:
    """Number of processes that have a core each here."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_all(jobs: Sequence[Cell], at_once: int, tell: Callable[[Progress], None]) -> tuple[list[Done], bool]:
    """Run all jobs. Return the result of each job, in order, and whether they were broken off; a job that had not begun
    by then has no result. Raises JobError, and `simulation.Broken`."""
    with _stoppable() as stop:
        if min(len(jobs), at_once) > 1:
            return _in_processes(jobs, at_once, tell, stop)
        done: list[Done] = []
        for job in jobs:
            if stop.asked:
                break
            done.append(run_job(job, _told(tell, stop)))
        return done, stop.asked


def run_job(cell: Cell, tell: Callable[[Progress], bool]) -> Done:
    """Run a job in this process. `tell` answers whether to stop."""
    if not cell.find_capacity:
        return Done(cell=cell, made=[simulate(cell, tell)])
    made: list[Simulated] = []
    first = cell.scenario.rate or 1.0  # of a trace: times the speed it was given

    def attempt(rate: float) -> Tried | None:
        scaled = msgspec.structs.replace(cell, scenario=cell.scenario.scaled(rate / first))
        simulated = simulate(scaled, tell)
        made.append(simulated)
        if simulated.stopped or simulated.problem:
            return None
        return verdict(rate, simulated.run)

    capacity = search(first, attempt)
    return Done(cell=cell, capacity=capacity, made=sorted(made, key=lambda one: one.run.rate))


def _told(tell: Callable[[Progress], None], stop: Stop) -> Callable[[Progress], bool]:
    def told(progress: Progress) -> bool:
        tell(progress)
        return stop.asked

    return told


@contextmanager
def _stoppable(*, patient: bool = False) -> Iterator[Stop]:
    """`patient`: no number of signals is more than one. Ctrl-C in a terminal is for every process of it, and the one
    that has begun the others tells them too."""
    stop = Stop()

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.asked and not patient:
            signal.default_int_handler(number, frame)
        stop.asked = True

    with handled(SIGNALS, ask):
        yield stop


# -- processes --------------------------------------------------------------------------------------------------------


def _in_processes(
    jobs: Sequence[Cell], at_once: int, tell: Callable[[Progress], None], stop: Stop
) -> tuple[list[Done], bool]:
    context = multiprocessing.get_context("spawn")  # fork would take threads' locks along
    coming = list(enumerate(jobs))
    done: dict[int, Done] = {}
    running: dict[Connection, tuple[int, SpawnProcess]] = {}
    told = False
    ensure_running()  # else the first start does it, which unblocks signals in the middle
    try:
        while running or (coming and not stop.asked):
            while coming and len(running) < at_once and not stop.asked:
                number, job = coming.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(job, theirs), daemon=True)
                # Signals that come before it can take them wait for it.
                signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
                try:
                    process.start()
                finally:
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
                theirs.close()
                running[ours] = number, process
            if stop.asked and not told:
                told = True
                for _, process in running.values():
                    process.terminate()
            for ready in wait(list(running), timeout=0.2):
                assert isinstance(ready, Connection)  # noqa: S101 # nothing else is waited for
                number, process = running[ready]
                said = _received(ready, jobs[number].name, process)
                if isinstance(said, Progress):
                    tell(said)
                    continue
                del running[ready]
                process.join()
                ready.close()
                if isinstance(said, Done):
                    done[number] = said
                elif not stop.asked:
                    raise said
    finally:
        for connection, (_, process) in running.items():
            process.terminate()
            process.join(PATIENCE)
            if process.is_alive():
                process.kill()
                process.join()
            connection.close()
    return [done[number] for number in sorted(done)], stop.asked


def _received(connection: Connection, name: str, process: SpawnProcess) -> Progress | Done | Exception:
    """Read what a process says, or why it no longer does."""
    try:
        said: Progress | Done | Exception = connection.recv()
    except EOFError:
        process.join(PATIENCE)
        return JobError(f"the simulation of {name} ended with status {process.exitcode} and without an answer")
    return said


def _child(job: Cell, parent: Connection) -> None:
    """The life of a process. A parent that is gone ends it."""
    with _stoppable(patient=True) as stop:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

        def send(said: Progress | Done | Exception) -> None:
            try:
                parent.send(said)
            except BrokenPipeError:
                stop.asked = True

        try:
            send(run_job(job, _told(send, stop)))
        except Exception as error:
            send(JobError(f"the simulation of {job.name}: {error}"))
            raise
