"""Tracing of calls: which are sampled, and whose spans go to whoever sends them on.

Parent-based, as OpenTelemetry has it: a caller that records its part has ours recorded too, one that does not has not.
Calls without a trace are sampled by a share. Engines are told either way, so that they record neither more nor less.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from gateway.core.policy.snapshot import Current
from gateway.core.request.call_trace import CallTrace, Span
from gateway.core.request.record import Record
from gateway.core.request.trace_context import parent_line, trace_parent
from gateway.relay.wire.server import Request

Send = Callable[[str, list[Span]], None]  # takes a trace's id and the spans of one call


class Tracing:
    """`send` must return at once. `labels`: engines' names by id, where these differ."""

    def __init__(self, current: Current, send: Send, rng: random.Random, labels: Mapping[str, str]) -> None:
        self._current = current
        self._send = send
        self._rng = rng
        self._labels = labels

    def begin(self, request: Request, record: Record, now: float) -> CallTrace | None:
        """The trace of a call whose request is whole `now`; None: it is not sampled."""
        parent = trace_parent(request.fields)
        if not (self._rng.random() < self._current.policy.logging.traces if parent is None else parent.sampled):
            return None
        state = b"" if parent is None else request.fields.get(b"tracestate", b"")
        trace = CallTrace(parent, self._id(128), state, self._span_id)
        trace.whole = now
        record.trace_id, record.traced = trace.trace_id, True
        return trace

    def unsampled(self) -> bytes:
        """The header line of a call that is in no trace: its engine shall not begin one either."""
        return parent_line(self._id(128), self._span_id(), sampled=False)

    def end(self, trace: CallTrace, record: Record, began: float) -> None:
        """The call has ended, and its record is complete."""
        self._send(trace.trace_id, trace.spans(record, began, self._labels))

    def _id(self, bits: int) -> str:
        return f"{self._rng.getrandbits(bits) or 1:0{bits // 4}x}"

    def _span_id(self) -> str:
        return self._id(64)
