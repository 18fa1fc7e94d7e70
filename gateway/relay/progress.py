"""Progress of a call that waits, as comments in its stream, so that no idle time-out on the way cuts it.

The first comment sends the answer's head: from then on its status is 200, and a refusal is an error event. A timer
writes; no coroutine wakes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from gateway.core.admission.decider import Grant
from gateway.core.request.call import Call
from gateway.relay.wire.server import Responder

HEAD = (
    b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"x-request-id: %b\r\nx-weir-class: %b\r\n"
)


class Progress:
    """Comments on a call's wait, `every` so many seconds."""

    __slots__ = ("_began", "_every", "_lines", "_loop", "_responder", "_timer")

    def __init__(self, responder: Responder, call: Call, every: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._responder = responder
        self._lines = HEAD % (call.request_id.encode(), call.class_name.encode())
        self._every = every
        self._began = self._loop.time()
        self._timer = self._loop.call_later(every, self._tell)

    async def of(self, asking: Awaitable[Grant]) -> Grant:
        """The grant that is asked for, with comments until then."""
        try:
            return await asking
        finally:
            self._timer.cancel()

    def _tell(self) -> None:
        responder = self._responder
        if responder.closed:
            return
        if not responder.started:
            responder.start(200, self._lines)
        responder.write(b": waiting for %d s\n\n" % (self._loop.time() - self._began))
        self._timer = self._loop.call_later(self._every, self._tell)
