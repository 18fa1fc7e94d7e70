"""Service level objectives as people write them: `interactive.ttft.p99<2s, goodput>=0.95`.

One language for scenario files and command lines. `report/records.py` defines what an SLO means, where it is counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Literal

import msgspec

from gateway.shared.files.units import SECONDS, SHARE
from loadtest.report.records import Slo

Metric = Literal["ttft", "tpot", "e2e"]

_NAME = r"[a-z][a-z0-9_-]{0,31}"
_LATENCY = re.compile(rf"(?:({_NAME})\.)?(ttft|tpot|e2e)\.p([0-9]{{1,2}}(?:\.[0-9]{{1,3}})?)\s*<=?\s*(\S+)")
_GOODPUT = re.compile(rf"(?:({_NAME})\.)?goodput\s*>=?\s*(\S+)")


class Objective(msgspec.Struct, frozen=True):
    """Condition on a class's requests; `class_name` "": on every class that has none of its own. `metric`: a latency
    from the intended time that must be at most `bound` seconds for `share` of the offered requests; or "goodput", which
    has no `bound`: the share of the offered requests that must keep the other bounds of their class."""

    pattern: ClassVar[str] = (
        rf"(?:{_NAME}[.])?(?:(?:ttft|tpot|e2e)[.]p[0-9]{{1,2}}(?:[.][0-9]{{1,3}})?\s*<=?\s*[0-9.]+(?:ms|s|m|h|d)"
        r"|goodput\s*>=?\s*[0-9.]+%?)"
    )
    what: ClassVar[str] = "an objective such as interactive.ttft.p99<2s (or tpot, e2e) or goodput>=95%"

    class_name: str
    metric: Literal["ttft", "tpot", "e2e", "goodput"]
    share: float
    bound: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Objective | None:
        """The objective; None where the text is none."""
        if match := _LATENCY.fullmatch(text.strip()):
            bound, share = SECONDS.parse(match[4]), SHARE.parse(f"{match[3]}%")
            if bound and share:
                return cls(match[1] or "", match[2], share, bound)  # type: ignore[arg-type] # one of the pattern's words
        elif match := _GOODPUT.fullmatch(text.strip()):
            share = SHARE.parse(match[2])
            if share and share <= 1.0:
                return cls(match[1] or "", "goodput", share)
        return None

    def __str__(self) -> str:
        scope = f"{self.class_name}." if self.class_name else ""
        if self.metric == "goodput":
            return f"{scope}goodput>={SHARE.show(self.share)}"
        return f"{scope}{self.metric}.p{SHARE.show(self.share).removesuffix('%')}<{SECONDS.show(self.bound)}"


def parse_slo(text: str) -> tuple[Objective, ...]:
    """The objectives of a command line, separated by commas. Raises ValueError, which says what was expected."""
    read: list[Objective] = []
    for part in text.split(","):
        objective = Objective.parse(part)
        if objective is None:
            raise ValueError(f"{part.strip()!r} is not {Objective.what}")
        read.append(objective)
    for index, expected in conflicts(read):
        raise ValueError(f"{read[index]}: expected {expected}")
    return tuple(read)


def conflicts(objectives: Sequence[Objective]) -> Iterator[tuple[int, str]]:
    """Yield each objective (its index) whose share differs from the first of its class, with the share that it should
    have. A class has one share, because a request is good only if it meets all the bounds of its class at once."""
    first: dict[str, Objective] = {}
    for index, objective in enumerate(objectives):
        earlier = first.setdefault(objective.class_name, objective)
        if objective.share != earlier.share:
            yield index, f"one share of all that is asked of a class: {SHARE.show(earlier.share)}, as in {earlier}"


def slos_of(objectives: Iterable[Objective]) -> tuple[Slo, ...]:
    """Combine objectives into SLOs by class. A request is good if it meets all bounds of its class or of all classes,
    the strictest of each latency. The SLO's share is the part of the offered requests that must be good."""
    given = tuple(objectives)
    return tuple(_slo(name, given) for name in dict.fromkeys(objective.class_name for objective in given))


def _slo(name: str, given: tuple[Objective, ...]) -> Slo:
    def strictest(metric: Metric) -> float | None:
        bounds = [each.bound for each in given if each.metric == metric and each.class_name in ("", name)]
        return min(bounds, default=None)

    attainment = max(each.share for each in given if each.class_name == name)
    return Slo(
        class_name=name, ttft=strictest("ttft"), tpot=strictest("tpot"), e2e=strictest("e2e"), attainment=attainment
    )
