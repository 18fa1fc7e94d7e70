"""Trace of one sampled call: what is noted on its way, and the spans that are made of that at its end.

    POST /v1/chat/completions          from the first byte of the request to the last of the answer
      weir.read                        until the request is whole
      weir.admit                       parsed, estimated, classified, charged
      weir.queue                       until an engine was granted
        weir.wake                      of it: until a sidecar had the model ready
      weir.attempt                     one send to one engine; the engine's own span `llm_request` is below this one
        weir.first_byte                until the first byte of the answer
        weir.stream                    until its last

Where a decider in another process grants the engine, its admission counts as queue. Times are monotonic seconds. An
engine is handed the attempt as its parent, so each attempt has an id before it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from gateway.core.request.outcome import Outcome
from gateway.core.request.record import Record
from gateway.core.request.trace_context import TraceParent, parent_line

Kind = Literal["server", "client", "internal"]
Value = str | int | float | bool


class Span(msgspec.Struct, frozen=True, gc=False):
    """Span from the time `start` to `end`. `parent_id`: empty for the root of a trace. `error`: the kind of failure
    (`error.type`), empty: none."""

    name: str
    span_id: str
    parent_id: str
    start: float
    end: float
    kind: Kind = "internal"
    attributes: dict[str, Value] = {}
    error: str = ""


class Attempt(msgspec.Struct, gc=False):
    """Attempt: one send to `engine`. `error`: the kind of its failure, at `ended`; empty: the engine answered, or the
    attempt was given up."""

    engine: str
    span_id: str
    began: float
    ended: float = 0.0
    error: str = ""


class CallTrace:
    """`draw` makes span ids. `state`: the caller's tracestate, passed on as it came.

    `whole`: when the request was; `parsed`, `judged`: when admission began and ended; `taken_at`: when the grant's hold
    began; `woken`: seconds that the call waited for its model. 0: it never came so far.
    """

    __slots__ = ("_draw", "attempts", "judged", "parent_id", "parsed", "span_id", "state", "taken_at", "trace_id",
                 "whole", "woken")  # fmt: skip

    def __init__(self, parent: TraceParent | None, trace_id: str, state: bytes, draw: Callable[[], str]) -> None:
        self.trace_id = trace_id if parent is None else parent.trace_id
        self.parent_id = "" if parent is None else parent.span_id
        self.state = state
        self._draw = draw
        self.span_id = draw()
        self.whole = self.parsed = self.judged = self.taken_at = self.woken = 0.0
        self.attempts: list[Attempt] = []

    def attempt(self, engine: str, now: float) -> bytes:
        """An attempt begins; the header line for the engine."""
        attempt = Attempt(engine, self._draw(), now)
        self.attempts.append(attempt)
        return parent_line(self.trace_id, attempt.span_id, sampled=True)

    def failed(self, engine: str, error: str, now: float) -> None:
        """The attempt on `engine` has failed."""
        for attempt in self.attempts:
            if attempt.engine == engine and not attempt.error:
                attempt.ended, attempt.error = now, error

    def spans(self, record: Record, began: float, labels: Mapping[str, str] = {}) -> list[Span]:
        """All spans of the call, which began at `began` and has ended; the root first. `labels`: engines' names by id,
        where these differ."""
        end = began + record.total
        error = record.outcome.value if record.status >= 500 else ""
        root = Span(
            f"{record.method} {record.route}",
            self.span_id,
            self.parent_id,
            began,
            end,
            "server",
            _facts(record, labels),
            error,
        )
        spans = [root]
        if not self.whole:
            return spans
        spans.append(self._child("weir.read", began, self.whole))
        granted = began + record.queue if record.engine else end
        judged = self.judged
        if 0.0 < self.taken_at < judged:  # the engine was granted with the judgement
            judged, granted = self.parsed, self.taken_at
        spans.append(self._child("weir.admit", self.whole, judged or end))
        if not judged:
            return spans
        queue = self._child("weir.queue", judged, granted)
        spans.append(queue)
        if self.woken:
            spans.append(self._child("weir.wake", granted - self.woken, granted, queue.span_id))
        first_byte = began + record.ttft if record.ttft else end
        for attempt in self.attempts:
            name = labels.get(attempt.engine, attempt.engine)
            spans += self._attempt(attempt, name, attempt.engine == record.engine, first_byte, end)
        return spans

    def _attempt(self, attempt: Attempt, name: str, answered: bool, first_byte: float, end: float) -> list[Span]:
        """Spans of one attempt: whole where it `answered`, else as far as anybody waited for it."""
        answered = answered and not attempt.error
        ended = end if answered else attempt.ended or first_byte
        engine: dict[str, Value] = {"weir.engine": name}
        spans = [
            Span("weir.attempt", attempt.span_id, self.span_id, attempt.began, ended, "client", engine, attempt.error)
        ]
        if answered:
            spans.append(self._child("weir.first_byte", attempt.began, first_byte, attempt.span_id))
            if first_byte < end:
                spans.append(self._child("weir.stream", first_byte, end, attempt.span_id))
        return spans

    def _child(self, name: str, start: float, end: float, parent_id: str = "") -> Span:
        return Span(name, self._draw(), parent_id or self.span_id, start, max(start, end))


def _facts(record: Record, labels: Mapping[str, str]) -> dict[str, Value]:
    """Attributes of the whole call: OpenTelemetry's names where it has them, vLLM's for the request's id, else ours.
    Nothing of what users wrote is among them."""
    facts: dict[str, Value] = {
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "gen_ai.request.id": record.request_id,
        "weir.outcome": record.outcome.value,
        "weir.attempts": record.attempts,
    }
    words = {
        "gen_ai.request.model": record.model,
        "weir.tenant": record.tenant,
        "weir.class": record.class_name,
        "weir.engine": labels.get(record.engine, record.engine),
        "weir.reason": record.reason[:256],
    }
    facts.update({name: word for name, word in words.items() if word})
    if record.settled:
        facts["gen_ai.usage.input_tokens"] = record.prompt_tokens
        facts["gen_ai.usage.output_tokens"] = record.completion_tokens
    if record.predicted_wait:
        facts["weir.predicted_wait"] = record.predicted_wait
    if record.outcome is not Outcome.OK and record.status >= 500:
        facts["error.type"] = record.outcome.value
    return facts
