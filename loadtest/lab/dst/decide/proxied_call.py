"""Call of a client as its proxy sees it: asked for, forwarded, reported, or forgotten by a proxy that dies.

It goes by the times that its grant gives. It is the `Taker` of the engine's answer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from gateway.relay.decide.held_calls import GRACE, HOLD
from loadtest.lab.dst.case import Proxied
from loadtest.load.workload import Planned
from loadtest.simulate.simulated_client import ClientCall

if TYPE_CHECKING:
    from loadtest.lab.dst.decide.proxies import Proxies

Fields = dict[bytes, bytes]
Hear = Callable[[int, Fields, bytes], None]

CHOOSE = ("chosen", "doubled")  # proxies that give a hold its id
LATER = 2.0  # seconds after the end of a call, when a late proxy reports all of it again
SLACK = 0.01  # seconds: times are told in milliseconds
_TOLD = b"x-weir-set-"
_COUNTED = re.compile(rb'data: \{"choices":\[\],[^\n]*\n\n')
_USAGE = re.compile(rb'"usage":(\{[^{}]*(?:\{[^{}]*\})?[^{}]*\})')


class Question:
    """Connection of one request: the transport a Responder writes to, and its owner. `hear` gets the whole answer."""

    write_paused = False

    def __init__(self, hear: Hear) -> None:
        self._hear = hear
        self._written = bytearray()

    def write(self, data: bytes) -> None:
        self._written += data

    def keeps_alive(self, request: object) -> bool:
        return True

    def answered(self, close: bool) -> None:
        head, _, body = bytes(self._written).partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        fields = {name.lower(): value for name, _, value in [line.partition(b": ") for line in lines[1:]]}
        self._hear(int(lines[0][9:12]), fields, body)

    def abandoned(self) -> None:
        """Do nothing: no client hears of it."""


class ProxiedCall:
    """`way`: how its proxy behaves, as in case.py."""

    def __init__(self, site: Proxies, way: Proxied, request_id: bytes, call: Planned, client_call: ClientCall) -> None:
        self._site = site
        self._way = way
        self.request_id = request_id
        self._call = call
        self._client_call = client_call
        self._loop = asyncio.get_running_loop()
        self._id = b"hold-of-the-call-" + request_id if way in CHOOSE else b""
        self._unask: Callable[[], None] | None = None
        self._unsend: Callable[[], None] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._last = 0.0  # when the gateway no longer waits for its end
        self._hides = self._over = False
        self._status = 0  # of the engine's answer
        self._usage = b""

    def ask(self) -> None:
        fields = self._call.fields | {b"x-request-id": self.request_id, b"x-original-uri": self._call.path}
        if self._id:
            fields[HOLD] = self._id
        self._unask = self._site.post(b"/decide", fields, self._call.body, self._answered)
        if self._way == "doubled" and not self._over:  # else it was refused by its head
            self._site.post(b"/decide", fields, self._call.body, self._asked_again)

    def leave(self) -> None:
        """The client has left."""
        if self._over:
            return
        self._finish()
        if self._unask is not None and not self._id:  # it waits, and nothing but its connection stands for it
            self._unask()
            return
        self._close()
        self._report(b'{"status":%d,"failure":"client_gone"}' % self._status if self._status else _GONE)

    # -- the gateway's answers ----------------------------------------------------------------------------------

    def _asked_again(self, status: int, fields: Fields, body: bytes) -> None:
        if status != 409:
            self._site.wrong(f"a call that its proxy asks for twice is answered {status} the second time")

    def _answered(self, status: int, fields: Fields, body: bytes) -> None:
        """A refusal, which is for the client, or a grant."""
        self._unask = None
        id = fields.get(HOLD, b"")
        if self._over:  # it was withdrawn
            return
        if not id:
            self._finish()
            self._client_call.head(status, fields)
            self._client_call.body(body)
            self._client_call.over(True)
            return
        if (self._id and id != self._id) or not self._site.holds(id.decode()):
            self._site.wrong(f"the hold of call {self.request_id.decode()} has another id than it is told")
        self._id = id
        first, last = float(fields[b"x-weir-first-byte-within"]), float(fields[b"x-weir-end-within"])
        self._hides = b"x-weir-hide-usage" in fields
        if self._way == "lost":
            self._vanish(first)
            return
        self._timers = [self._loop.call_later(first, self._late), self._loop.call_later(last, self._overdue)]
        self._last = self._loop.time() + last
        sent = body if status == 200 else self._call.body
        if fields[_TOLD + b"x-request-id"] != self.request_id:
            self._site.wrong(f"call {self.request_id.decode()} is sent to the engine under another id")
        self._site.sending(self.request_id)
        try:
            unsend = self._site.memory(fields[b"x-weir-upstream"]).post(self._call.path, sent, self)
        except ConnectionRefusedError:
            self._fail("connect")
        else:
            if not self._over:  # else it was answered on the spot
                self._unsend = unsend

    # -- the engine's answer ------------------------------------------------------------------------------------

    def begin(self, status: int, content_type: bytes, data: bytes, length: int | None) -> None:
        self._status = status
        if status < 400:
            self._timers[0].cancel()
            if length is None:
                self._say(b"first-byte", b"")
        self._client_call.head(status, {})
        self.data(data)

    def data(self, data: bytes) -> None:
        found = _USAGE.findall(data)
        self._usage = found[-1] if found else self._usage
        self._client_call.body(_COUNTED.sub(b"", data) if self._hides else data)
        if self._way == "dies" and self._status < 400 and not self._usage and not self._over:
            self._loop.call_soon(self._die)  # as after any event of its stream

    def end(self) -> None:
        if self._over:
            return
        self._finish()
        usage = b',"usage":%b' % self._usage if self._usage and self._status < 400 else b""
        self._report(b'{"status":%d%b}' % (self._status, usage))
        self._client_call.over(True)

    def failed(self, kind: Literal["reset", "truncated"], message: str) -> None:
        self._fail(kind)

    # -- inside -------------------------------------------------------------------------------------------------

    def _late(self) -> None:
        """The engine has not begun in time."""
        self._close()
        self._site.failed(self.request_id, False)
        self._fail("timeout")

    def _overdue(self) -> None:
        """The call's deadline."""
        self._close()
        self._fail("truncated" if self._status else "timeout")

    def _fail(self, kind: str) -> None:
        if self._over:
            return
        self._finish()
        before = not self._status
        self._report(b'{"failure":"%b"}' % kind.encode() if before else _TRUNCATED % self._status)
        if before:
            self._client_call.head(502, {})
        self._client_call.over(before)

    def _die(self) -> None:
        if not self._over:
            self._close()
            self._vanish(self._last - self._loop.time())

    def _vanish(self, within: float) -> None:
        """Say nothing any more: the hold comes back by itself, as soon as its time is over."""
        self._finish()
        self._site.later(within + GRACE + SLACK, self._given_back)
        self._client_call.over(False)

    def _given_back(self) -> None:
        if self._site.holds(self._id.decode()):
            self._site.wrong("a proxy has vanished, its call's time is over, and its hold was not given back")

    def _close(self) -> None:
        unsend, self._unsend = self._unsend, None
        if unsend is not None:
            unsend()

    def _finish(self) -> None:
        self._over = True
        for timer in self._timers:
            timer.cancel()

    # -- reports ------------------------------------------------------------------------------------------------

    def _report(self, end: bytes) -> None:
        """The call's end."""
        self._say(b"end", end)
        if self._way == "late":
            self._site.later(LATER, lambda: self._say_late(end))

    def _say(self, what: bytes, body: bytes) -> None:
        self._post(what, body, (204,))
        if self._way == "doubled":
            self._post(what, body, (204, 404))

    def _say_late(self, end: bytes) -> None:
        self._post(b"first-byte", b"", (404,))
        self._post(b"end", end, (404,))

    def _post(self, what: bytes, body: bytes, statuses: tuple[int, ...]) -> None:
        def heard(status: int, fields: Fields, answer: bytes) -> None:
            if status not in statuses:
                name = f"the report {what.decode()} {body.decode()} of call {self.request_id.decode()}"
                self._site.wrong(f"{name} is answered {status}: {answer.decode()}")

        self._site.post(b"/decide/%b/%b" % (self._id, what), {}, body, heard)


_GONE = b'{"failure":"client_gone"}'
_TRUNCATED = b'{"status":%d,"failure":"truncated"}'
