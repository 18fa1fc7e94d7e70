"""Endings of a call in the turn of the loop in which its engine has ended the answer."""

from __future__ import annotations

import asyncio
import os
import socket
from functools import partial

import pytest

from gateway.core.policy.policy import Policy
from tests.faults.scripted import DONE, EVENT, PLAIN, SSE, Answer, ScriptedEngine, chunk, gateway_over, port_of, request
from tests.faults.scripted import settled as settled_in
from tests.stopped_loop import StoppedLoop, stopped

LEFT = b"x-weir-deadline-ms: 20000\r\n"
LONG = 30.0  # seconds, more than that and less than the limits of the tests
WHOLE_STREAM = SSE + chunk(EVENT) + chunk(DONE) + b"0\r\n\r\n"


class Begins(ScriptedEngine):
    """Begins its answer; the test ends it."""

    def __init__(self, begin: bytes) -> None:
        super().__init__("good")
        self.begin = begin
        self.socket: socket.socket | None = None

    async def _act(self, name: str, stream: bool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(self.begin)
        self.socket = writer.get_extra_info("socket")
        await reader.read()
        return False

    def end(self, data: bytes) -> None:
        assert self.socket is not None
        assert os.write(self.socket.fileno(), data) == len(data)


@pytest.mark.parametrize(
    ("whole", "rest", "stream"), [(PLAIN, 10, False), (WHOLE_STREAM, len(chunk(DONE)) + 5, True)], ids=["json", "sse"]
)
def test_an_answer_that_ends_as_its_deadline_comes_is_whole(whole: bytes, rest: int, stream: bool) -> None:
    async def main() -> None:
        engine = Begins(whole[:-rest])
        async with engine.running(), gateway_over([engine], Policy()) as gateway:
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gateway))
            try:
                writer.write(request(stream).replace(b"host:", LEFT + b"host:"))
                raw = await reader.readuntil(b"\r\n\r\n")
                stopped(LONG, partial(engine.end, whole[-rest:]), reads=True)
                async with asyncio.timeout(60):
                    while not Answer(raw).complete and (data := await reader.read(65536)):
                        raw += data
            finally:
                writer.transport.abort()
            answer = Answer(raw)
            assert (answer.status, answer.complete, b"error" in answer.body) == (200, True, False)
            await settled_in(gateway)
            assert gateway.metrics.outcomes() == {"ok": 1}

    with asyncio.Runner(loop_factory=StoppedLoop) as runner:
        runner.run(main())
