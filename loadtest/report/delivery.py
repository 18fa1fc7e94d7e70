"""Delivery of a report at the end of a command: first to the disk, then to standard output.

A failure of the one, of a terminal or of a pipe, loses nothing of the other. Nor does a second Ctrl-C.
"""

from __future__ import annotations

import os
import platform
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from pathlib import Path
from typing import Protocol

from rich.console import Console

from loadtest.report.records import Run
from loadtest.report.report import WriteResult, write
from loadtest.signals import hastened

INTERRUPTED = 130  # exit status
WIDTH = 120  # columns where nobody looks on at a terminal
HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Say(Protocol):
    """Prints one line, as it is."""

    def __call__(self, line: str, style: str = "") -> None: ...


def saying(console: Console) -> Say:
    """Printer of one line, as it is. A disk that is full behind it, or nobody who reads it, ends no run."""

    def say(line: str, style: str = "") -> None:
        with suppress(OSError, SystemExit):  # the second is rich's for a broken pipe
            console.print(line, markup=False, highlight=False, soft_wrap=True, style=style)

    return say


def deliver(
    runs: Sequence[Run], out: Path | None, *, partial: bool, problems: Sequence[str], show: Callable[[Console], None],
    say: Say,
) -> list[str]:  # fmt: skip
    """Write the report into `out`, then print what `show` does, the names of the files, and on standard error
    `problems` and what went wrong meanwhile; all of these. `partial`: the runs were broken off."""
    written = write(runs, out, force=True, partial=partial) if out is not None and runs else WriteResult(())
    place = Console()
    width = place.width if place.is_terminal else WIDTH
    text = StringIO()
    shown = Console(file=text, width=width, force_terminal=place.is_terminal)  # in memory first
    show(shown)
    for file in written.files:
        shown.print(str(file), markup=False, highlight=False, soft_wrap=True)
    found = [problem for problem in (*problems, written.problem, _printed(text.getvalue())) if problem]
    for problem in found:
        say(f"gateway: {problem}")
    return found


def provenance() -> dict[str, object]:
    """Command line, versions and machine, for a reader who wants to repeat a run."""
    try:
        weir = version("weir-gateway")
    except PackageNotFoundError:
        weir = "unknown"
    return {
        "command": shlex.join(["gateway", *sys.argv[1:]]),
        "weir": weir,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores",
    }


def _printed(text: str) -> str:
    """Print it; what went wrong, in one line."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or it fails once more at our end
        if not isinstance(error, BrokenPipeError):  # `| head`: whoever read it has read enough
            return f"standard output: {error.strerror}"
    return ""


def unhurried(say: Say) -> AbstractContextManager[None]:
    """Around all that comes after the runs: the first signal is only answered, the next is KeyboardInterrupt."""
    return hastened(HELD, lambda: say("gateway: the report is being made; once more ends it without one"))
