"""The table of figures: what a row says, how numbers are written in it, and how it comes to a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from loadtest.lab.figures.runs import Measured, Setting
from loadtest.report.stats import quantile
from loadtest.simulate.simulated_client import Try

WIDTH = 180  # of a table that nobody looks at in a terminal


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """`value` against `milestone` and `target` (in words); `met`: whether the milestone is reached, None: no bound."""

    name: str
    what: str
    value: str
    baseline: str = ""
    target: str = ""
    milestone: str = ""
    met: bool | None = None


def table_of(rows: Iterable[Row]) -> Table:
    """The rows, one entry each."""
    table = Table("row", "what", "value", "baseline", "milestone", "target", "")
    for row in rows:
        mark = "" if row.met is None else "[green]ok[/]" if row.met else "[yellow]below[/]"
        table.add_row(row.name, row.what, row.value, row.baseline, row.milestone, row.target, mark)
    return table


def details_of(setting: Setting) -> Table:
    """Every class of every run: how its tries ended, how long those that were answered waited."""
    table = Table("run", "class", "tries/s", "ended", "queue p50, p99", "ttft p50, p99")
    for what, outcome in setting.known.items():
        tries = measured(setting, outcome)
        for name in sorted({tried.class_name for tried in tries}):
            own = [tried for tried in tries if tried.class_name == name]
            ends = Counter(tried.outcome for tried in own).most_common()
            good = [tried for tried in own if tried.outcome == "ok"]
            table.add_row(
                what,
                name,
                f"{len(own) / setting.measured:.1f}",
                ", ".join(f"{end} {percent(count / len(own))}" for end, count in ends),
                _times([tried.queue for tried in good if tried.queue >= 0.0]),
                _times([tried.first_byte - tried.sent for tried in good]),
            )
    return table


def _times(values: list[float]) -> str:
    return f"{quantile(values, 0.5):.2f}, {quantile(values, 0.99):.2f} s" if values else ""


def percent(share: float) -> str:
    """Two decimals where they matter."""
    return f"{100 * share:.2f} %" if 0.9 < share < 1.0 or share < 0.1 else f"{100 * share:.1f} %"


def measured(setting: Setting, outcome: Measured) -> list[Try]:
    """The tries that ended in the measured part of a run."""
    return [tried for tried in outcome.result.tries if setting.warm <= tried.finished < setting.ends]


# -- a terminal -------------------------------------------------------------------------------------------------------


class Bars:
    """One progress bar per run."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, what: str, share: float) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=1.0)
        self._progress.update(self._tasks[what], completed=share)


def terminal() -> Console:
    """Where figures are printed; wide enough for the table where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


@contextmanager
def bars(console: Console) -> Iterator[Bars]:
    """Progress bars that are gone in the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield Bars(progress)


def report(console: Console, setting: Setting, rows: list[Row], summary: str, *, details: bool, gate: bool) -> int:
    """Print what was measured, and what runs left over. The exit status: 1 where something was, and with a `gate` where
    a milestone is missed."""
    console.print(table_of(rows))
    if details:
        console.print(details_of(setting))
    console.print(summary)
    for what, outcome in setting.known.items():
        for wrong in outcome.left_over:
            console.print(f"[red]{what}: {wrong}[/]")
    missed = sum(row.met is False for row in rows)
    if missed and not gate:
        console.print(f"{missed} of {len(rows)} are below their milestone here; --gate makes that exit status 1")
    left = any(outcome.left_over for outcome in setting.known.values())
    return 1 if left or (gate and missed) else 0
