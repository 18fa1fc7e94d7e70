"""Proxies of a simulation: they ask the decide port of the gateway, and forward calls to its engines by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import cast

from gateway.core.engines.origin import engine_id
from gateway.relay.wire.messages import WireError, refusal
from gateway.relay.wire.responder import Responder
from gateway.serve.decide_port import DecideListener
from loadtest.lab.dst.case import Proxied
from loadtest.lab.dst.course import Course
from loadtest.lab.dst.decide.proxied_call import Fields, Hear, ProxiedCall, Question
from loadtest.load.workload import Planned
from loadtest.simulate.inprocess import GatewayTarget, Watcher
from loadtest.simulate.memory_engine import MemoryEngine
from loadtest.simulate.posting import full, leaving, nothing, posted
from loadtest.simulate.simulated_client import ClientCall, Try


class Proxies:
    """Proxies that ask one gateway, over engines by their ids. `open` counts the calls that a proxy has left."""

    def __init__(
        self, target: GatewayTarget, memories: Mapping[str, MemoryEngine], watcher: Watcher, course: Course
    ) -> None:
        self.sending, self.failed, self.wrong = watcher.sending, watcher.failed, course.found
        self.open = 0
        self._over, self._target, self._memories = course.end_if_all, target, memories
        self._loop = asyncio.get_running_loop()
        self._sent = 0
        self.port = DecideListener(target.gateway, "", None)

    def send(self, way: Proxied, call: Planned, client_call: ClientCall, tried: Try) -> Callable[[], None]:
        """Send a request through a proxy. The function returned is the client's leaving."""
        self._sent += 1
        request_id = f"proxied-{self._sent:x}"
        self._target.records.open[request_id] = tried
        proxied = ProxiedCall(self, way, request_id.encode(), call, client_call)
        proxied.ask()
        return proxied.leave

    def left_over(self) -> list[str]:
        """Calls and holds that an idle decide port must not have, in words."""
        calls = self.port.pipeline.tasks
        left = {"calls": len(calls), "holds": len(self.port.held)}
        return [f"{count} {what} of the decide port are left" for what, count in left.items() if count]

    # -- for its calls ------------------------------------------------------------------------------------------

    def post(self, path: bytes, fields: Fields, body: bytes, hear: Hear) -> Callable[[], None]:
        """Ask the decide port. The function returned closes the connection."""
        request = posted(path, fields, body, self._loop.time())
        question = Question(hear)
        refused = self.port.handler.head(request)
        if refused is None and request.limit < len(body):
            refused = refusal(WireError(413, "a body is too large"))
        if refused is None and full(request, self._target.gateway.bodies):
            refused = refusal(WireError(503, "no memory for this body", "bodies"))
        if refused is not None:
            question.write(refused)
            question.answered(False)
            return nothing
        responder = Responder(question, cast("asyncio.Transport", question), request)
        self.port.handler.call(request, responder)
        return leaving(responder)

    def memory(self, upstream: bytes) -> MemoryEngine:
        return self._memories[engine_id(upstream.decode())]

    def holds(self, id: str) -> bool:
        """Whether the gateway knows such a hold."""
        return self.port.held.get(id) is not None

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Do this later: the simulation is not over before."""
        self.open += 1
        self._loop.call_later(seconds, self._now, what)

    def _now(self, what: Callable[[], None]) -> None:
        what()
        self.open -= 1
        self._over()
