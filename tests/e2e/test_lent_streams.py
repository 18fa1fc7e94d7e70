"""Streams in the pump of a real gateway while it changes: each is whole, counted once, and leaves no descriptor."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPResponse
from pathlib import Path

import pytest

from gateway import native
from loadtest.clients import stub
from loadtest.clients.stub import StubLoad
from loadtest.processes import Gateway, get, until
from tests.serve.test_processes import runs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native.Pump is None, reason="the pump is not built: no C compiler"),
]

STREAMS = 10
POLICY = "timeouts: {drain: 10m}\n"
EVENT = stub._TOKEN.partition(b"\r\n")[2][:-2]
LARGE = b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % (b"x" * 4000)
FLOOD = b"%x\r\n%b\r\n" % (len(LARGE), LARGE)
DONE = b"data: [DONE]\n\n"


class Engine:
    """An engine in a thread of its own. Its streams go on until `over`, or break off in a chunk at `dies`; each piece
    of them is an event, or many large ones while `floods`."""

    def __init__(self) -> None:
        self.floods = False
        self.stuck = 0  # turns in a row in which the gateway had not read all
        self.over, self.dies = threading.Event(), threading.Event()
        self.sent: list[int] = []  # chunks of each stream that is over
        self.connections: list[Connection] = []

    def _made(self) -> Connection:
        self.connections.append(Connection(self))
        return self.connections[-1]

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Yield its address."""
        loop = asyncio.new_event_loop()
        server = loop.run_until_complete(loop.create_server(self._made, "127.0.0.1", 0))
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            asyncio.run_coroutine_threadsafe(self._end(server), loop).result(60.0)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def _end(self, server: asyncio.Server) -> None:
        server.close()
        for each in self.connections:
            if each.transport is not None:
                each.transport.abort()
        while any(each.transport is not None for each in self.connections):
            await asyncio.sleep(0)


class Connection(stub._Engine):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def tick(self) -> None:
        engine, transport = self._engine, self.transport
        if transport is None:
            return
        if engine.dies.is_set():
            transport.write(stub._TOKEN[:50])
            transport.close()
        elif engine.over.is_set():
            self.total -= self.left  # of what was asked for: as many as were sent
            engine.sent.append(self.total)
            self.left = 0
            super().tick()
            transport.close()  # the gateway keeps none
        else:
            engine.stuck += 1
            if not transport.get_write_buffer_size():
                engine.stuck = 0
                chunks = 15 if engine.floods else 1
                self.left -= chunks
                transport.write((FLOOD if engine.floods else stub._TOKEN) * chunks)
            asyncio.get_running_loop().call_later(stub.INTERVAL, self.tick)


def processes(gateway: Gateway) -> list[tuple[str, int]]:
    """Role and id of each, the one that an operator signals first."""
    return [(each["role"], each["pid"]) for each in json.loads(get(f"{gateway.control}/processes")[1])["processes"]]


def main_of(gateway: Gateway) -> int:
    return processes(gateway)[0][1]


def carrying(gateway: Gateway) -> list[int]:
    """The processes that have clients' connections."""
    found = processes(gateway)
    return [pid for role, pid in found if role == "relay"] or [pid for _, pid in found]


def copies(pids: list[int]) -> int:
    """Descriptors of these processes that are copies of another: two for each stream in the pump. A relay without a
    stream may have ended."""
    count = 0
    for pid in pids:
        folder, held = f"/proc/{pid}/fd", Counter[str]()
        with contextlib.suppress(FileNotFoundError):
            for number in os.listdir(folder):
                with contextlib.suppress(FileNotFoundError):
                    held[os.readlink(f"{folder}/{number}")] += 1
        count += sum(number - 1 for name, number in held.items() if name.startswith("socket:"))
    return count


def descriptors(pids: list[int]) -> int:
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)


class Stream:
    """A streamed call of a client that does not ask for usage."""

    def __init__(self, gateway: Gateway) -> None:
        self.socket = socket.create_connection(("127.0.0.1", int(gateway.url.rpartition(":")[2])), timeout=300.0)
        self.socket.sendall(StubLoad(1, 1, 20_000).request)

    def read(self) -> tuple[int, bytes]:
        """Status and body."""
        with self.socket, HTTPResponse(self.socket) as answer:
            answer.begin()
            return answer.status, answer.read()


@contextlib.contextmanager
def readers(engine: Engine) -> Iterator[ThreadPoolExecutor]:
    """Threads to read streams, which end at the latest with the test."""
    with ThreadPoolExecutor(STREAMS) as pool:
        try:
            yield pool
        finally:
            engine.over.set()


Streams = list["Future[tuple[int, bytes]]"]


def begun(gateway: Gateway, pool: ThreadPoolExecutor) -> tuple[Streams, list[int]]:
    """Streams that the pump has, each read by a thread, and the processes that carry them."""
    pids = carrying(gateway)
    before = copies(pids)
    streams = [pool.submit(Stream(gateway).read) for _ in range(STREAMS)]
    assert until(lambda: copies(pids) == before + 2 * STREAMS, 60.0) is not None
    return streams, pids


