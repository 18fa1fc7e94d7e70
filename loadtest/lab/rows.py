"""Rows of measured figures beside their bounds: their table, the exit status."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.table import Table

from loadtest.report.progress import Tell, following

WIDTH = 180  # of a table that nobody looks at in a terminal

OnProgress = Callable[[str, float], None]  # told a run's name and the share of it that is done


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """`value` against `milestone` (in words); `met`: whether that is reached, None: no bound."""

    name: str
    what: str
    value: str
    baseline: str = ""
    milestone: str = ""
    met: bool | None = None


def parser_of(command: str, text: str) -> argparse.ArgumentParser:
    """Parser of `python -m loadtest.lab.COMMAND`, whose help begins with `text` as it stands."""
    prog = f"python -m loadtest.lab.{command}"
    return argparse.ArgumentParser(prog, description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def table_of(rows: Iterable[Row]) -> Table:
    """The rows, one entry each."""
    table = Table("row", "what", "value", "baseline", "milestone", "")
    for row in rows:
        mark = "" if row.met is None else "[green]ok[/]" if row.met else "[yellow]below[/]"
        table.add_row(row.name, row.what, row.value, row.baseline, row.milestone, mark)
    return table


def percent(share: float) -> str:
    """Two decimals where they matter."""
    return f"{100 * share:.2f} %" if 0.9 < share < 1.0 or share < 0.1 else f"{100 * share:.1f} %"


def collect_seldom() -> None:
    """Scan for garbage seldom, as the gateway does: what lives as long as the process is not worth it."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


# -- a terminal -------------------------------------------------------------------------------------------------------


def terminal() -> Console:
    """Console where figures are printed; wide enough for the table where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


@contextmanager
def bars(console: Console) -> Iterator[OnProgress]:
    """Progress bars that are gone in the end; none where nobody looks on."""
    with following(console, lambda line, style="": None) as follow:
        runs: dict[str, Tell] = {}

        def tell(what: str, share: float) -> None:
            if what not in runs:
                runs[what] = follow(what)
            runs[what](share, lambda: "")

        yield tell


def report(
    console: Console, rows: Sequence[Row], summary: str, *, wrong: Sequence[str] = (), gate: bool = False
) -> int:
    """Print what was measured, and what went `wrong` meanwhile. The exit status: 1 where something did, and with a
    `gate` where a milestone is missed."""
    console.print(table_of(rows))
    console.print(summary)
    for each in wrong:
        console.print(f"[red]{each}[/]")
    missed = sum(row.met is False for row in rows)
    if missed and not gate:
        console.print(f"{missed} of {len(rows)} are below their milestone here")
    return 1 if wrong or (gate and missed) else 0
