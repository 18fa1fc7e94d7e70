"""Progress of runs: a bar each on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from loadtest.report.delivery import Say

PLAIN_EVERY = 5.0  # seconds

Tell = Callable[[float, Callable[[], str]], None]  # told the share of a run that is done, and how to say its state
Follow = Callable[[str], Tell]


@contextmanager
def following(console: Console, say: Say) -> Iterator[Follow]:
    """Yield what gives each run, by its title, the function to tell its progress to. It goes to standard error, so that
    standard output has the report."""
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda title: _lines(say, title)
        return
    columns = (TextColumn("[bold]{task.description}"), BarColumn(bar_width=16), TextColumn("{task.fields[said]}"))
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as progress:

        def follow(title: str) -> Tell:
            for old in [task.id for task in progress.tasks if task.finished]:
                progress.remove_task(old)
            bar = progress.add_task(title, total=1.0, said="")
            return lambda done, said: progress.update(bar, completed=done, said=said())

        yield follow


def _lines(say: Say, title: str) -> Tell:
    due = 0.0

    def tell(done: float, said: Callable[[], str]) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + PLAIN_EVERY
            say(f"{title}: {said()}")

    return tell
