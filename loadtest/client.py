"""A client cheap enough not to be the bottleneck: one call, one connection, one `Answer`.

An asyncio protocol that reads heads and chunks itself and only looks into an event where it has to: about 10 us for a
read that carries one event. It is as strict as a load test needs: an answer counts as complete only if its framing
says so, and a stream as ok only if it ended with `[DONE]` and carried no error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Protocol, cast

import msgspec

END = b"\n\n"
ERROR = b'data: {"error"'
DONE = b"data: [DONE]"
USAGE = b'"usage":{'
MAX_HEAD = 65536  # bytes


class Answer(msgspec.Struct):
    """What came back. Times are seconds on the event loop's clock; 0.0 where the thing did not happen."""

    intended: float = 0.0
    sent: float = 0.0
    first_byte: float = 0.0  # of the head, which vLLM sends before it has a token
    first_event: float = 0.0  # of a stream: its first token
    finished: float = 0.0
    status: int = 0
    reason: str = ""  # the gateway's x-weir-reason
    complete: bool = False
    streamed: bool = False
    events: int = 0
    done: bool = False  # the stream ended with [DONE]
    error: str = ""  # an error event, an error answer, or what the socket said
    prompt_tokens: int = 0
    completion_tokens: int = 0
    timed_out: bool = False

    @property
    def outcome(self) -> str:
        """One word, the gateway's own for the same ending where it can be told from outside.

        `ok`; the gateway's reason; `engine_refused` or `upstream` (an error without a reason: the engine's own, passed
        on; in a stream it is followed by `[DONE]`); `truncated` (an error event, and no `[DONE]`); `timed_out` (we
        gave up); `cut` (neither finished nor explained); `unanswered` (not even a status).
        """
        if self.timed_out:
            return "timed_out"
        if not self.status:
            return "unanswered"
        if self.streamed and self.error.startswith("{"):
            return "upstream" if self.done else "truncated"
        if not self.complete:
            return "cut"
        if self.status != 200:
            return self.reason or ("engine_refused" if self.status < 500 else "upstream")
        return "ok" if self.done or not self.streamed else "cut"


class Listener(Protocol):
    """Who wants to hear an answer as it comes: its head with names in lower case, then the pieces of its body."""

    def head(self, status: int, fields: Mapping[bytes, bytes]) -> None: ...
    def body(self, data: bytes) -> None: ...