def finished(engine: Engine, streams: Streams) -> None:
    """Have the streams end: all that the engine has sent came, and nothing else."""
    engine.sent.clear()
    engine.over.set()
    answers = [stream.result(120.0) for stream in streams]
    engine.over.clear()
    assert sorted(answers) == sorted((200, EVENT * sent + DONE) for sent in engine.sent)


def counted(gateway: Gateway, tokens: int, calls: int) -> bool:
    """Whether metrics have so many calls, and so many tokens of their answers."""
    outcomes = gateway.total("weir_requests_total", outcome="ok"), gateway.total("weir_requests_total")
    told = gateway.total("weir_tokens_total", kind="completion")
    return (*outcomes, told) == (calls, calls, tokens)


@pytest.mark.parametrize("words", [(), ("--workers", "2")], ids=["one process", "two relays"])
def test_streams_stay_whole_while_the_gateway_reloads_is_taken_over_and_drains(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    engine, policy = Engine(), tmp_path / "policy.yaml"
    policy.write_text(POLICY)
    started = ("--policy", str(policy), "--log", "none", *words)
    with (
        engine.running() as url,
        Gateway(tmp_path / "log", "--engine", url, *started) as gateway,
        readers(engine) as pool,
    ):
        # A reload. A child that gets SIGTERM alone goes on, and a decider that is killed is replaced.
        before = descriptors(carrying(gateway))
        streams, pids = begun(gateway, pool)
        policy.write_text(POLICY + "classes: {default: {}, another: {}}\n")
        os.kill(main_of(gateway), signal.SIGHUP)
        assert until(lambda: b"another:" in get(f"{gateway.control}/policy")[1], 60.0) is not None
        if words:
            (decider,) = [pid for role, pid in processes(gateway) if role == "decider"]
            for pid in (*pids, decider):
                os.kill(pid, signal.SIGTERM)
            os.kill(decider, signal.SIGKILL)
            assert until(lambda: ("decider", decider) not in processes(gateway), 60.0) is not None
        assert copies(pids) >= 2 * STREAMS, "still in the pump"
        finished(engine, streams)
        # A look at the control port is a connection too.
        assert until(lambda: descriptors(pids) <= before + 1, 60.0) is not None
        calls, tokens = len(streams), sum(engine.sent)
        # Another gateway takes over.
        streams, pids = begun(gateway, pool)
        old = main_of(gateway)
        os.kill(old, signal.SIGUSR2)
        assert until(lambda: main_of(gateway) != old, 60.0) is not None
        assert copies(pids) >= 2 * STREAMS, "still in the pump"
        finished(engine, streams)
        calls, tokens = calls + len(streams), tokens + sum(engine.sent)
        assert until(lambda: counted(gateway, tokens, calls), 60.0) is not None
        assert until(lambda: not any(map(runs, pids)), 60.0) is not None
        # It drains.
        streams, pids = begun(gateway, pool)
        last = main_of(gateway)
        os.kill(last, signal.SIGTERM)
        assert until(lambda: get(f"{gateway.control}/readyz")[0] == 503, 60.0) is not None
        assert copies(pids) >= 2 * STREAMS, "still in the pump"
        finished(engine, streams)
        assert until(lambda: not any(map(runs, (last, *pids))), 60.0) is not None


def test_a_client_that_stops_reading_and_an_engine_that_dies_in_a_chunk(tmp_path: Path) -> None:
    engine = Engine()
    with (
        engine.running() as url,
        Gateway(tmp_path / "log", "--engine", url, "--log", "none") as gateway,
        readers(engine) as pool,
    ):
        pids = carrying(gateway)
        call = Stream(gateway)
        assert until(lambda: copies(pids) == 2, 60.0) is not None
        engine.floods = True
        assert until(lambda: engine.stuck > 25 and copies(pids) == 0, 60.0) is not None, "all buffers are full"
        engine.floods = False
        answer = pool.submit(call.read)
        assert until(lambda: copies(pids) == 2, 60.0) is not None, "the client has read all"
        engine.over.set()
        status, body = answer.result(120.0)
        small, large = body.count(EVENT), body.count(LARGE)
        assert (status, small + large, len(body)) == (200, engine.sent[0], len(EVENT * small + LARGE * large + DONE))
        assert until(lambda: copies(pids) == 0, 60.0) is not None
        engine.over.clear()
        answer = pool.submit(Stream(gateway).read)
        assert until(lambda: copies(pids) == 2, 60.0) is not None
        engine.dies.set()
        status, body = answer.result(120.0)
        events, _, told = body.rpartition(EVENT)
        assert (status, events) == (200, EVENT * events.count(EVENT))
        assert b'"error"' in told
        assert until(lambda: copies(pids) == 0, 60.0) is not None
        assert (gateway.total("weir_requests_total", outcome="ok"), gateway.total("weir_requests_total")) == (1, 2)
