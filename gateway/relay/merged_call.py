"""Exchange of one call of the batcher: admitted like any other, sent, and its whole answer read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

from gateway.core.admission.decider import Decider, Grant
from gateway.core.answer.json_usage import JSONUsage
from gateway.core.engines.breaker import Ending
from gateway.core.request.call import Call
from gateway.core.request.record import Record
from gateway.relay.attempts import Attempts, failure
from gateway.relay.batcher import Exchanged
from gateway.upstream.client import EngineError

WHOLE_AT_MOST = 64 * 1024**2  # bytes of a merged answer


class MergedCalls:
    """Sends what the batcher gives it. The calls that share the request are judged and charged one by one."""

    def __init__(self, decider: Decider, attempts: Attempts, clock: Callable[[], float]) -> None:
        self._decider = decider
        self._attempts = attempts
        self._clock = clock

    async def exchange(self, call: Call) -> Exchanged:
        """Admit a merged call like any other, send it, and return its whole answer."""
        try:
            with await self._decider.ask(call) as grant:
                return await self._exchanged(call, grant)
        finally:
            call.body = b""  # whoever still knows the call

    async def _exchanged(self, call: Call, grant: Grant) -> Exchanged:
        """A call of the batcher, from its grant to its answer's end."""
        record = Record(request_id=call.request_id, route=call.route.path)
        headers = b"content-type: application/json\r\nx-request-id: %b\r\n" % call.request_id.encode()
        granted = self._clock()
        path = call.route.path.encode()
        with closing(await self._attempts.send(path, headers, call, grant, record)) as reply:
            first_byte = self._clock()
            try:
                body = await reply.read(WHOLE_AT_MOST)
            except EngineError as error:
                grant.ending = Ending.FAILURE
                call.sent_at = None
                raise failure(grant.engine, str(error), str(error)) from error
        if reply.status < 400:
            grant.first_byte(first_byte)
            usage = JSONUsage()
            usage.whole(body)
            if usage.prompt_tokens is not None:
                self._decider.learn(call, usage.prompt_tokens, 0)
        return Exchanged(
            status=reply.status,
            body=body,
            engine=record.engine,
            engine_name=grant.engine.name,
            content_type=reply.headers.get(b"content-type", b"application/json"),
            attempts=record.attempts,
            granted=granted,
            first_byte=first_byte,
        )
