"""Endings of requests that were not served: refusals, calls that were left, and their records."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from itertools import count

from msgspec import UNSET

from gateway.core.admission import refusals
from gateway.core.answer.error_shape import error_event, refusal_body
from gateway.core.request.outcome import Outcome, Refused, refusal_headers
from gateway.core.request.record import Record
from gateway.core.request.routes import Route
from gateway.relay.heads import JSON
from gateway.relay.wire.server import Request, Responder


class Endings:
    """Ends of one port's requests. `observe` receives the record of each."""

    def __init__(self, observe: Callable[[Record], None], clock: Callable[[], float], rng: random.Random) -> None:
        self.observe = observe
        self._clock = clock
        self._rng = rng
        self._id_prefix = secrets.token_hex(6)
        self._ids = count(1)

    def request_id(self, request: Request) -> str:
        """The client's own id if it is sane (1..128 visible ASCII), else one made here."""
        given = request.fields.get(b"x-request-id")
        if given and len(given) <= 128 and given.isascii() and given.decode().isprintable() and b" " not in given:
            return given.decode()
        return f"{self._id_prefix}-{next(self._ids):x}"

    def refusal(self, refused: Refused, record: Record) -> bytes:
        """Note a refusal in the record. Return the head of its answer."""
        record.outcome = refused.outcome
        record.status = refused.status
        record.reason = record.reason or refused.detail
        lines = JSON + b"x-request-id: %b\r\n" % record.request_id.encode()
        if record.trace_id is not UNSET:
            lines += b"x-trace-id: %b\r\n" % record.trace_id.encode()
        return lines + refusal_headers(refused, self._rng)

    def refuse(self, refused: Refused, responder: Responder, record: Record, route: Route | None = None) -> None:
        """Send the refusal. `route`: of a call; if a stream has begun with progress comments, the refusal is an error
        event."""
        headers = self.refusal(refused, record)
        if responder.started and record.stream and route is not None:
            responder.write(error_event(route, refusal_body(record.route, refused)))
            responder.end(close=True)
        elif responder.started:
            responder.abort()
        else:
            responder.send(refused.status, headers, refusal_body(record.route, refused))

    def left(self, responder: Responder, record: Record, route: Route) -> None:
        """Answer a call whose task was cancelled: by the client's leaving or reading too slowly, by its deadline, or
        by the drain."""
        if record.reason == "drain":
            refused = refusals.cut_by_drain()
        elif record.reason == "deadline":
            refused = refusals.cut_by_deadline()
        else:
            record.outcome = Outcome.SLOW_CLIENT if record.reason == "slow_client" else Outcome.CLIENT_GONE
            record.status = 499
            return
        self.refuse(refused, responder, record, route)

    def finish(self, record: Record, began: float) -> None:
        """Record a request that ends now."""
        record.total = self._clock() - began
        self.observe(record)
