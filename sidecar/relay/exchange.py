"""Exchange of one request through the relay: send the request to the engine and stream the answer back.

Bytes go on from the engine connection's own read callback, in whole chunks with their framing. Backpressure runs the
other way: a gateway that does not read pauses the engine. A caller that leaves cancels the task, which closes the
engine's connection, so vLLM aborts the request. An engine that fails in the middle breaks the caller's connection, so
that a truncated answer never looks whole. The relay does not retry, because the gateway chooses among engines.
"""

from __future__ import annotations

import asyncio
from contextlib import closing
from typing import Final, Literal

from gateway.core.request.outcome import error_body
from gateway.relay.wire.messages import Request
from gateway.relay.wire.responder import Responder
from gateway.upstream.client import Client, EngineError, Reply

JSON: Final = b"content-type: application/json\r\n"
PATIENCE: Final = 6 * 3600.0  # seconds for a first byte; the gateway's own deadlines are shorter
ASKED: Final = (b"content-type", b"x-request-id", b"traceparent", b"tracestate")  # passed on to the engine
ANSWERED: Final = (b"content-type", b"retry-after")  # passed on to the gateway


Exchanged = Literal["answered", "failed", "broken"]


async def exchange(request: Request, responder: Responder, client: Client, path: bytes) -> Exchanged:
    """Relay one request; `path`: of the engine. `failed`: it gave no answer; `broken`: it failed in the middle of one.
    Cancellation closes the engine's connection."""
    lines = _lines(request.fields, ASKED)
    try:
        reply = await client.send(request.method, path, lines, request.body, timeout=PATIENCE)
    except EngineError as error:
        responder.send(502, JSON, error_body(f"The engine has failed: {error}.", "server_error", "engine_failed"))
        return "failed"
    with closing(reply):
        request.release()
        return await _pass_on(reply, responder)


async def _pass_on(reply: Reply, responder: Responder) -> Exchanged:
    head = _lines(reply.headers, ANSWERED)
    over: asyncio.Future[EngineError | None] = asyncio.get_running_loop().create_future()

    def done(error: EngineError | None) -> None:
        if not over.done():
            over.set_result(error)

    if reply.complete:  # the common short answer: one write
        parts: list[bytes] = []
        reply.relay(parts.append, done)
        responder.send(reply.status, head, b"".join(parts))
        return "answered"
    responder.start(reply.status, head, reply.length)
    responder.flow(reply.pause, reply.resume)
    reply.relay(responder.write, done, responder.write_chunk)
    if await over is not None:
        responder.abort()
        return "broken"
    responder.end()
    return "answered"


def _lines(fields: dict[bytes, bytes], names: tuple[bytes, ...]) -> bytes:
    return b"".join(b"%b: %b\r\n" % (name, fields[name]) for name in names if name in fields)
