"""Call log: one line per ended call, JSON or text.

The event loop pays for the encoding alone; `lines.py` writes in a thread.
"""

from __future__ import annotations

import math
import time

import msgspec
from msgspec import UNSET

from gateway.core.request.outcome import LEVELS, got
from gateway.core.request.record import Record
from gateway.shared.lines import LineWriter
from gateway.shared.operator_log import stamp
from gateway.shared.printable import printable

LOOK = 1.0  # seconds after which the clock may have been set, or the machine have slept
MICRO = 1e6
WHOLE = 2.0**52  # adding and subtracting it rounds to a whole number, in a third of int()'s time
THOUSANDTHS = tuple(b"%03d" % number for number in range(1000))
HEADS = {outcome: b',"level":"%b","event":"call",' % level for outcome, level in LEVELS.items()}


def text_line(record: Record, ended: float) -> bytes:
    """Line for people of a call that ended at `ended`, seconds since 1970; with its line feed. Programs read the JSON.

    2026-11-22 20:53:01.123Z info call: 200 (ok) interactive acme llama-3-8b on 10.0.0.11:8000: 1.930 s, queue 0.402,
    first 0.713, 812+240 tokens, id 4f1c (one line)

    Text of clients keeps to its line and moves no terminal.
    """
    who = (record.class_name, record.tenant, record.model)
    level = LEVELS[record.outcome].decode()
    words = [f"{stamp(ended)} {level} call: {got(record.outcome, record.status)}"]
    words += [word or "-" for word in who]
    if record.engine:
        words.append(f"on {record.engine}")
    facts = [f"{record.total:.3f} s"]
    if record.queue:
        facts.append(f"queue {record.queue:.3f}")
    if record.ttft:
        facts.append(f"first {record.ttft:.3f}")
    if record.predicted_wait:
        facts.append(f"predicted wait {record.predicted_wait:.3f}")
    if record.prompt_tokens or record.completion_tokens:
        facts.append(f"{'' if record.settled else 'about '}{record.prompt_tokens}+{record.completion_tokens} tokens")
    if record.shaped_tokens:
        facts.append(f"output cut by {record.shaped_tokens}")
    if record.prefill is not UNSET:
        note = record.prefill
        where = f"on {note.engine}" if note.is_there else "here"
        facts.append(f"prompt read {where} ({note.failure or note.reason}: {note.here:.3f} or {note.there:.3f})")
    if record.attempts > 1:
        facts.append(f"{record.attempts} attempts")
    if record.reason:
        facts.append(f"reason: {record.reason}")
    facts.append(f"{record.method} {record.route}, id {record.request_id}")
    if record.trace_id is not UNSET:
        facts.append(f"trace {record.trace_id}")
    if record.request is not UNSET:
        facts.append(f"request: {record.request}")
    line = printable(f"{' '.join(words)}: {', '.join(facts)}").replace("\n", "?")
    return f"{line}\n".encode()


class CallLog:
    """Writes records to `lines`. The JSON encoder escapes every string of a client. `text`: lines for people."""

    def __init__(self, lines: LineWriter, *, text: bool = False) -> None:
        self.lines = lines
        self._text = text
        self._encoder = msgspec.json.Encoder()
        # Wall-clock times derive from one reading a LOOK, so that the hot path needs no second clock.
        self._epoch = self._again = -math.inf
        self._second, self._stamp = 0, b""  # the last line's, and its text

    def write(self, record: Record, now: float) -> None:
        """Write a record. `now`: monotonic seconds at the end of the call. Times are rounded to microseconds: below
        that, differences of clocks are noise.
        """
        if now >= self._again:
            self._epoch, self._again = time.time() - time.monotonic(), now + LOOK
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
