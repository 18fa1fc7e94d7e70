"""Draws the README's picture: goodput on the left, every class on the right, coding agents below, as one SVG that needs
nothing else.

Colours are those of the report's page and follow the reader's choice of light or dark; on a phone, where the whole is
shown at less than half its size, letters are larger.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from itertools import pairwise

from loadtest.lab.figures.picture_points import (
    AGENTS,
    RULED,
    SIDES,
    TITLES,
    AgentPoint,
    Picture,
    mean,
    mean_share,
)
from loadtest.report.plots import Axis, Frame, Line, axis_over, columns, drawn, grid, label, rows

WIDTH, HEIGHT = 900, 450
ROW, BAR = 22, 12  # units of a rival's row and bar, below
BANDS = {"agents-tight": (140.0, 420.0), "agents-ample": (590.0, 870.0)}  # left and right
LEFT = Frame(74, 84, 405, 386)
STRIPS = (Frame(612, 84, 834, 160), Frame(612, 197, 834, 273), Frame(612, 310, 834, 386))
DRAWN = (1, 2, 0)  # of SIDES: the gateway last, on top
APART = 18  # units between the baselines of two labels
SLOS = {
    "interactive": " (5 %): first token within 2 s",
    "default": " (65 %): first token within 10 s",
    "batch": " (30 %): done within an hour",
}
STYLE = """
.back { fill: var(--card); stroke: var(--line); }
.title { font-size: 16px; font-weight: 600; fill: var(--text); } .strip { fill: var(--text); }
.name { font-size: 13.5px; font-weight: 600; }
.n0 { fill: var(--s0); } .n1 { fill: var(--s1); } .n2 { fill: var(--s2); }
/* Two that are alike take turns to be seen. */
.line.s1 { stroke-dasharray: none; } .line.s2 { stroke-dasharray: 8 8; }
.line.s0 { stroke-width: 3; } .first .line { stroke-width: 1.25; }
.bar { fill: var(--s7); opacity: .55; } .bar.n0 { fill: var(--s0); opacity: 1; } .most { stroke: var(--text); }
.capacity { text-anchor: end; }
@media (max-width: 560px) {
  svg text, svg .name { font-size: 20px; } svg .title { font-size: 24px; } .wide, text[transform] { display: none; }
  text[text-anchor=middle] { transform: translateY(5px); }
  .line { stroke-width: 4; } .line.s0 { stroke-width: 6; } .first .line { stroke-width: 2.5; }
}
"""


def draw(picture: Picture) -> str:
    """The file."""
    factors = sorted({point.factor for point in picture.points})
    x = Axis(label="offered load, times capacity", low=factors[0], high=factors[-1], log=True, word=_times)
    words = ". ".join([*(_words(picture, side) for side in SIDES), *map(_said, picture.agents)])
    height = HEIGHT + (110 + ROW * len(RULED) if picture.agents else 0)
    style = resources.files("loadtest.report").joinpath("plots.css").read_text().partition("*/\n")[2]
    title = "Goodput and calls in time against offered load: direct, round robin and Weir"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        ' role="img">',
        f"<title>{escape(title)}</title><desc>{escape(words)}</desc>",
        f"<style>\n{style}{STYLE}</style>",
        f'<rect class="back" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        *_goodput(picture, x),
        *_classes(picture, x),
        *_agents(picture),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _goodput(picture: Picture, x: Axis) -> Iterable[str]:
    y = Axis(label="share of capacity", high=1.1, word=_percent)
    yield '<text class="title" x="24" y="34">Goodput</text>'
    yield '<text class="wide" x="24" y="55">tokens a second of answers in time</text>'
    yield from grid(LEFT, x, y)
    most = [(factor, min(1.0, factor)) for factor, _ in mean(picture, "weir", "goodput")]
    yield from drawn(LEFT, x, y, Line(name="capacity", points=most, faint=True))
    yield f'<text class="capacity wide" x="{LEFT.right}" y="{LEFT.y(y, 1.0) - 6}">capacity</text>'
    curves = [mean(picture, side, "goodput") for side in SIDES]
    for style in DRAWN:
        yield from drawn(LEFT, x, y, Line(name=SIDES[style], points=curves[style], style=style))
    curves.append(mean(picture, "weir", "first"))
    yield '<g class="first">'
    yield from drawn(LEFT, x, y, Line(name="Weir, at the first try", points=curves[-1]))
    yield "</g>"
    names = [*(TITLES[side] for side in SIDES), "Weir, 1st try"]
    for style, (name, at) in enumerate(
        zip(names, _spread([LEFT.y(y, points[-1][1]) for points in curves]), strict=True)
    ):
        yield f'<text class="name n{style % 3}" x="{LEFT.right + 8}" y="{at + 4}">{name}</text>'


def _classes(picture: Picture, x: Axis) -> Iterable[str]:
    yield f'<text class="title" x="{STRIPS[0].left - 46}" y="34">Calls in time, by class</text>'
    y = Axis(label="", high=1.0, word=_percent)
    for number, (class_name, frame) in enumerate(zip(SLOS, STRIPS, strict=True)):
        last = number == len(STRIPS) - 1
        words = f'{class_name}<tspan class="wide">{SLOS[class_name]}</tspan>'
        yield f'<text class="strip" x="{frame.left}" y="{frame.top - 9}">{words}</text>'
        yield from columns(frame, x, words=last)
        yield from rows(frame, y, (0.0, 0.5, 1.0))
        if last:
            yield label(frame, x)
        for style in DRAWN:
            points = mean_share(picture, SIDES[style], class_name)
            yield from drawn(frame, x, y, Line(name=SIDES[style], points=points, style=style))
        at = frame.y(y, points[-1][1])
        yield f'<text class="name n0" x="{frame.right + 8}" y="{at + 4}">{TITLES[SIDES[style]]}</text>'


def _agents(picture: Picture) -> Iterable[str]:
    """Yield a bar of each rival for each cache size: the mean time to the first token, and a line from there to the
    p99."""
    if not picture.agents:
        return
    title = "Coding agents at ordinary load, beside the routing rules of others: time to the first token"
    yield f'<text class="title" x="24" y="{HEIGHT + 24}">{title}</text>'
    for load, (left, right) in BANDS.items():
        points = [point for point in picture.agents if point.load == load]
        frame = Frame(left, HEIGHT + 62, right, HEIGHT + 62 + ROW * len(points))
        x = axis_over("mean, and a line to the p99", [point.p99 for point in points], word=lambda value: f"{value:g} s")
        yield f'<text class="strip" x="{left}" y="{frame.top - 10}">{AGENTS[load]}</text>'
        yield from columns(frame, x)
        yield label(frame, x)
        for number, point in enumerate(points):
            yield from _bar(frame, x, point, frame.top + ROW * (number + 0.5))


def _bar(frame: Frame, x: Axis, point: AgentPoint, middle: float) -> Iterable[str]:
    own, left = " n0" if point.rule == "weir" else "", frame.left
    mean, most = frame.x(x, point.mean), frame.x(x, point.p99)
    yield f'<text class="name{own}" x="{left - 8}" y="{middle + 4}" text-anchor="end">{RULED[point.rule]}</text>'
    place = f'x="{left}" y="{middle - BAR / 2}" width="{mean - left:.1f}" height="{BAR}"'
    yield f'<rect class="bar{own}" {place}/>'
    yield f'<path class="most" d="M{mean} {middle}H{most}M{most} {middle - 4}v8"/>'


def _spread(places: Sequence[float]) -> list[float]:
    """Return places of labels that do not overlap: the lowest beside its line, the others beside theirs or just above
    the label below."""
    found = list(places)
    order = sorted(range(len(places)), key=lambda number: places[number], reverse=True)
    for below, above in pairwise(order):
        found[above] = min(found[above], found[below] - APART)
    return found


def _words(picture: Picture, side: str) -> str:
    said = ", ".join(f"{_percent(value)} at {_times(at)}" for at, value in mean(picture, side, "goodput"))
    return f"{TITLES[side]}: goodput {said}"


def _said(point: AgentPoint) -> str:
    return f"{RULED[point.rule]}, {AGENTS[point.load]}: first token after {point.mean:.2f} s, p99 {point.p99:.2f} s"


def _times(value: float) -> str:
    return f"{value:g}x"


def _percent(value: float) -> str:
    return f"{100.0 * value:.0f} %"
