"""Line charts as inline SVG: no library, no script, nothing fetched.

A chart is 380 x 240 units and is shown about that large, one to a row on a phone and more beside each other on a desk,
so that its letters stay readable on either. Colours are CSS variables of the page (`--s0` and so on), so it follows
light and dark; lines differ by dashes too. What a chart shows is also told in words, in its `<desc>`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import pairwise

import msgspec

from loadtest.report.number_format import count

WIDTH, HEIGHT = 380, 240
LEFT, RIGHT, TOP, BOTTOM = 62, 22, 10, 42
APART = 0.18  # of an axis, between two ticks at least: wider than "100 ms"
STYLES = 8  # colours; the ninth line has the first one's colour and other dashes
DASHES = ("", "6 3", "2 2", "8 3 2 3")


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    """From `low` to `high`, in the data's unit; `log` needs a positive `low`. `word`: how a tick is written; `whole`:
    there is no half of what it counts."""

    label: str
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    word: Callable[[float], str] = count
    whole: bool = False

    def place(self, value: float) -> float:
        """0 at `low`, 1 at `high`; what lies outside is drawn at the edge."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round values, few enough to be written beside each other."""
        found = _log_ticks(self) if self.log else _linear_ticks(self.low, self.high)
        return [tick for tick in found if tick == round(tick)] if self.whole else found


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """`style`: its colour and dashes. `marked`: every point is a dot, of half the height `whiskers` has for it."""

    name: str
    points: Sequence[tuple[float, float]]
    style: int = 0
    marked: bool = False
    whiskers: Sequence[float | None] = ()
    faint: bool = False  # a reference, not a measurement


class Frame(msgspec.Struct, frozen=True):
    """Frame of a chart's lines, in units of the SVG."""

    left: float = LEFT
    top: float = TOP
    right: float = WIDTH - RIGHT
    bottom: float = HEIGHT - BOTTOM

    def x(self, axis: Axis, value: float) -> float:
        return round(self.left + axis.place(value) * (self.right - self.left), 1)

    def y(self, axis: Axis, value: float) -> float:
        return round(self.bottom - axis.place(value) * (self.bottom - self.top), 1)


FRAME = Frame()


def axis_over(label: str, values: Iterable[float], *, log: bool = False, word: Callable[[float], str] = count) -> Axis:
    """An axis with room for all of `values`: from 0 (or, if `log`, from the smallest positive one) to the largest."""
    known = [value for value in values if math.isfinite(value) and (value > 0.0 or not log)]
    high = max(known, default=1.0)
    if log:
        low = min(known, default=0.1)
        return Axis(label=label, low=low, high=max(high, low * 2.0), log=True, word=word)
    return Axis(label=label, high=high * 1.04 if high > 0.0 else 1.0, word=word)


def chart(
    title: str, words: str, x: Axis, y: Axis, lines: Sequence[Line], shaded: Sequence[tuple[float, float]] = ()
) -> str:
    """Draw a chart with its caption and legend. `shaded`: stretches of x that do not count. `words`: text for readers
    who cannot see the chart, or prefer reading."""
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{escape(title)}</title><desc>{escape(words)}</desc>',
        *(_shade(x, begin, end) for begin, end in shaded),
        *grid(FRAME, x, y),
        *(part for line in lines for part in drawn(FRAME, x, y, line)),
        "</svg>",
    ]
    legend = "".join(f"<li>{_swatch(line)}{escape(line.name)}</li>" for line in lines)
    caption = f"<figcaption>{escape(title)}</figcaption>"
    return f'<figure class="card">{caption}{"".join(parts)}<ul class="legend">{legend}</ul></figure>'


def columns(frame: Frame, x: Axis, *, words: bool = True) -> Iterable[str]:
    """Ticks of x, with their words or without."""
    for tick in x.ticks():
        at = frame.x(x, tick)
        yield f'<path class="grid" d="M{at} {frame.top}V{frame.bottom}"/>'
        if words:
            yield f'<text x="{at}" y="{frame.bottom + 16}" text-anchor="middle">{escape(x.word(tick))}</text>'


