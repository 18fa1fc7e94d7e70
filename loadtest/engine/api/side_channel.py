"""Side channel of a simulated engine with a socket: it keeps prompts for others, and fetches its own from them.

Prompts are fetched by a request to the other engine's own port or unix socket, `POST /_kv`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from loadtest.engine.api.checks import BROKEN, ApiError
from loadtest.engine.api.generate import Generation
from loadtest.engine.kv_transfer import FAILED, KEPT, TransferParams, transfer_seconds, with_params

if TYPE_CHECKING:
    from loadtest.engine.server import SimServer

FETCH_WITHIN = 5.0  # seconds
ANSWER_AT_MOST = 4096  # bytes


class SideChannel:
    """Transfers of one server. `fetching`: fetches under way."""

    def __init__(self, server: SimServer) -> None:
        self._server = server
        self.fetching: dict[Generation, asyncio.Task[None]] = {}

    def keep(self, answer: Generation, request_id: str) -> None:
        """Have the prompt's blocks kept, and the answer say where they are."""
        sequence = answer.choices[0].sequence
        sequence.keeps = True
        id = f"chatcmpl-{request_id}-0"

        def told(whole: bytes) -> bytes:
            server, kept = self._server, self._server.engine.kept
            params = kept.keep(id, sequence, *server.address)
            asyncio.get_running_loop().call_later(KEPT / server.config.speed, kept.expire, id)
            if sequence.reason != "length":  # vLLM keeps no blocks of an answer that ended by itself
                kept.expire(id)
                return whole
            return with_params(whole, params, server.faults.transfer)

        answer.told = told

    def fetch(self, answer: Generation, params: TransferParams, came: float) -> None:
        """Fetch the prompt, then put the request into the engine."""
        task = asyncio.get_running_loop().create_task(self._fetched(answer, params, came))
        self.fetching[answer] = task
        task.add_done_callback(lambda _: self.fetching.pop(answer, None))

    async def _fetched(self, answer: Generation, params: TransferParams, came: float) -> None:
        try:
            async with asyncio.timeout(FETCH_WITHIN):
                tokens = await _asked(params)
        except (OSError, TimeoutError, EOFError, ValueError):  # it may name no host
            tokens = 0
        if tokens:
            await asyncio.sleep(transfer_seconds(tokens) / self._server.config.speed)
            answer.choices[0].sequence.loaded = tokens
        elif self._server.config.on_kv_failure == "fail":
            answer.failed(ApiError(500, FAILED, type=BROKEN))
            return
        self._server.enter(answer, came)

    def withdraw(self, answer: Generation) -> bool:
        """End the fetch of a client that has left. Return whether there was one."""
        task = self.fetching.pop(answer, None)
        if task is not None:
            task.cancel()
        return task is not None

    def close(self) -> None:
        """End all fetches."""
        for task in list(self.fetching.values()):
            task.cancel()


async def _asked(params: TransferParams) -> int:
    """Ask the other engine for its prompt. Return the prompt's tokens, 0: it does not have it. Raises OSError."""
    body = msgspec.json.encode(params)
    if params.remote_port:
        reader, writer = await asyncio.open_connection(params.remote_host, params.remote_port)
    else:
        reader, writer = await asyncio.open_unix_connection(params.remote_host)
    try:
        writer.write(b"POST /_kv HTTP/1.1\r\nhost: kv\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body))
        writer.write(body)
        answer = await reader.read(ANSWER_AT_MOST)
    finally:
        writer.close()
    tokens = answer.rpartition(b"\r\n\r\n")[2]
    return int(tokens) if tokens.isdigit() else 0
