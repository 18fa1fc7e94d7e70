"""Decide port: the same questions over HTTP, for a proxy that forwards calls itself.

    POST /decide                     a call's own headers and body; its path in `x-original-uri`
    POST /decide/{id}/first-byte     the engine's answer has begun
    POST /decide/{id}/end            it has ended: status, failure, usage

An answer with `x-weir-hold` is a grant. Any other is for the client, whole; but 407 says that the proxy's own token is
wrong. It is shown as `Proxy-Authorization: Bearer TOKEN`, since `Authorization` is the client's.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Callable

from gateway.core.request.outcome import error_body
from gateway.relay.active_call import ActiveCall
from gateway.relay.decide.held_calls import HOLD, HeldCall, HeldCalls
from gateway.relay.decide.messages import MOST, BadReport, EndReport, end_report
from gateway.relay.heads import JSON
from gateway.relay.pipeline import Pipeline
from gateway.relay.wire.server import Request, Responder, answer

PATH = b"/decide"
REPORT = re.compile(rb"/decide/([A-Za-z0-9_-]{16,64})/(first-byte|end)")
URI = re.compile(rb"(/[!-~]*?)(?:\?[!-~]*)?")
CHOSEN = re.compile(rb"[A-Za-z0-9_-]{16,64}")
REPORT_WITHIN = 10.0  # seconds for the body of a report
TOKEN, ORIGINAL, CLIENT = b"proxy-authorization", b"x-original-uri", b"x-forwarded-for"


class DecidePort:
    """The handler of the decide port. `token` None: whoever can connect may ask, as by a unix socket. `most` calls may
    wait and run at once."""

    def __init__(self, pipeline: Pipeline, held: HeldCalls, token: str | None, most: Callable[[], int]) -> None:
        self._pipeline = pipeline
        self._held = held
        self._token = None if token is None else hashlib.sha256(token.encode()).digest()
        self._most = most
        self._chosen: dict[str, tuple[ActiveCall, Responder]] = {}  # calls of proxies that chose the hold's id

    def head(self, request: Request) -> bytes | None:
        """Refuse by the head alone, or make the request the client's own."""
        if not self._shown(request.fields.pop(TOKEN, b"")):
            message = "The decide port wants its token: Proxy-Authorization: Bearer TOKEN."
            challenge = b"proxy-authenticate: Bearer\r\n"
            return answer(407, JSON + challenge, error_body(message, "authentication_error", "invalid_token"))
        request.known = True
        report = REPORT.fullmatch(request.path)
        if report is None and request.path != PATH:
            return _wrong(404, "not_found", "There are POST /decide, /decide/{id}/first-byte and /decide/{id}/end.")
        if request.method != b"POST":
            return _wrong(405, "method_not_allowed", "This path takes POST.", b"allow: POST\r\n")
        if report is None:
            return self._client_head(request)
        if not self._taken(report[1].decode()):
            return _unknown()
        request.limit = MOST if report[2] == b"end" else 0
        return None

    def body_by(self, request: Request) -> float:
        if REPORT.fullmatch(request.path):
            return request.at + REPORT_WITHIN
        return self._pipeline.body_by(request)

    def call(self, request: Request, responder: Responder) -> None:
        # The path of a call is the client's own by now, and none of those that the pipeline knows is like a report's.
        report = REPORT.fullmatch(request.path)
        if report is None:
            self._ask(request, responder)
            return
        body = request.body
        request.release()
        id = report[1].decode()
        held = self._held.get(id)
        if held is not None and report[2] == b"first-byte":
            held.first_byte()
            status, told = 204, b""
        elif report[2] == b"first-byte":
            status, told = 404, _unknown_body()
        else:
            try:
                known = self._end(id, held, end_report(body))
                status, told = (204, b"") if known else (404, _unknown_body())
            except BadReport as bad:
                status, told = (
                    400,
                    error_body(f"The report cannot be read: {bad}", "invalid_request_error", "bad_report"),
                )
        responder.send(status, JSON if told else b"", told)

    def _ask(self, request: Request, responder: Responder) -> None:
        """A call. One whose hold's id was chosen can be withdrawn by it for as long as it waits."""
        id = request.fields.get(HOLD, b"").decode()
        if self._taken(id):  # since its head was read
            request.release()
            responder.send(409, JSON, _taken_body())
            return
        tasks = self._pipeline.tasks
        before = len(tasks)
        self._pipeline.call(request, responder)
        if id and len(tasks) > before:
            task, live = next(reversed(tasks.items()))
            self._chosen[id] = live, responder
            task.add_done_callback(lambda _: self._chosen.pop(id))

    def _taken(self, id: str) -> bool:
        return id in self._chosen or self._held.get(id) is not None

    def _end(self, id: str, held: HeldCall | None, report: EndReport) -> bool:
        """Whether there is such a call, that runs or, if its client has left, waits."""
        if held is not None:
            held.end(report)
            return True
        live, responder = self._chosen.get(id, (None, None))
        if live is None or responder is None or report.failure != "client_gone":
            return False
        live.leave("client_gone")
        responder.send(499, b"", b"")
        return True

    def _shown(self, given: bytes) -> bool:
        """Whether the token was shown. Digests are compared, so that time tells neither its content nor its length."""
        if self._token is None:
            return True
        scheme, _, token = given.partition(b" ")
        matches = hmac.compare_digest(hashlib.sha256(token).digest(), self._token)
        return matches and scheme.lower() == b"bearer"

    def _client_head(self, request: Request) -> bytes | None:
        """The head of a call, as if its client had sent it here."""
        if len(self._pipeline.tasks) >= self._most():
            message = "Too many calls wait and run through this decide port. Try again in 2 s."
            advice = b'retry-after: 2\r\nx-weir-reason: connections\r\nlink: </outcomes/connections>; rel="help"\r\n'
            return answer(503, JSON + advice, error_body(message, "server_error", "server_is_overloaded"))
        uri = URI.fullmatch(request.fields.pop(ORIGINAL, b""))
        if uri is None:
            return _wrong(
                400, "bad_call", "x-original-uri: the path that the client has asked for, as in its first line."
            )
        chosen = request.fields.get(HOLD)
        if chosen is not None:
            if not CHOSEN.fullmatch(chosen):
                return _wrong(400, "bad_call", "x-weir-hold: 16 to 64 letters, digits, - and _, or left out.")
            if self._taken(chosen.decode()):
                return answer(409, JSON, _taken_body())
        client = request.fields.pop(CLIENT, b"")
        if client:
            try:
                request.peer = str(ipaddress.ip_address(client.decode("latin-1")))
            except ValueError:
                return _wrong(400, "bad_call", "x-forwarded-for: one address, of the client as the proxy sees it.")
        request.headers = [(name, value) for name, value in request.headers if name not in (TOKEN, ORIGINAL, CLIENT)]
        request.path = uri[1]
        return self._pipeline.head(request)


def _wrong(status: int, code: str, message: str, headers: bytes = b"") -> bytes:
    """An error of the proxy's."""
    return answer(status, JSON + headers, error_body(message, "invalid_request_error", code))


def _taken_body() -> bytes:
    return error_body("x-weir-hold: another call has this id.", "invalid_request_error", "hold_taken")


def _unknown_body() -> bytes:
    message = "There is no such hold: it has ended already, its time was over, or it never was. Nothing has changed."
    return error_body(message, "invalid_request_error", "unknown_hold")


def _unknown() -> bytes:
    return answer(404, JSON, _unknown_body())
