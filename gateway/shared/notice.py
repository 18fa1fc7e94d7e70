"""Line for the operator with a level, and an event that programs can look for."""

from __future__ import annotations

from typing import Literal

Level = Literal["info", "warning", "error"]
OTHER = "notice"


class Notice(str):
    """A line for the operator. `event`: a name for lines of its kind. A line that is a plain string is a `notice`."""

    __slots__ = ("event", "level")

    event: str
    level: Level

    def __new__(cls, line: str, event: str = OTHER, level: Level = "info") -> Notice:
        notice = super().__new__(cls, line)
        notice.event, notice.level = event, level
        return notice
