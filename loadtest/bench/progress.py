"""Progress of a bench while it runs: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from loadtest.clients.driver import LoadProgress
from loadtest.report.delivery import Say
from loadtest.report.number_format import seconds

PLAIN_EVERY = 5.0  # seconds
SHOWN = 4  # outcomes

Follow = Callable[[str], Callable[[LoadProgress], None]]


@contextmanager
def following(console: Console, say: Say) -> Iterator[Follow]:
    """For each run's title, who is to hear how far it is. On standard error, so that standard output has the report."""
    if console.is_terminal and not console.is_dumb_terminal:
        with _bars(console) as follow:
            yield follow
    else:
        yield lambda title: _lines(say, title)


@contextmanager
def _bars(console: Console) -> Iterator[Follow]:
    columns = (TextColumn("[bold]{task.description}"), BarColumn(bar_width=16), TextColumn("{task.fields[said]}"))
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as progress:

        def follow(title: str) -> Callable[[LoadProgress], None]:
            for old in [task.id for task in progress.tasks if task.finished]:
                progress.remove_task(old)
            bar = progress.add_task(title, total=1.0, said="")
            rate = _rate()

            def tell(state: LoadProgress) -> None:
                done = max(0.0, min(1.0, state.at / state.seconds))  # of a trace without a duration: 0
                progress.update(bar, completed=done, said=said(state, rate(state)))

            return tell

        yield follow


def _lines(say: Say, title: str) -> Callable[[LoadProgress], None]:
    rate = _rate()
    due = 0.0

    def tell(state: LoadProgress) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + PLAIN_EVERY
            say(f"{title}: {said(state, rate(state))}")

    return tell


def _rate() -> Callable[[LoadProgress], float]:
    """Requests a second since it was asked last."""
    at, sent = 0.0, 0

    def rate(state: LoadProgress) -> float:
        nonlocal at, sent
        passed, more = state.at - at, state.sent - sent
        at, sent = state.at, state.sent
        return more / passed if passed > 0.0 else 0.0

    return rate


def said(state: LoadProgress, rate: float) -> str:
    """A run's state in one line."""
    most = sorted(state.outcomes.items(), key=lambda item: (-item[1], item[0]))
    ended = ", ".join(f"{count} {outcome}" for outcome, count in most[:SHOWN]) or "none has ended"
    left = state.seconds - state.at
    until = "" if not math.isfinite(left) else f"{max(0.0, left):.0f} s left" if left > 0.0 else "waiting for the last"
    late = f"late by {seconds(state.late)}" if state.late > 0.005 else ""
    return "  ".join(filter(None, [f"{rate:.1f}/s", f"{state.open} in flight", ended, until, late]))
