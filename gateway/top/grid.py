"""Elements of a frame: numbers in few characters, bars, sparklines, and tables of a fixed width.

All that a gateway answers is drawn as plain text. Names of models come from engines and reasons from sidecars; none of
them may move a cursor or change a terminal.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from gateway.shared.printable import printable

GAP = 2  # cells between columns


class Glyphs(msgspec.Struct, frozen=True):
    """What bars and sparklines are drawn with. `spark`: from nothing to the most."""

    spark: str
    both: str
    held: str
    used: str
    free: str
    budget: str
    more: str


BLOCKS = Glyphs(spark="▁▂▃▄▅▆▇█", both="█", held="▒", used="▄", free="·", budget="┃", more="…")
ASCII = Glyphs(spark="_.:-=+*#", both="#", held="=", used="_", free=".", budget="|", more="~")


class Column(msgspec.Struct, frozen=True):
    """`width` in cells; 0: all that the others leave, but no more than `most`. Shown from `since` cells of width on.
    `tail`: where a text does not fit, its end says more than its beginning."""

    title: str
    width: int = 0
    right: bool = True
    since: int = 0
    most: int = 60
    tail: bool = False


def clean(text: str) -> str:
    """Without any character that a terminal would obey."""
    return printable(text).replace("\n", "?")


def cell(text: str, style: str = "") -> Text:
    return Text(clean(text), style=style)


def table(columns: Sequence[Column], rows: Sequence[Sequence[Text | str]], width: int) -> Table:
    """A heading and a line for each row, all of them cut to `width` cells."""
    shown = [index for index, column in enumerate(columns) if width >= column.since]
    fixed = sum(columns[index].width + GAP for index in shown) - GAP
    drawn, widths = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold"), {}
    for index in shown:
        column = columns[index]
        widths[index] = cells = column.width or min(column.most, max(1, width - fixed))
        justify: JustifyMethod = "right" if column.right else "left"
        drawn.add_column(column.title, justify=justify, width=cells, no_wrap=True, overflow="ellipsis")
    for row in rows:
        drawn.add_row(
            *(_cut(row[index], widths[index]) if columns[index].tail else _text(row[index]) for index in shown)
        )
    return drawn


def _text(told: Text | str) -> Text:
    return told if isinstance(told, Text) else cell(told)


def _cut(told: Text | str, cells: int) -> Text:
    text = _text(told)
    return text if len(text) <= cells else Text.assemble("…", text[len(text) - cells + 1 :])


def count(number: float | None) -> str:
    """Five cells at most."""
    if number is None:
        return "-"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            scaled = number / (1e3 if unit == "k" else size)
            return f"{scaled:.0f}{unit}" if scaled >= 100 else f"{scaled:.1f}{unit}"
    return f"{number:.0f}"


def rate(number: float | None) -> str:
    """Per second, six cells at most; one decimal below a thousand."""
    if number is None:
        return "-"
    if 0.0 < number < 0.05:
        return "<0.1"
    return f"{number:.1f}" if number < 1000 else count(number)


def seconds(value: float | None) -> str:
    """Six cells at most."""
    if value is None:
        return "-"
    if value < 0.001:
        return "<1ms" if value > 0.0 else "0"
    if value < 0.9995:
        return f"{value * 1000:.0f}ms"
    if value < 99.95:
        return f"{value:.1f}s"
    return f"{value:.0f}s" if value < 600 else f"{value / 60:.0f}m" if value < 36_000 else f"{value / 3600:.0f}h"


def gib(number: float) -> str:
    """Bytes, in GiB."""
    return f"{number / (1 << 30):.1f}"


def spark(history: Sequence[float], width: int, glyphs: Glyphs) -> str:
    """The newest `width` values, as high as they are beside the highest of them; nothing is the lowest mark alone."""
    last = list(history)[-width:] if width > 0 else []
    most = max(last, default=0.0)
    top = len(glyphs.spark) - 1
    return "".join(glyphs.spark[0 if value <= 0.0 else max(1, round(value / most * top))] for value in last)


def bar(held: float, used: float, budget: float, width: int, glyphs: Glyphs) -> Text:
    """Shares of one whole: what is held and in use, held only, used only; a mark where the budget ends."""
    drawn = Text()
    for index in range(width):
        middle = (index + 0.5) / width
        if index == min(width - 1, int(budget * width)) and budget > 0.0:
            drawn.append(glyphs.budget, "bold")
        elif middle < min(held, used):
            drawn.append(glyphs.both, "green" if middle < budget else "red")
        elif middle < held:
            drawn.append(glyphs.held, "green" if middle < budget else "red")
        elif middle < used:
            drawn.append(glyphs.used, "yellow")
        else:
            drawn.append(glyphs.free, "dim")
    return drawn
