"""Streams that the pump carries, under random events in one turn: whoever leaves, nobody gets another's bytes.

Real sockets and the whole gateway. The client leaves, the engine closes or is taken for dead, the deadline comes, bytes
come in any pieces; each before or after the loop has looked at its sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway import native
from gateway.core.policy.policy import Policy, Timeouts
from gateway.serve.assembly import Gateway
from tests.examples import examples
from tests.faults.scripted import (
    DONE,
    SSE,
    USAGE,
    ScriptedEngine,
    chunk,
    gateway_over,
    open_fds,
    port_of,
    request,
    settled,
)  # fmt: skip
from tests.stopped_loop import StoppedLoop, stopped

pytestmark = [
    pytest.mark.slow,  # each example is a gateway
    pytest.mark.skipif(native.Pump is None, reason="the pump is not built: no C compiler"),
]
PATIENT = Policy(timeouts=Timeouts(first_byte=600.0, stall=600.0))
LARGE = 4000  # bytes of an event: one read, and more than a client that does not read has room for
WITHIN = 60.0  # seconds
DEADLINE, LATER = b"x-weir-deadline-ms: 20000\r\n", 30.0  # seconds, after that
EVENTS = st.sampled_from(
    ["put", "put", "turn", "turn", "stop", "late", "over", "over late", "dead", "read", "leave", "reset", "end"]
)


def event(text: int) -> bytes:
    return b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % (b"x" * text)


class PutEngine(ScriptedEngine):
    """Puts what the test says, at once."""

    def __init__(self) -> None:
        super().__init__("good")
        self.socket: socket.socket | None = None

    async def _act(self, name: str, stream: bool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        self.socket = writer.get_extra_info("socket")
        await reader.read()  # until the gateway leaves
        return False


class Stream:
    """One stream, cut in pieces; its engine and its client. `left`, `ended`: the client, the engine's connection."""

    def __init__(self, gateway: Gateway, engine: PutEngine, pieces: list[bytes], *, reads: bool) -> None:
        self._gateway, self._engine, self._pieces, self._reads = gateway, engine, pieces, reads
        self.client = socket.socket()
        if not reads:
            for listener in gateway.server._listeners:
                listener.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # type: ignore[union-attr]
        self.client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20 if reads else 4096)
        self.client.connect(("127.0.0.1", port_of(gateway)))
        self.client.sendall(request(stream=True).replace(b"host:", DEADLINE + b"host:"))
        self.client.setblocking(False)
        self.put_bytes = self.got = b""
        self.left = self.ended = self.closed = self.over = False
        self._bystanders: list[tuple[socket.socket, socket.socket]] = []

    async def begin(self) -> None:
        async with asyncio.timeout(WITHIN):
            while self._engine.socket is None:
                await asyncio.sleep(0)
        self.put()

    def put(self) -> None:
        """Put the next piece, or what the socket takes of it."""
        assert self._engine.socket is not None
        if not self._pieces or self.ended:
            return
        piece = self._pieces.pop(0)
        try:
            sent = os.write(self._engine.socket.fileno(), piece)
        except BlockingIOError:
            sent = 0
        except OSError:  # the gateway has left
            self.ended = True
            return
        self.put_bytes += piece[:sent]
        if piece[sent:]:
            self._pieces.insert(0, piece[sent:])

    def read(self) -> None:
        """Read what is there."""
        with contextlib.suppress(BlockingIOError):
            while not self.left and not self.closed:
                try:
                    data = self.client.recv(1 << 20)
                except ConnectionResetError:
                    data = b""
                self.got += data
                self.closed = not data

    def leave(self, how: str) -> None:
        if how == "reset":
            self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.left = True
        self.client.close()

    async def meet(self, what: str) -> None:
        if what == "put":
            self.put()
        elif what == "read":
            self.read()
        elif what in ("leave", "reset") and not self.left:
            self.leave(what)
        elif what == "end" and not self.ended:
            self.ended = True
            assert self._engine.socket is not None
            with contextlib.suppress(OSError):
                self._engine.socket.shutdown(socket.SHUT_WR)
        elif what == "dead":
            for client in self._gateway.engines.clients.values():
                client.abandon()  # of what has not begun: nothing
        elif what in ("stop", "late"):
            stopped(0.0, self.put, reads=what == "late")
            await asyncio.sleep(0)
        elif what in ("over", "over late"):
            self.over = True
            stopped(LATER, self.put, reads=what == "over late")
            await asyncio.sleep(0)
        else:
            await asyncio.sleep(0)
        if (self.left or self.ended) and len(self._bystanders) < 8:
            self._bystanders.append(socket.socketpair())  # they get the numbers that become free

    async def finish(self) -> None:
        """Put and read to the end."""
        async with asyncio.timeout(WITHIN):
            while not self.closed and not self.left:
                self.put()
                self.read()
                if self.got.endswith(b"\r\n0\r\n\r\n"):
                    break
                await asyncio.sleep(0)
            await settled(self._gateway)

    def strays(self) -> Iterator[bytes]:
        """What others' sockets were written."""
        for pair in self._bystanders:
            for each in pair:
                each.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    yield each.recv(4096)

    def close(self) -> None:
        for each in (self.client, *[each for pair in self._bystanders for each in pair]):
            each.close()


