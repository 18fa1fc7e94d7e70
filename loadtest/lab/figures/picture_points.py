"""Figures of the README's picture: what picture.json holds, means over seeds, and their table in docs/figures.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from loadtest.lab.figures.runs import Saturation

Side = Literal["weir", "direct", "round_robin"]
SIDES: tuple[Side, ...] = ("weir", "direct", "round_robin")
TITLES: dict[str, str] = {"weir": "Weir", "direct": "direct", "round_robin": "round robin"}
AGENTS = {
    "agents-tight": "small caches (32,000 tokens an engine)",
    "agents-ample": "ample caches (64,000 tokens)",
}
RULED = {"weir": "Weir", "cache_aware": "vllm-router", "llm_d": "llm-d", "lmetric": "LMetric", "lpwl": "LPWL",
         "least_requests": "least requests", "round_robin": "round robin"}  # fmt: skip
TABLED = (0.5, 1.0, 2.0, 5.0, 10.0)  # loads of the table


class ClassShare(msgspec.Struct, frozen=True):
    """Counts of one class in the measured part: calls due for the first time, tries in time, and first tries among
    these."""

    offered: int
    in_time: int
    first: int


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one run. `goodput`: tokens of tries in time, over the capacity; `first`: the same of first tries
    alone; `late`: share of the tries given to an engine that was not in time."""

    side: Side
    factor: float
    seed: int
    goodput: float
    first: float
    late: float
    classes: dict[str, ClassShare]


class AgentPoint(msgspec.Struct, frozen=True):
    """Coding agents behind Weir or a rival's rule, means over seeds: seconds to the first token on average and at p99,
    and the share of prompt tokens that engines had cached."""

    load: str
    rule: str
    mean: float
    p99: float
    hits: float


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """Content of picture.json. `capacity`: of all engines together, by seed; `agents`: none of another fleet."""

    engines: int
    capacity: dict[int, Saturation]
    agents: list[AgentPoint] = []
    points: list[Point]


Curve = list[tuple[float, float]]  # offered load and its figure


def mean(picture: Picture, side: str, figure: str) -> Curve:
    """Return the mean of a figure of `Point` at each load, over the seeds."""
    return _means(picture, side, lambda point: float(getattr(point, figure)))


def mean_share(picture: Picture, side: str, class_name: str) -> Curve:
    """Return the share of a class's calls that were in time, at each load, at most 1: some calls that end in the
    measured part began before it."""

    def share(point: Point) -> float:
        return point.classes[class_name].in_time / max(1, point.classes[class_name].offered)

    return [(at, min(1.0, value)) for at, value in _means(picture, side, share)]


def _means(picture: Picture, side: str, value: Callable[[Point], float]) -> Curve:
    found: dict[float, list[float]] = {}
    for point in picture.points:
        if point.side == side:
            found.setdefault(point.factor, []).append(value(point))
    return [(factor, sum(values) / len(values)) for factor, values in sorted(found.items())]


def table(picture: Picture) -> Iterator[str]:
    """The table of docs/figures.md, in Markdown."""
    known = {factor for factor in TABLED if any(point.factor == factor for point in picture.points)}
    yield "| | " + " | ".join(f"{factor:g}x" for factor in sorted(known)) + " |"
    yield "| --- |" + " --- |" * len(known)
    for side in SIDES:
        rows = {"goodput": mean(picture, side, "goodput")}
        if side == "weir":
            rows["goodput at the first try"] = mean(picture, side, "first")
        rows |= {f"{name} in time": mean_share(picture, side, name) for name in ("interactive", "default", "batch")}
        rows["admitted but late"] = mean(picture, side, "late")
        for name, curve in rows.items():
            cells = [f"{100.0 * value:.0f} %" for factor, value in curve if factor in known]
            yield f"| {TITLES[side]}: {name} | " + " | ".join(cells) + " |"
