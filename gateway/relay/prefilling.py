"""First half of a call whose prompt another engine reads: one request, whose answer says where the KV cache is.

Whatever goes wrong before that answer means that the call's own engine reads the prompt, once, with the reason in the
record. A call that is cancelled closes the request, and vLLM aborts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from gateway.core.admission.decider import Grant, PrefillPlan
from gateway.core.kv_transfer import ANSWER_AT_MOST, HERE, UNREADABLE, UNSENT, NoParams, params_of, prefill_body
from gateway.core.request.call import Call
from gateway.core.request.engine_priority import with_priority
from gateway.core.request.record import PrefillNote, Record
from gateway.upstream.client import Client, EngineError, Reply
from gateway.upstream.unread import limited

FAILURES = {"connect": "connect", "timeout": "timeout"}  # other failures of a connection are resets


class Prefilling:
    """Sends prompts to the engines that read them for others."""

    def __init__(self, clients: Mapping[str, Client], clock: Callable[[], float]) -> None:
        self._clients = clients
        self._clock = clock

    async def params(self, path: bytes, headers: bytes, call: Call, grant: Grant, record: Record) -> bytes:
        """Return the transfer parameters for the request to the call's own engine; empty: that reads the prompt."""
        plan = grant.prefill
        if plan is None:
            return HERE
        note = record.prefill = PrefillNote(reason=plan.reason, here=plan.here, there=plan.there)
        if plan.engine is None:
            return HERE
        body = prefill_body(call.body, call.route.kind)
        if not body:
            note.failure = UNSENT
            grant.prefilled(self._clock(), UNSENT, "", "")
            return HERE
        if plan.priority:
            headers, body = with_priority(headers, body, call.route, plan.priority)
        note.engine, call.sent_at = plan.engine.id, self._clock()
        try:
            answer = await self._read(plan.engine.id, path, headers, body, self._within(plan, call))
            if isinstance(answer, int):
                return self._failed(grant, call, note, str(answer), f"it answered {answer}", "status")
            params = params_of(answer, "" if call.route.kind == "response" else call.request_id)
        except EngineError as error:
            kind = FAILURES.get(error.kind, "reset")
            return self._failed(grant, call, note, kind, str(error), error.reason)
        except NoParams as error:
            return self._failed(grant, call, note, UNREADABLE, str(error), "status")
        grant.prefilled(self._clock(), "", "", "")
        return params

    def _within(self, plan: PrefillPlan, call: Call) -> float:
        return max(0.0, min(plan.within, call.deadline - self._clock()))

    async def _read(self, engine: str, path: bytes, headers: bytes, body: bytes, within: float) -> bytes | int:
        """Return the engine's answer, or its status if that is none of success. Raises EngineError."""
        loop = asyncio.get_running_loop()
        until = loop.time() + within
        reply: Reply = await self._clients[engine].send(b"POST", path, headers, body, timeout=within)
        try:
            if reply.status != 200:
                return reply.status
            async with limited(until - loop.time()):
                return await reply.read(ANSWER_AT_MOST)
        except TimeoutError:
            raise EngineError("timeout", f"its answer did not end within {within:.1f} s") from None
        finally:
            reply.close()

    def _failed(self, grant: Grant, call: Call, note: PrefillNote, kind: str, message: str, reason: str) -> bytes:
        note.failure = kind
        call.sent_at = None
        grant.prefilled(self._clock(), kind, message, reason)
        return HERE
