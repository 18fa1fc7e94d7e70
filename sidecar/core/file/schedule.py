"""Schedule of a profile: what is kept at which hours of the day, and when that changes next. Pure arithmetic.

Hours are of the wall clock; an entry holds from the instant at which the clock first shows its beginning to the one at
which it next shows its end. So an hour that comes twice, when summer time ends, counts the first time; one that is left
out, when it begins, is an hour later. `at` is Unix seconds; `offset` gives the seconds that the wall clock is ahead of
UTC at such a time, so that no table of time zones is needed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal

import msgspec

from gateway.shared.files.checked import Fault, Path
from gateway.shared.files.kinds import Text

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
Kept = Literal["", "off", "pinned", "preloaded"]  # empty: as the profile says
Between = Annotated[
    str, Text(r"(?:[01]\d|2[0-3]):[0-5]\d-(?:(?:[01]\d|2[0-3]):[0-5]\d|24:00)", "hours of the day such as 22:00-06:00")
]
Offset = Callable[[float], float]

DAY = 86_400
DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
THURSDAY = 3  # 1970-01-01
AHEAD = 8  # days to look ahead for the next change: a week and one


class Hours(msgspec.Struct, frozen=True, kw_only=True):
    """Entry of a schedule.

    `between`: Two times of the day, past midnight if the second is earlier.
    `days`: Days on which the hours begin; null: every day.
    `keep`: Off: calls are refused with the time at which the model is back. on: the model can be called, and is off at
    all hours that no entry names. pinned: never put to sleep or stopped to make room. preloaded: started when the hours
    begin, if there is room.
    """

    between: Between
    days: tuple[Day, ...] | None = None
    keep: Literal["off", "on", "pinned", "preloaded"]

    @property
    def seconds(self) -> tuple[int, int]:
        """Return begin and end in seconds of the first day; the end may be on the next."""
        begin, end = (int(text[:2]) * 3600 + int(text[3:]) * 60 for text in self.between.split("-"))
        return begin, end if end > begin else end + DAY


def hours_faults(schedule: Sequence[Hours], at: Path) -> Iterator[Fault]:
    """Mistakes of a schedule that no single field shows."""
    for index, hours in enumerate(schedule):
        first, _, second = hours.between.partition("-")
        if first == second:
            yield Fault((*at, index, "between"), hours.between, "two times that differ, 00:00-24:00 for all day")
        if hours.days == ():
            yield Fault((*at, index, "days"), "no day", "at least one of mon, tue, wed, thu, fri, sat, sun")


def kept(schedule: Sequence[Hours], at: float, offset: Offset) -> Kept:
    """Return what the schedule says for this time. If entries overlap, off wins, then pinned."""
    now = {hours.keep for hours in schedule if _holds(hours, at, offset)}
    if "off" in now or (not now and any(hours.keep == "on" for hours in schedule)):
        return "off"
    return "pinned" if "pinned" in now else "preloaded" if "preloaded" in now else ""


def changes_at(schedule: Sequence[Hours], at: float, offset: Offset) -> float | None:
    """Time at which something else is kept next; None: never, within a week."""
    today, was = _day(at, offset), kept(schedule, at, offset)
    edges = {
        instant(day * DAY + edge, offset)
        for hours in schedule
        for day in range(today - 1, today + AHEAD)
        for edge in hours.seconds
    }
    return next((edge for edge in sorted(edges) if edge > at and kept(schedule, edge, offset) != was), None)


def instant(local: float, offset: Offset) -> float:
    """The first time at which the wall clock shows `local`, in seconds since 1970 there, or is past it."""
    ahead = sorted((offset(local - DAY), offset(local + DAY)), reverse=True)
    earliest = local - ahead[0]
    return earliest if earliest + offset(earliest) >= local else local - ahead[1]


def _holds(hours: Hours, at: float, offset: Offset) -> bool:
    begin, end = hours.seconds
    today = _day(at, offset)
    return any(
        instant(day * DAY + begin, offset) <= at < instant(day * DAY + end, offset)
        for day in (today - 1, today)
        if hours.days is None or DAYS[(day + THURSDAY) % 7] in hours.days
    )


def _day(at: float, offset: Offset) -> int:
    return int((at + offset(at)) // DAY)
