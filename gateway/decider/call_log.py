"""Call log: one line per ended call, JSON or text.

The event loop pays for the encoding alone; `lines.py` writes in a thread.
"""

from __future__ import annotations

import time

import msgspec

from gateway.core.request.outcome import LEVELS
from gateway.core.request.record import Record
from gateway.decider.call_text import text_line
from gateway.shared.lines import LineWriter

MICRO = 1e6
WHOLE = 2.0**52  # adding and subtracting it rounds to a whole number, in a third of int()'s time
THOUSANDTHS = tuple(b"%03d" % number for number in range(1000))
HEADS = {outcome: b',"level":"%b","event":"call",' % level for outcome, level in LEVELS.items()}


class CallLog:
    """Writes records to `lines`. The JSON encoder escapes every string of a client. `text`: lines for people."""

    def __init__(self, lines: LineWriter, *, text: bool = False) -> None:
        self.lines = lines
        self._text = text
        self._encoder = msgspec.json.Encoder()
        # Wall-clock times derive from one reading, so that the hot path needs no second clock.
        self._epoch = time.time() - time.monotonic()
        self._second, self._stamp = 0, b""  # the last line's, and its text

    def write(self, record: Record, now: float) -> None:
        """Write a record. `now`: monotonic seconds at the end of the call. Times are rounded to microseconds: below
        that, differences of clocks are noise.
        """
        if self._text:
            self.lines.write(text_line(record, self._epoch + now))
            return
        record.queue = (record.queue * MICRO + WHOLE - WHOLE) / MICRO
        record.ttft = (record.ttft * MICRO + WHOLE - WHOLE) / MICRO
        record.total = (record.total * MICRO + WHOLE - WHOLE) / MICRO
        if record.predicted_wait:
            record.predicted_wait = (record.predicted_wait * MICRO + WHOLE - WHOLE) / MICRO
        line = self._encoder.encode(record)
        # A format of %.3f would cost as much as all the rest.
        second, thousandth = divmod(int((self._epoch + now) * 1000.0 + 0.5), 1000)
        if second != self._second:
            self._second, self._stamp = second, b'{"ts":%d.' % second
        self.lines.write(b"".join((self._stamp, THOUSANDTHS[thousandth], HEADS[record.outcome], line[1:], b"\n")))

    async def aclose(self) -> None:
        """Write the remaining lines, in bounded time."""
        await self.lines.adrain()