class Exchange(asyncio.Protocol):
    """One request and its answer. `over` is set once, when nothing more will come."""

    def __init__(
        self, request: bytes, answer: Answer, over: asyncio.Future[None], listener: Listener | None = None
    ) -> None:
        self.transport: asyncio.Transport | None = None
        self._listener = listener
        self._request = request
        self._answer = answer
        self._over = over
        self._clock = over.get_loop().time
        self._head = b""
        self._in_head = True
        self._chunked = False
        self._left: int | None = None  # body bytes to come; None: chunked, or until the connection closes
        self._raw = b""  # bytes of an unfinished chunk line
        self._need = 0  # bytes of the current chunk, its line end included
        self._event = b""  # the unfinished event, or the body of an answer that is not streamed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is one, but not by inheritance
        self._answer.sent = self._clock()
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                if len(self._head) > MAX_HEAD:
                    self._finish("a response head that does not end")
                return
            data = self._head[end + 4 :]
            self._answer.first_byte = self._clock()
            self._read_head(self._head[:end])
            self._in_head = False
        if self._chunked:
            self._read_chunks(data)
        else:
            self._read_body(data)
            if self._left is not None:
                self._left -= len(data)
                if self._left <= 0:
                    self._answer.complete = self._left == 0
                    self._finish()

    def _read_head(self, head: bytes) -> None:
        line, *lines = head.split(b"\r\n")
        self._answer.status = int(line.split(b" ", 2)[1])
        fields: dict[bytes, bytes] = {}
        for field in lines:
            name, _, value = field.partition(b":")
            name = name.lower()
            value = fields[name] = value.strip()
            if name == b"transfer-encoding":
                self._chunked = value.lower() == b"chunked"
            elif name == b"content-length":
                self._left = int(value)
            elif name == b"content-type":
                self._answer.streamed = value.startswith(b"text/event-stream")
            elif name == b"x-weir-reason":
                self._answer.reason = value.decode()
        if self._listener is not None:
            self._listener.head(self._answer.status, fields)

    def _read_chunks(self, data: bytes) -> None:
        data = self._raw + data
        at, end = 0, len(data)
        self._raw = b""
        while at < end:
            if self._need:
                take = min(self._need, end - at)
                body = min(take, max(0, self._need - 2))  # the chunk's own CRLF is not body
                if body:
                    self._read_body(data[at : at + body])
                self._need -= take
                at += take
                continue
            line = data.find(b"\r\n", at)
            if line < 0:
                self._raw = data[at:]
                return
            size = int(data[at:line].split(b";")[0], 16)
            if size == 0:
                self._answer.complete = True
                self._finish()
                return
            self._need = size + 2
            at = line + 2

    def _read_body(self, data: bytes) -> None:
        answer = self._answer
        if self._listener is not None:
            self._listener.body(data)
        self._event += data
        if not answer.streamed:
            return
        events, separator, self._event = self._event.rpartition(END)
        if not separator:
            return
        if not answer.events:
            answer.first_event = self._clock()
        answer.events += events.count(END) + 1
        if ERROR in events:
            answer.error = events[events.index(ERROR) + len(b"data: ") :].decode(errors="replace")[:1000]
        if events.endswith(DONE):
            answer.done = True
        if USAGE in events:
            self._read_usage(events)

    def _read_usage(self, events: bytes) -> None:
        for event in events.split(END):
            if USAGE in event:
                usage = json.loads(event.removeprefix(b"data: "))["usage"]
                self._answer.prompt_tokens = usage["prompt_tokens"]
                self._answer.completion_tokens = usage["completion_tokens"]

    def eof_received(self) -> None:
        if not self._in_head and not self._chunked and self._left is None:
            self._answer.complete = True  # delimited by the close of the connection

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(str(exc) if exc else "")

    def _finish(self, error: str = "") -> None:
        if self._over.done():
            return
        answer = self._answer
        answer.finished = self._clock()
        if error:
            answer.error = answer.error or error
        elif not answer.streamed and answer.status != 200:
            answer.error = self._event.decode(errors="replace")[:1000]
        elif not answer.streamed and USAGE in self._event:
            self._read_usage(self._event)
        self._over.set_result(None)
        if self.transport is not None:
            self.transport.close()


async def exchange(host: str, port: int, request: bytes, answer: Answer, *, limit: float) -> None:
    """Send one request on a connection of its own and fill in `answer`. Gives up after `limit` seconds.

    Nothing is raised for what a server or a network does: `answer.outcome` says it.
    """
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    transport: asyncio.BaseTransport | None = None
    try:
        async with asyncio.timeout(limit):
            transport, _ = await loop.create_connection(lambda: Exchange(request, answer, over), host, port)
            await over
    except TimeoutError:
        answer.timed_out = True
    except OSError as error:
        answer.error = str(error)
    finally:
        answer.finished = answer.finished or loop.time()
        if transport is not None:
            transport.close()


def chat(
    host: str,
    model: str,
    prompt: str,
    *,
    max_tokens: int,
    stream: bool = True,
    usage: bool = True,
    class_name: str = "",
) -> bytes:
    """The bytes of one chat request that generates exactly `max_tokens` on vLLM (`ignore_eos`). `class_name`: the
    traffic class it asks the gateway for, if any."""
    body: dict[str, object] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": stream,
    }
    if stream and usage:
        body["stream_options"] = {"include_usage": True}
    payload = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    if class_name:
        head += f"x-weir-class: {class_name}\r\n"
    return f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload
