"""Log for the operator: one line on standard error for each change, with time, level and event."""

from __future__ import annotations

import contextlib

from gateway.shared import lines
from gateway.shared.notice import OTHER, Notice


def say(line: str) -> None:
    """A line for the operator's log, on standard error; one that cannot be written is lost."""
    notice = line if isinstance(line, Notice) else Notice(line)
    with contextlib.suppress(OSError):
        lines.say(Notice(notice, "sidecar" if notice.event == OTHER else notice.event, notice.level))
