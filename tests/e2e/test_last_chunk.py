"""End of a stream on the wire: `[DONE]`, and then, in a read of its own, the chunk that ends the answer.

vLLM writes the two apart, and OpenAI's client closes the connection at `[DONE]`. So that the order is not left to
chance, the engine here holds the last chunk back until the client has seen `[DONE]`.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from loadtest.processes import Gateway, until
from tests.raw_calls import chat

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"hello"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}\n\n'
DONE = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"
METRICS = b"""vllm:num_requests_running{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0
"""
GETS = {
    b"/health": b"",
    b"/metrics": METRICS,
    b"/v1/models": json.dumps({"object": "list", "data": [{"id": "m", "max_model_len": 4096}]}).encode(),
}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize("leaves", [False, True], ids=["reads_on", "leaves_at_done"])
def test_a_stream_is_over_at_done(tmp_path: Path, leaves: bool) -> None:
    async def main() -> None:
        done_seen = asyncio.Event()

        async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while head := await reader.readuntil(b"\r\n\r\n"):
                    path = head.split(b" ", 2)[1]
                    if path in GETS:
                        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(GETS[path]) + GETS[path])
                        continue
                    writer.write(
                        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                    )
                    for event in (EVENT, EVENT, USAGE, DONE):
                        writer.write(chunk(event))
                        await writer.drain()
                    await done_seen.wait()
                    writer.write(LAST)
            except (asyncio.IncompleteReadError, ConnectionError):
                writer.transport.abort()

        async with await asyncio.start_server(engine, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            gateway = await asyncio.to_thread(Gateway, tmp_path / "log", "--engine", url)
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
                writer.write(chat("localhost", "m", "hi", max_tokens=3, usage=False))
                received = await reader.readuntil(DONE)
                assert USAGE not in received
                if leaves:
                    writer.transport.abort()
                    assert await asyncio.to_thread(until, gateway.idle, 60.0) is not None
                done_seen.set()
                if not leaves:
                    assert await asyncio.wait_for(reader.readuntil(LAST), 30.0) == b"\r\n" + LAST
                    writer.close()
                assert await asyncio.to_thread(until, gateway.idle, 60.0) is not None
                count = {"outcome": "ok"}
                assert await asyncio.to_thread(gateway.total, "weir_requests_total", **count) == 1
                assert await asyncio.to_thread(gateway.total, "weir_tokens_total", kind="prompt") == 7
                assert await asyncio.to_thread(gateway.total, "weir_tokens_total", kind="completion") == 3
            finally:
                await asyncio.to_thread(gateway.child.stop)

    asyncio.run(main())
