"""Sender of calls on sockets: each `SocketCall` over all its tries, as callbacks and timers without a coroutine.

The counterpart in virtual time is `simulate/simulated_client.py`. `retries.py` has the rules of both. Times are taken
when a thing happens, not when somebody hears of it.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

from loadtest.clients.answer import Answer
from loadtest.clients.client import Exchange
from loadtest.clients.retries import Clients, advice
from loadtest.clients.targets import Server, Servers
from loadtest.load.workload import Planned
from loadtest.report.records import NOT_SENT, RequestResult

_CONTENT = re.compile(rb'"content"\s*:\s*"((?:[^"\\]|\\.)*)"')
_STREAM = b'"stream":true'

Why = Literal["unfinished", "interrupted"]


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

    @property
    def words(self) -> bytes:
        """Text of a chat's answer, as it stands in JSON with its escapes, for the next turn."""
        return b"".join(_CONTENT.findall(self.all))


class Sender:
    """Sends calls and keeps what became of them. `begin`: the run's start on `time.monotonic`."""

    def __init__(
        self, servers: Servers, *, target: str, repeat: int, begin: float, clients: Clients, headers: bytes = b"",
        rng: random.Random, ended: Callable[[Planned, RequestResult, bytes], None],
    ) -> None:  # fmt: skip
        self.results: list[RequestResult] = []
        self.outcomes: Counter[str] = Counter()
        self.open: dict[SocketCall, None] = {}
        self.begin = begin
        self.clients = clients
        self.headers = headers
        self.rng = rng
        self.servers = servers
        self._target = target
        self._repeat = repeat
        self._ended = ended

    def send(self, planned: Planned) -> None:
        """Send a call now, whatever its time was."""
        call = SocketCall(self, planned)
        self.open[call] = None
        call.send()

    def stop(self, why: Why, reason: str) -> None:
        """Leave every open call."""
        for call in list(self.open):
            call.leave(why, reason)

    def missed(self, planned: Planned) -> None:
        """Count a call that was due and is not sent any more: the run is over."""
        missed_at = time.monotonic() - self.begin
        self._note(planned, NOT_SENT, "overdue when the run ended", finished=missed_at, tries=0)

    def over(self, call: SocketCall, outcome: str, reason: str) -> None:
        """A call has ended, after its last try."""
        del self.open[call]
        planned, answer, begin = call.planned, call.answer, self.begin

        def since(time: float) -> float:
            return time - begin if time else 0.0

        result = self._note(
            planned,
            outcome,
            reason,
            sent=since(call.sent),
            first_byte=since(answer.first_byte),
            first_token=since(answer.first_event),
            finished=since(answer.finished),
            status=answer.status,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            cached_tokens=answer.cached_tokens,
            tries=call.number,
            gaps=tuple(answer.gaps),
        )
        self._ended(planned, result, call.body.words if call.body is not None and outcome == "ok" else b"")

    def _note(self, planned: Planned, outcome: str, reason: str, **measured: Any) -> RequestResult:
        """Return the result of a call, kept and counted. `measured`: fields that its end tells."""
        asked = planned.asked
        result = RequestResult(
            index=asked.index,
            target=self._target,
            repeat=self._repeat,
            at=planned.at,
            kind=asked.kind,
            class_name=asked.class_name,
            tenant=asked.tenant,
            outcome=outcome,
            reason=reason,
            **measured,
        )
        self.results.append(result)
        self.outcomes[outcome] += 1
        return result


class SocketCall:
    """Call from its first try to its end."""

    __slots__ = ("_exchange", "_sender", "_server", "_timer", "answer", "body", "number", "planned", "sent")

    def __init__(self, sender: Sender, planned: Planned) -> None:
        self.planned = planned
        self.answer = Answer()
        self.number = 0
        self.sent = 0.0
        self.body: Body | None = None
        self._sender = sender
        self._exchange: Exchange | None = None
        self._server: Server | None = None
        self._timer: asyncio.TimerHandle | None = None

    def send(self) -> None:
        """The next try, now."""
        sender, planned = self._sender, self.planned
        self.number += 1
        stream = planned.asked.kind in ("chat", "completions") and _STREAM in planned.body
        answer = self.answer = Answer(expected="stream" if stream else "json")
        server = self._server = sender.servers.pick(planned)
        if planned.session is not None:
            self.body = Body()
        exchange = server.send(_request(server, planned, sender.headers), answer, self.body)
        self._exchange = exchange
        self.sent = self.sent or answer.sent
        exchange.over.add_done_callback(self._over)
        patience = sender.clients.patience_of(planned.class_name)
        self._timer = asyncio.get_running_loop().call_later(patience, self._give_up)

    def leave(self, outcome: Why, reason: str) -> None:
        """End it, whatever it is at."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.failed("")
        self._stop()
        self._sender.over(self, outcome, reason)

    def _give_up(self) -> None:
        self.answer.timed_out = True
        if self._exchange is not None:
            self._exchange.failed("")

    def _over(self, over: asyncio.Future[None]) -> None:
        exchange, answer, sender = self._exchange, self.answer, self._sender
        if exchange is None:  # we have left
            return
        self._exchange = None
        self._stop()
        if self._server is not None:
            self._server.done(exchange)
        outcome, advised = answer.outcome, advice(answer.fields)
        wait = sender.clients.wait_before_retry(self.number, outcome, answer.status, advised, sender.rng)
        if wait is not None:
            self._timer = asyncio.get_running_loop().call_later(wait, self.send)
            return
        sender.over(self, outcome, answer.why)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _request(server: Server, planned: Planned, headers: bytes) -> bytes:
    """The bytes of a request. A header of its own goes before a target's."""
    address = server.address
    lines = b"".join([b"%b: %b\r\n" % field for field in planned.fields.items()])
    if headers and b"authorization" in planned.fields:
        headers = b"".join(line for line in headers.splitlines(keepends=True) if not line.startswith(b"authorization:"))
    return b"POST %b%b HTTP/1.1\r\nhost: %b\r\nuser-agent: weir-bench\r\n%b%bcontent-length: %d\r\n\r\n%b" % (
        address.prefix, planned.path, address.name.encode("ascii", "replace"), lines, headers, len(planned.body),
        planned.body,
    )  # fmt: skip
