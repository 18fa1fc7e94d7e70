"""One JSON line per ended call. Encoding is all it costs the event loop; see lines.py for how it is written."""

from __future__ import annotations

import time

import msgspec

from gateway.core.request.record import Record
from gateway.shared.lines import LineWriter

MICRO = 1e6
WHOLE = 2.0**52  # added and taken away again, it leaves a whole number: a third of what int() costs


class CallLog:
    """Writes to `lines`. Every client-supplied string is escaped by the JSON encoder."""

    def __init__(self, lines: LineWriter) -> None:
        self.lines = lines
        self._encoder = msgspec.json.Encoder()
        # Wall-clock time of a record is derived from one reading, so that the hot path needs no second clock.
        self._epoch = time.time() - time.monotonic()

    def write(self, record: Record, now: float) -> None:
        """Take a record; `now` is monotonic seconds, the moment the call ended. Its times are rounded to microseconds:
        what is left of a difference of clocks below that is noise."""
        record.queue = (record.queue * MICRO + WHOLE - WHOLE) / MICRO
        record.ttft = (record.ttft * MICRO + WHOLE - WHOLE) / MICRO
        record.total = (record.total * MICRO + WHOLE - WHOLE) / MICRO
        if record.predicted_wait:
            record.predicted_wait = (record.predicted_wait * MICRO + WHOLE - WHOLE) / MICRO
        line = self._encoder.encode(record)
        self.lines.write(b'{"ts":%.3f,%b\n' % (self._epoch + now, line[1:]))

    async def aclose(self) -> None:
        """Write what is left, in bounded time."""
        await self.lines.adrain()
