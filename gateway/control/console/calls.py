"""Ended calls as rows, for the console's list of calls."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from gateway.control.console.reading import ConsoleReading


class EndedCall(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One ended call. `ended`: seconds since 1970; times are seconds from the first byte of its request."""

    serial: int
    ended: float
    request_id: str
    tenant: str
    class_name: str
    model: str
    engine: str
    outcome: str
    status: int
    reason: str
    queue: float
    ttft: float
    total: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    held_tokens: int
    predicted_wait: float
    affinity_tokens: int
    shaped_tokens: int
    attempts: int
    stream: bool
    settled: bool
    route: str
    trace_id: str


def ended_rows(reading: ConsoleReading, after: int, most: int) -> tuple[int, list[EndedCall]]:
    """The serial of the first row, and up to `most` calls that ended after the one of serial `after`."""
    first, ended = reading.ended.after(after, most)
    rows = [
        EndedCall(
            serial,
            reading.unix(at) or 0.0,
            record.request_id,
            record.tenant,
            record.class_name,
            record.model,
            record.engine,
            record.outcome.value,
            record.status,
            record.reason,
            round(record.queue, 4),
            round(record.ttft, 4),
            round(record.total, 4),
            record.prompt_tokens,
            record.completion_tokens,
            record.cached_tokens,
            record.held_tokens,
            round(record.predicted_wait, 3),
            record.affinity_tokens,
            record.shaped_tokens,
            record.attempts,
            record.stream,
            record.settled,
            record.route,
            "" if record.trace_id is UNSET else record.trace_id,
        )
        for serial, (at, record) in enumerate(ended, first)
    ]
    return first, rows
