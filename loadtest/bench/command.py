"""Command `gateway bench`: measures targets under a load, and reports.

`options.py` has the flags and `help_text.py` their texts, `session.py` the sequence of runs, `run.py` one run.
"""

from __future__ import annotations

import argparse
import signal
import tempfile
from pathlib import Path

from rich.console import Console

from loadtest.bench.help_text import DESCRIPTION, EXAMPLES
from loadtest.bench.options import add_arguments, bench_of
from loadtest.bench.session import BenchSession
from loadtest.load.scenario import Mistake
from loadtest.processes import ChildError
from loadtest.report.capacity import RULE
from loadtest.report.delivery import INTERRUPTED, Say, deliver, saying, unhurried
from loadtest.report.progress import following
from loadtest.report.report import refusal, table

__all__ = ["DESCRIPTION", "EXAMPLES", "add_arguments", "command"]

MISTAKES = (Mistake,)


def command(given: argparse.Namespace) -> int:
    """Do what the flags say and print the report; the exit status. Raises Mistake."""
    bench = bench_of(given)
    if bench.out is not None and (said := refusal(bench.out, force=bench.force)):
        raise Mistake(said)
    for number in (signal.SIGTERM, signal.SIGHUP):  # are Ctrl-C between runs; within one they are the run's
        signal.signal(number, signal.default_int_handler)
    errors = Console(stderr=True)
    say = saying(errors)
    with _folder() as folder:
        with following(errors, say) as follow:
            session = BenchSession(bench, Path(folder), follow, say)
            try:
                session.run()
            except KeyboardInterrupt:
                session.stopped = True
            except ChildError as error:
                session.problem = str(error)
        with unhurried(say):
            return _report(session, say)


def _folder() -> tempfile.TemporaryDirectory[str]:
    """For what children write."""
    try:
        return tempfile.TemporaryDirectory(prefix="bench-")
    except OSError as error:
        raise Mistake(f"a folder for the output of processes, by TMPDIR: {error.strerror}") from error


def _report(session: BenchSession, say: Say) -> int:
    runs = session.runs()
    missed = session.missed(runs)

    def show(console: Console) -> None:
        if not runs:
            return
        console.print(table(runs, partial=session.over))
        for name, capacity in session.capacities.items():
            console.print(f"{name}: capacity {capacity}", markup=False, highlight=False)
        if session.capacities:
            console.print(f"the rule: {RULE}", markup=False, highlight=False)
        for line in (line for line in missed if ": invalid: " not in line):  # the table has said that
            console.print(line, markup=False, highlight=False, style="bold red")

    problems = deliver(runs, session.bench.out, partial=session.over, problems=[session.problem], show=show, say=say)
    if problems:
        return 2
    return INTERRUPTED if session.stopped else 1 if missed else 0
