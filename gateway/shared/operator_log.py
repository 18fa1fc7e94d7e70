"""Lines for the operator on standard error, in one format for the whole stream: JSON objects or text.

    {"ts":1795444348.447,"level":"warning","event":"engine_down","message":"engine left is down: connection refused"}
    2026-11-23 14:32:28.447Z warning engine_down: engine left is down: connection refused

Text is for a terminal, JSON for whatever collects the output of a container. Calls of the call log have the same first
fields. What a library or a traceback writes on standard error becomes such lines too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime

import msgspec

from gateway.shared.notice import Notice
from gateway.shared.printable import printable

RAW = "stderr"  # event of a line that a library or a traceback has written


class _Line(msgspec.Struct):
    level: str
    event: str
    message: str


_encode = msgspec.json.Encoder().encode


def stamp(at: float) -> str:
    """Time in UTC to the millisecond; `at`: seconds since 1970."""
    when = datetime.fromtimestamp(at, UTC)
    return f"{when:%Y-%m-%d %H:%M:%S}.{when.microsecond // 1000:03d}Z"


def framed(line: str, *, text: bool) -> bytes:
    """The line with time, level and event, and with its line feed. Each line of a longer text has its own in a text."""
    notice, at = line if isinstance(line, Notice) else Notice(line), time.time()
    line = printable(line)  # some of it is what engines say
    if not text:
        return b'{"ts":%.3f,%b\n' % (at, _encode(_Line(notice.level, notice.event, line))[1:])
    head = f"{stamp(at)} {notice.level} {notice.event}: "
    return "".join([f"{head}{each}\n" for each in line.split("\n")]).encode("utf-8", "backslashreplace")


def as_text(format: str | None) -> bool:
    """Whether lines are text: `format` is json, text, or None for text at a terminal."""
    return sys.stderr.isatty() if format is None else format == "text"


def plain(*, text: bool) -> Callable[[str], None]:
    """Says lines on standard error as it is, which may block."""

    def say(line: str) -> None:
        print(framed(line, text=text).decode(), end="", file=sys.stderr, flush=True)

    return say