def rows(frame: Frame, y: Axis, ticks: Iterable[float]) -> Iterable[str]:
    """Ticks of y, and the lines of both axes."""
    for tick in ticks:
        at = frame.y(y, tick)
        yield f'<path class="grid" d="M{frame.left} {at}H{frame.right}"/>'
        yield f'<text x="{frame.left - 6}" y="{at + 4}" text-anchor="end">{escape(y.word(tick))}</text>'
    yield f'<path class="axis" d="M{frame.left} {frame.top}V{frame.bottom}H{frame.right}"/>'


def label(frame: Frame, x: Axis) -> str:
    """Label of x."""
    place = f'x="{(frame.left + frame.right) / 2}" y="{frame.bottom + 36}"'
    return f'<text class="label" {place} text-anchor="middle">{escape(x.label)}</text>'


def grid(frame: Frame, x: Axis, y: Axis) -> Iterable[str]:
    """Axes with their ticks and labels."""
    yield from columns(frame, x)
    yield from rows(frame, y, y.ticks())
    yield label(frame, x)
    edge, middle = frame.left - 50, (frame.top + frame.bottom) / 2
    place = f'x="{edge}" y="{middle}" transform="rotate(-90 {edge} {middle})"'
    yield f'<text class="label" {place} text-anchor="middle">{escape(y.label)}</text>'


def _shade(x: Axis, begin: float, end: float) -> str:
    left, right = FRAME.x(x, begin), FRAME.x(x, end)
    return f'<rect class="cut" x="{left}" y="{TOP}" width="{right - left:.1f}" height="{HEIGHT - TOP - BOTTOM}"/>'


def drawn(frame: Frame, x: Axis, y: Axis, line: Line) -> Iterable[str]:
    """A line with its dots and whiskers."""
    places = [(frame.x(x, at), frame.y(y, value)) for at, value in line.points]
    if len(places) > 1:
        path = "L".join(f"{at} {value}" for at, value in places)
        yield f'<path class="line {_colour(line)}"{_dashes(line)} d="M{path}"/>'
    if line.marked or len(places) == 1:
        yield from (f'<circle class="dot {_colour(line)}" cx="{at}" cy="{value}" r="3"/>' for at, value in places)
    for (at, _), (_, value), half in zip(places, line.points, line.whiskers, strict=False):
        if half:
            ends = f"M{at} {frame.y(y, value - half)}V{frame.y(y, value + half)}"
            yield f'<path class="line {_colour(line)}" d="{ends}"/>'


def _swatch(line: Line) -> str:
    inner = f'<path class="line {_colour(line)}"{_dashes(line)} d="M0 6H26"/>'
    return f'<svg class="swatch" viewBox="0 0 26 12" aria-hidden="true">{inner}</svg>'


def _colour(line: Line) -> str:
    return "faint" if line.faint else f"s{line.style % STYLES}"


def _dashes(line: Line) -> str:
    dashes = "3 3" if line.faint else DASHES[(line.style + line.style // STYLES) % len(DASHES)]
    return f' stroke-dasharray="{dashes}"' if dashes else ""


def _linear_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / 5.0
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if size * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _log_ticks(axis: Axis) -> list[float]:
    """Powers of ten, with others between them as long as they have room, every other or fewer where they have not."""
    first, last = math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high))
    fine, plain = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0), (1.0, 2.0, 5.0)
    for factors, every in ((fine, 1), (plain, 1), ((1.0, 3.0), 1), ((1.0,), 1), ((1.0,), 2), ((1.0,), 3), ((1.0,), 5)):
        found = [factor * 10.0**power for power in range(first, last + 1) if power % every == 0 for factor in factors]
        found = [tick for tick in found if axis.low * 0.999 <= tick <= axis.high * 1.001]
        if all(axis.place(right) - axis.place(left) >= APART for left, right in pairwise(found)):
            return found
    return [axis.low, axis.high]
