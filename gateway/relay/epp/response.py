"""Response phase of a stream: pass an engine's answer on, read its usage, and report how the call ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.core.answer.json_usage import JSONUsage
from gateway.core.answer.sse_usage import SSEUsage, UsageError
from gateway.core.request.routes import Route
from gateway.relay.epp import messages
from gateway.relay.epp.lending import EndReport, Failure, LentCall
from gateway.relay.epp.request import BadHead

KINDS = ("response_headers", "response_body", "response_trailers")
# Envoy's own answers in place of an engine's, by the beginning of their details, first match; see the page
# "Response code details" of its documentation.
_FAILURES: tuple[tuple[str, Failure], ...] = (
    ("upstream_reset_before_response_started{connection_termination", "reset"),
    ("upstream_reset_before_response_started{remote_re", "reset"),  # remote_reset, remote_refused_stream_reset
    ("upstream_reset_before_response_started{protocol", "reset"),
    ("upstream_reset_before_response_started", "connect"),
    ("no_healthy_upstream", "connect"),
    ("upstream_response_timeout", "timeout"),
    ("upstream_per_try_timeout", "timeout"),
    ("response_timeout", "timeout"),
)


class ResponseReader:
    """Response of one lent call. `mode`: the proxy's for response bodies."""

    def __init__(self, lent: LentCall, mode: int, route: Route) -> None:
        self._lent = lent
        self._mode = mode
        self._route = route
        self._status: int | None = None
        self._failure: Failure | None = None
        self._usage: SSEUsage | JSONUsage | None = None
        self._json = False  # as the answer says: other text has no end to miss
        self._reported = False

    def takes(self, message: Any) -> Iterator[Any]:
        """Read one message. Yield the messages that answer it."""
        kind = messages.kind_of(message)
        if kind == "response_headers":
            yield self._head(message)
        elif kind == "response_body":
            yield from self._body(message.response_body)
        else:
            rest = b"" if self._usage is None else self._usage.finish()
            if rest and self._mode == messages.DUPLEX:
                yield from messages.pieces("response_body", rest, False)
            self._finish()
            yield messages.go_on(kind)

    @property
    def begun(self) -> bool:
        """Whether the response's head was read."""
        return self._status is not None

    def close(self) -> None:
        """Report the end of the call if the stream has ended before its response."""
        usage = self._usage
        delivered = isinstance(usage, SSEUsage) and usage.delivered(self._route.last_event)
        if delivered or (self._status is not None and self._mode == messages.NONE):
            self._finish()
        else:
            self._report(EndReport(self._status, "client_gone"))

    def _head(self, message: Any) -> Any:
        fields = messages.fields_of(message.response_headers)
        status = fields.get(b":status", b"")
        if len(status) != 3 or not status.isdigit():
            raise BadHead("response_headers: :status is missing, or no status")
        self._status = int(status)
        details = messages.details_of(message)
        self._failure = next((failure for begins, failure in _FAILURES if details.startswith(begins)), None)
        if self._status < 400 and b"content-encoding" not in fields:
            content_type = fields.get(b"content-type", b"")
            stream, self._json = content_type.startswith(b"text/event-stream"), b"json" in content_type
            self._usage = SSEUsage(hide=self._lent.hides_usage) if stream else JSONUsage()
        if self._mode == messages.NONE and self._status < 400:
            self._lent.first_byte()
        if message.response_headers.end_of_stream:
            self._finish()
        return messages.with_headers(self._lent.for_client)

    def _body(self, part: Any) -> Iterator[Any]:
        data, ended = part.body, part.end_of_stream
        if data and self._status is not None and self._status < 400:
            self._lent.first_byte()
        kept = self._read(data, ended)
        if ended:
            self._finish()
        if self._mode == messages.DUPLEX:
            if kept or ended:
                yield from messages.pieces("response_body", kept, ended)
            return
        answer = messages.go_on("response_body")
        if kept != data:
            messages.replace(answer, "response_body", kept)
        yield answer

    def _read(self, data: bytes, ended: bool) -> bytes:
        """Read bytes of the body. Return the bytes for the client."""
        usage = self._usage
        if usage is None:
            return data
        try:
            kept = usage.feed(data)
        except UsageError:  # an event without end: the client gets it as it is, and the estimate is charged
            self._usage = None
            return usage.finish()
        return kept + usage.finish() if ended else kept

    def _finish(self) -> None:
        """Report the end of a whole response."""
        if self._failure is not None:
            self._report(EndReport(None, self._failure))
            return
        usage = self._usage
        last = self._route.last_event
        cut = usage is not None and (
            self._json and usage.cut if isinstance(usage, JSONUsage) else not usage.ended(last)
        )
        if isinstance(usage, SSEUsage):
            usage.sum_up()
        self._report(EndReport(self._status, "truncated" if cut else None, usage or JSONUsage()))

    def _report(self, report: EndReport) -> None:
        if not self._reported:
            self._reported = True
            self._lent.end(report)