def data_of(chunks: bytes) -> bytes:
    """The data of a chunked body, as far as it has come."""
    data = b""
    while b"\r\n" in chunks:
        size, _, rest = chunks.partition(b"\r\n")
        data += rest[: int(size, 16)]
        chunks = rest[int(size, 16) + 2 :]
    return data


def cut(data: bytes, places: set[int]) -> list[bytes]:
    ends = sorted(place for place in places if 0 < place < len(data))
    return [data[start:end] for start, end in zip([0, *ends], [*ends, len(data)], strict=True)]


PARTS = st.lists(st.sampled_from([event(5), event(5), event(LARGE), event(LARGE), USAGE]), min_size=4, max_size=14)


@settings(max_examples=examples(150), deadline=None)
@given(
    parts=PARTS,
    places=st.sets(st.integers(200, 1200), max_size=3),
    rounds=st.integers(0, 8),
    events=st.lists(EVENTS, max_size=20),
    reads=st.booleans(),
)
@example(parts=[event(5)] * 6, places=set(), rounds=6, events=["leave", "turn", "turn"], reads=True)
@example(parts=[event(5)] * 6, places=set(), rounds=6, events=[], reads=True)
@example(parts=[event(5)] * 4 + [event(LARGE)] * 8, places=set(), rounds=12, events=[], reads=False)
def test_a_stream_that_is_lent_is_whole_and_nobody_elses(
    parts: list[bytes], places: set[int], rounds: int, events: list[str], reads: bool
) -> None:
    chunks = [chunk(part) for part in (*parts, DONE)]
    whole = SSE + b"".join(chunks) + b"0\r\n\r\n"
    ends = {len(SSE) + len(b"".join(chunks[:number])) for number in range(1, len(chunks) + 1)}

    async def main() -> None:
        engine = PutEngine()
        problems: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(str(context)))
        async with engine.running(), gateway_over([engine], PATIENT) as gateway:
            before = open_fds()
            stream = Stream(gateway, engine, cut(whole, ends | places), reads=reads)
            try:
                await stream.begin()
                for what in (*("put", "turn", "turn") * rounds, *events):  # the sockets are lent in the fifth
                    await stream.meet(what)
                await stream.finish()
                assert list(stream.strays()) == []
                judge(gateway, stream)
            finally:
                stream.close()
            async with asyncio.timeout(WITHIN):
                while open_fds() > before:
                    for client in gateway.engines.clients.values():
                        client._drop_pool()
                    await asyncio.sleep(0)
        assert problems == []

    with asyncio.Runner(loop_factory=StoppedLoop) as runner:
        runner.run(main())


def judge(gateway: Gateway, stream: Stream) -> None:
    """What the client has, and what the gateway says of it."""
    (outcome,) = gateway.metrics.outcomes()
    came = data_of(stream.put_bytes.partition(b"\r\n\r\n")[2])
    events = came[: came.rfind(b"\n\n") + 2 if b"\n\n" in came else 0].replace(USAGE, b"")
    told = data_of(stream.got.partition(b"\r\n\r\n")[2])
    if stream.left:
        assert outcome in ("client_gone", "ok", "truncated", "expired")
        return
    if outcome == "ok":
        assert told == events
        assert told.endswith(DONE)
        return
    assert outcome in (("truncated", "expired") if stream.over else ("truncated",))
    assert b'"error"' in told
    assert stream.over or (stream.ended and told.startswith(events) and DONE not in events)
