"""Stub engine and stub load, which cost almost nothing, to measure what stands between them.

The engine simulates no scheduling: a streamed answer is `max_tokens` SSE events, one every 20 ms; a plain one is a
fixed JSON body. The load is a closed loop on raw protocols. Both speak just enough HTTP for each other.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import msgspec
import uvloop
from httptools import HttpRequestParser, HttpResponseParser

from loadtest.processes import Child

INTERVAL = 0.02  # seconds between events of a stream


def _event(data: object) -> bytes:
    event = b"data: %b\n\n" % json.dumps(data, separators=(",", ":")).encode()
    return b"%x\r\n%b\r\n" % (len(event), event)


def _chunk(choices: list[object], **more: object) -> dict[str, object]:
    kind = "chat.completion.chunk"
    return {"id": "chatcmpl-0123456789abcdef", "object": kind, "created": 1, "model": "m", "choices": choices, **more}


def _answer(kind: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (kind, len(body), body)


_TOKEN = _event(_chunk([{"index": 0, "delta": {"content": " hello"}, "logprobs": None, "finish_reason": None}]))
_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_JSON = b"application/json"
_PLAIN = _answer(_JSON, json.dumps({
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello " * 100}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 120, "completion_tokens": 100, "total_tokens": 220},
}).encode())  # fmt: skip
_MODELS = _answer(_JSON, b'{"object":"list","data":[{"id":"m","object":"model","max_model_len":32768}]}')
_METRICS = _answer(
    b"text/plain",
    b"""\
vllm:num_requests_running{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.1
vllm:num_preemptions_total{engine="0",model_name="m"} 0.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000000"} 1.0
""",
)


class _Asked(msgspec.Struct, gc=False):
    """Fields of a call that the engine reads. Of a prompt of half a megabyte it makes no objects."""

    max_tokens: int = 0
    stream: bool = False
    stream_options: dict[str, bool] | None = None


_asked = msgspec.json.Decoder(_Asked).decode


class _Engine(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport | None = cast(asyncio.Transport, transport)
        self.parser = HttpRequestParser(self)
        self.url = b""
        self.body: list[bytes] = []

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        url, body = self.url, b"".join(self.body)
        self.url = b""
        self.body.clear()
        if self.transport is None:
            return
        if url == b"/v1/chat/completions":
            request = _asked(body)
            if request.stream:
                self.total = self.left = request.max_tokens
                self.usage = bool((request.stream_options or {}).get("include_usage"))
                self.transport.write(_STREAM)
                self.tick()
            else:
                self.transport.write(_PLAIN)
        else:
            known = {b"/metrics": _METRICS, b"/v1/models": _MODELS}
            self.transport.write(known.get(url, _answer(_JSON, b"{}")))

    def tick(self) -> None:
        if self.transport is None:
            return
        if self.left:
            self.left -= 1
            self.transport.write(_TOKEN)
            asyncio.get_running_loop().call_later(INTERVAL, self.tick)
            return
        usage = {"prompt_tokens": 120, "completion_tokens": self.total, "total_tokens": 120 + self.total}
        self.transport.write((_event(_chunk([], usage=usage)) if self.usage else b"") + _END)


def _serve(port: int) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(_Engine, "127.0.0.1", port, backlog=4096)
        await server.serve_forever()

    os.sched_setaffinity(0, {1})
    uvloop.run(main())


@contextmanager
def serve_stub(port: int) -> Iterator[None]:
    """The engine in a child process."""
    with Child("stub", [sys.executable, "-m", "loadtest.clients.stub", str(port)], Path(os.devnull)):
        yield


class LoadResult(msgspec.Struct):
    finished: int = 0
    events: int = 0
    errors: int = 0
    latencies: list[float] = []  # seconds, of each call


class StubLoad:
    """`requests` chat completions over `connections`, each sent when the one before it is answered.

    `tokens` > 0: streamed, so many events each. `all_streaming` is set once every request has
    had its first byte.
    """

    def __init__(self, requests: int, connections: int, tokens: int = 0, model: str = "m") -> None:
        words = "the quick brown fox jumps over the lazy dog and " * 13
        self.body = json.dumps({
            "model": model,
            "messages": [
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": words[:600]},
            ],
            "max_tokens": tokens or 100,
            **({"stream": True} if tokens else {}),
        }).encode()  # fmt: skip
        self.expected = 200 if model == "m" else 404
        self.requests, self.connections = requests, connections
        self.started = self.first = 0
        self.result = LoadResult()
        self.all_streaming = asyncio.Event()
        self.done = asyncio.Event()
        self.clients: list[_Client] = []

    @property
    def request(self) -> bytes:
        return (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer sk-test\r\n"
            b"content-type: application/json\r\naccept: */*\r\nuser-agent: load/1\r\ncontent-length: %d\r\n\r\n%b"
            % (len(self.body), self.body)
        )

    async def run(self, port: int, within: float = 120.0) -> LoadResult:
        """Send everything; the counts. Raises TimeoutError after `within` seconds."""
        loop = asyncio.get_running_loop()
        for _ in range(self.connections):
            _, client = await loop.create_connection(lambda: _Client(self, self.request), "127.0.0.1", port)
            self.clients.append(client)
        await asyncio.wait_for(self.done.wait(), within)
        self.stop()
        return self.result

    def stop(self) -> None:
        for client in self.clients:
            client.transport.abort()
        self.done.set()


class _Client(asyncio.Protocol):
    def __init__(self, load: StubLoad, request: bytes) -> None:
        self.load, self.request = load, request
        self.busy = self.waiting = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.send()

    def send(self) -> None:
        if self.load.started < self.load.requests:
            self.load.started += 1
            self.busy = self.waiting = True
            self.sent_at = time.perf_counter()
            self.parser = HttpResponseParser(self)
            self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        if self.waiting:
            self.waiting = False
            self.load.first += 1
            if self.load.first == self.load.requests:
                self.load.all_streaming.set()
        self.parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self.load.result.events += data.count(b"data: {")

    def on_message_complete(self) -> None:
        self.end(failed=self.parser.get_status_code() != self.load.expected)
        asyncio.get_running_loop().call_soon(self.send)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.busy and not self.load.done.is_set():
            self.end(failed=True)

    def end(self, *, failed: bool) -> None:
        self.busy = False
        result = self.load.result
        result.finished += 1
        result.errors += failed
        result.latencies.append(time.perf_counter() - self.sent_at)
        if result.finished == self.load.requests:
            self.load.done.set()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
