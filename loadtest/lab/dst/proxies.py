"""Proxies of a simulation: they have the gateway decide, and forward calls to its engines by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from gateway.core.answer.json_usage import JSONUsage
from gateway.core.answer.sse_usage import SSEUsage
from gateway.core.engines.origin import engine_id
from gateway.relay.epp.lending import GRACE, EndReport, Failure, LentCall
from gateway.relay.epp.stream import Answer, KeptReply
from gateway.relay.wire.messages import Request, WireError, refusal
from gateway.serve.epp_port import LentCalls
from loadtest.clients.calls import ClientCall, Try
from loadtest.lab.dst.case import Proxied
from loadtest.load.workload import Planned
from loadtest.simulate.inprocess import GatewayTarget, Watcher
from loadtest.simulate.memory_engine import MemoryEngine
from loadtest.simulate.posting import full, posted

if TYPE_CHECKING:
    from loadtest.lab.dst.world import World

SLACK = 0.01  # seconds


class Proxies:
    """Proxies that ask one gateway, over engines by their ids. `open` counts the calls that a proxy has left."""

    def __init__(
        self, target: GatewayTarget, memories: Mapping[str, MemoryEngine], watcher: Watcher, world: World
    ) -> None:
        self.sending, self.failed, self.wrong = watcher.sending, watcher.failed, world.found
        self.open = 0
        self._over, self._target, self._memories = world.end_if_all, target, memories
        self._loop = asyncio.get_running_loop()
        self._sent = 0
        self.pipeline = LentCalls(target.gateway).pipeline

    def send(self, way: Proxied, call: Planned, client_call: ClientCall, tried: Try) -> Callable[[], None]:
        """Send a request through a proxy. The function returned is the client's leaving."""
        self._sent += 1
        request_id = f"proxied-{self._sent:x}"
        self._target.records.open[request_id] = tried
        fields = call.fields | {b"x-request-id": request_id.encode()}
        proxied = ProxiedCall(self, way, posted(call.path, fields, call.body, self._loop.time()), client_call)
        proxied.ask()
        return proxied.leave

    def left_over(self) -> list[str]:
        """Calls that an idle gateway must not have, in words."""
        calls = len(self.pipeline.tasks)
        return [f"{calls} calls of proxies are left"] if calls else []

    # -- for its calls ------------------------------------------------------------------------------------------

    def decide(self, request: Request) -> KeptReply | bytes:
        """Have the gateway decide. Return its answer to come, or a refusal by the head or for want of memory."""
        refused = self.pipeline.head(request)
        if refused is None and request.limit < len(request.body):
            refused = refusal(WireError(413, "a body is too large"))
        if refused is None and full(request, self._target.gateway.bodies):
            refused = refusal(WireError(503, "no memory for this body", "bodies"))
        if refused is not None:
            return refused
        reply = KeptReply(request)
        self.pipeline.call(request, reply.client.responder)
        return reply

    def memory(self, url: str) -> MemoryEngine:
        return self._memories[engine_id(url)]

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Do this later: the simulation is not over before."""
        self.open += 1
        self._loop.call_later(seconds, self._now, what)

    def _now(self, what: Callable[[], None]) -> None:
        what()
        self.open -= 1
        self._over()


class ProxiedCall:
    """Call of a client as its proxy sees it: asked for, forwarded, reported, or forgotten by a proxy that hangs.

    It goes by the times of its grant. It is the `Taker` of the engine's answer. `way`: how its proxy behaves, as in
    case.py.
    """

    def __init__(self, site: Proxies, way: Proxied, request: Request, client_call: ClientCall) -> None:
        self._site = site
        self._way = way
        self._request = request
        self.request_id, self._own = request.fields[b"x-request-id"], request.body
        self._client_call = client_call
        self._loop = asyncio.get_running_loop()
        self._reply: KeptReply | None = None
        self._lent: LentCall | None = None  # once it has an engine
        self._unsend: Callable[[], None] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._hides = self._over = False
        self._status: int | None = None  # of the engine's answer
        self._usage: SSEUsage | JSONUsage | None = None

    def ask(self) -> None:
        decided = self._site.decide(self._request)
        if isinstance(decided, bytes):
            self._refused(Answer.read(decided))
        else:
            self._reply = decided
            decided.answer.add_done_callback(self._answered)

    def leave(self) -> None:
        """The client has left."""
        if self._over:
            return
        self._finish()
        if self._request.lent is not None:
            self._close()
            self._report("client_gone", self._request.lent)
        elif self._reply is not None:
            self._reply.client.leave()

    # -- the gateway's answer -----------------------------------------------------------------------------------

    def _answered(self, answered: asyncio.Future[Answer]) -> None:
        """A refusal, which is for the client, or a grant."""
        if self._over:  # it was withdrawn
            return
        if self._request.lent is None:
            self._refused(answered.result())
        else:
            self._granted(self._request.lent)

    def _refused(self, answer: Answer) -> None:
        self._finish()
        self._client_call.head(answer.status, dict(answer.headers))
        self._client_call.body(answer.body)
        self._client_call.over(True)

    def _granted(self, lent: LentCall) -> None:
        self._lent = lent
        self._hides = lent.hides_usage
        if self._way == "lost":
            self._vanish(min(lent.by, lent.until))
            return
        self._timers = [self._loop.call_at(lent.by, self._late), self._loop.call_at(lent.until, self._overdue)]
        if dict(lent.for_engine)[b"x-request-id"] != self.request_id:
            self._site.wrong(f"call {self.request_id.decode()} is sent to the engine under another id")
        self._site.sending(self.request_id)
        body = self._own if lent.body is None else lent.body
        try:
            unsend = self._site.memory(lent.url).post(self._request.path, body, self)
        except ConnectionRefusedError:
            self._fail("connect")
        else:
            if not self._over:  # else it was answered on the spot
                self._unsend = unsend

    # -- the engine's answer ------------------------------------------------------------------------------------

    def begin(self, status: int, content_type: bytes, data: bytes, length: int | None) -> None:
        self._status = status
        if status < 400:
            self._usage = SSEUsage(hide=self._hides) if length is None else JSONUsage()
            self._timers[0].cancel()
            if length is None:
                self._begun()
        self._client_call.head(status, {})
        self.data(data)

    def data(self, data: bytes) -> None:
        self._client_call.body(data if self._usage is None else self._usage.feed(data))
        told = self._usage is None or self._usage.prompt_tokens is not None
        if self._way == "dies" and not told and not self._over:
            self._loop.call_soon(self._die)  # as after any event of its stream

    def end(self) -> None:
        if self._over:
            return
        self._finish()
        if self._usage is not None:
            self._client_call.body(self._usage.finish())
        self._report(None, self._granted_call)
        self._client_call.over(True)

    def failed(self, kind: Literal["reset", "truncated"], message: str) -> None:
        self._fail(kind)

    # -- inside -------------------------------------------------------------------------------------------------

    @property
    def _granted_call(self) -> LentCall:
        assert self._lent is not None  # noqa: S101 # an engine has it
        return self._lent

    def _late(self) -> None:
        """The engine has not begun in time."""
        self._close()
        self._site.failed(self.request_id, False)
        self._fail("timeout")

    def _overdue(self) -> None:
        """The call's deadline."""
        self._close()
        self._fail("truncated" if self._status else "timeout")

    def _fail(self, kind: Failure) -> None:
        if self._over:
            return
        self._finish()
        before = not self._status
        self._report(kind if before else "truncated", self._granted_call)
        if before:
            self._client_call.head(502, {})
        self._client_call.over(before)

    def _die(self) -> None:
        if not self._over:
            self._close()
            self._vanish(self._granted_call.until)

    def _vanish(self, at: float) -> None:
        """Say nothing any more: the grant comes back by itself, as soon as its time is over."""
        self._finish()
        self._site.later(at - self._loop.time() + GRACE + SLACK, self._given_back)
        self._client_call.over(False)

    def _given_back(self) -> None:
        if not self._granted_call.ended.done():
            self._site.wrong("a proxy has vanished, its call's time is over, and its hold was not given back")

    def _close(self) -> None:
        unsend, self._unsend = self._unsend, None
        if unsend is not None:
            unsend()

    def _finish(self) -> None:
        self._over = True
        for timer in self._timers:
            timer.cancel()

    def _begun(self) -> None:
        for _ in range(1 + (self._way == "doubled")):
            self._granted_call.first_byte()

    def _report(self, failure: Failure | None, call: LentCall) -> None:
        """Report the end."""
        usage = self._usage
        if isinstance(usage, SSEUsage):
            usage.sum_up()
        known = usage if usage is not None and failure is None else JSONUsage()
        for _ in range(1 + (self._way == "doubled")):
            call.end(EndReport(self._status, failure, known))
