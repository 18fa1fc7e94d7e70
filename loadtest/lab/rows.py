"""Rows of measured figures beside their bounds, and their table."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import msgspec
from rich.table import Table


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
