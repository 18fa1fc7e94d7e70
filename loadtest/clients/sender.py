"""Way of calls over sockets, to the servers of one target.

Times are taken when a thing happens, not when it is heard of. The way in memory is `simulate/inprocess.py`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from loadtest.clients.answer import Answer
from loadtest.clients.calls import ClientCall, Try, WallClock
from loadtest.clients.retries import advice
from loadtest.clients.targets import Server, Servers
from loadtest.load.workload import Planned

_STREAM = b'"stream":true'


class Body:
    """Keeps an answer's body."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def head(self, status: int, fields: Mapping[bytes, bytes]) -> None:
        """Only the body matters."""

    def body(self, data: bytes) -> None:
        self._pieces.append(data)

    @property
    def all(self) -> bytes:
        """Part of the body that has arrived."""
        return b"".join(self._pieces)


class Sockets:
    """Transport over sockets. `headers`: lines of each request beside its own."""

    def __init__(self, servers: Servers, headers: bytes, clock: WallClock) -> None:
        self._servers = servers
        self._headers = headers
        self._clock = clock

    def send(self, call: Planned, client_call: ClientCall, tried: Try) -> Callable[[], None]:
        """Send a request. The function returned is the client's leaving."""
        stream = call.kind in ("chat", "completions") and _STREAM in call.body
        answer = Answer(expected="stream" if stream else "json")
        body = None if call.session is None else Body()
        server = self._servers.pick(call)
        exchange = server.send(_request(server, call, self._headers), answer, body)
        tried.sent = self._since(answer.sent)

        def over(_: asyncio.Future[None]) -> None:
            server.done(exchange)
            if tried.finished < 0.0:  # else its client has left
                tried.outcome, tried.advised = answer.outcome, advice(answer.fields)
                self._note(tried, answer)
                client_call.close(b"" if body is None else body.all, self._since(answer.finished))

        exchange.over.add_done_callback(over)
        tried.hear = lambda: self._note(tried, answer)
        return lambda: exchange.failed("")

    def _note(self, tried: Try, answer: Answer) -> None:
        """Note what has come of an answer, and why it ended as it did."""
        tried.first_byte = self._since(answer.first_byte)
        tried.first_token = self._since(answer.first_event)
        tried.status = answer.status
        tried.prompt_tokens = answer.prompt_tokens
        tried.completion_tokens = answer.completion_tokens
        tried.cached_tokens = answer.cached_tokens
        tried.gaps = tuple(answer.gaps)
        answer.timed_out = tried.outcome == "timed_out"
        tried.reason = tried.reason or answer.why

    def _since(self, time: float) -> float:
        """Seconds since the run's start; -1: the thing did not happen."""
        return time - self._clock.begin if time else -1.0


def _request(server: Server, planned: Planned, headers: bytes) -> bytes:
    """The bytes of a request. A header of its own goes before a target's."""
    lines = b"".join([b"%b: %b\r\n" % field for field in planned.fields.items()])
    if headers and b"authorization" in planned.fields:
        headers = b"".join(line for line in headers.splitlines(keepends=True) if not line.startswith(b"authorization:"))
    return server.address.request(b"POST", planned.path, lines + headers, planned.body)
