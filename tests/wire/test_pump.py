"""Streams through the pump and through the transports alone: the same bytes, counts and endings.

The Python path is the definition. Each stream goes both ways, over real sockets, and the results are compared.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import termios
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway import native
from gateway.core.request.routes import Route
from gateway.relay.answer import Relay
from gateway.upstream import client as upstream_client
from gateway.upstream.client import Client, ClientSettings, Reply, parse_origin
from tests.calls import a_call
from tests.examples import examples
from tests.wire.client_harness import CHUNKED, chunk, open_fds
from tests.wire.server_harness import Rig, serve

pytestmark = pytest.mark.skipif(native.Pump is None, reason="the pump is not built: no C compiler")

ROOT = Path(__file__).parents[2]
CHAT = Route(path="/v1/chat/completions", kind="chat", generates=True, usage_option=True)
DONE = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
HOLD = b"POST /hold HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n"


def delta(text: bytes) -> bytes:
    return chunk(b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % text)


class Seen(NamedTuple):
    """Results of one stream."""

    answer: bytes
    reads: int
    outcome: str
    tokens: tuple[int | None, int | None, int | None]
    error: str
    kept: int  # connections to the engine that may be used again


class Stream:
    """One stream of an engine that writes `pieces`, each once the one before was read."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.lent = 0  # pieces that came while the sockets were lent

    async def run(self, pieces: list[bytes], *, tiny: bool = False, cut: bool = False, closing: bool = False) -> Seen:
        """`tiny`: the client's socket takes little, and the client reads late. `cut`: the engine resets in the end.
        `closing`: the engine's head says that it will close the connection."""
        peers: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
        engine = await asyncio.start_server(lambda *ends: peers.put_nowait(ends), "127.0.0.1", 0)
        upstream = Client(parse_origin(f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}"), ClientSettings())
        client = await self._rig.client()
        await client.send(HOLD)
        responder = await self._rig.handler.holding(len(self._rig.handler.held) + 1)
        if tiny:
            client.writer.transport.pause_reading()
            responder._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        sending = asyncio.create_task(upstream.send(b"POST", b"/v1/x", b"", b"{}", timeout=60.0))
        reader, writer = await peers.get()
        await reader.readuntil(b"{}")
        writer.write(CHUNKED.replace(b"\r\n", b"\r\nconnection: close\r\n" if closing else b"\r\n", 1) + pieces[0])
        reply = await sending
        relay = Relay(a_call(route=CHAT, stream=True, prompt_tokens=5), reply, responder, b"")
        finishing = asyncio.create_task(relay.finished())
        reading = asyncio.create_task(client.end())
        for piece in pieces[1:]:
            await _read(reply, writer, finishing)
            self.lent += relay._loan is not None and relay._loan.active
            if not writer.transport.is_closing():  # the gateway leaves an engine that sends no HTTP
                writer.write(piece)
        if cut:
            await _read(reply, writer, finishing)
            writer.transport.abort()
        if tiny:
            client.writer.transport.resume_reading()
        async with asyncio.timeout(60):
            await finishing
        reply.close()
        kept = upstream.idle
        client.writer.write_eof()
        body, _ = await reading
        for ends in (upstream, engine, writer, client.writer):
            ends.close()
        usage = relay.usage
        tokens = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
        return Seen(
            _unchunked(body.partition(b"\r\n\r\n")[2]),
            relay.reads,
            relay.outcome.value,
            tokens,
            str(relay.error),
            kept,
        )


async def _read(reply: Reply, writer: asyncio.StreamWriter, finishing: asyncio.Task[None]) -> None:
    """Wait until the gateway has read what the engine wrote, or takes no more for now."""
    connection = reply._connection
    for _ in range(200):
        await asyncio.sleep(0)
        if connection is None or connection.lost or finishing.done():
            return
        unread = bytearray(4)
        fcntl.ioctl(connection._transport.get_extra_info("socket").fileno(), termios.FIONREAD, unread)
        if not writer.transport.get_write_buffer_size() and not any(unread):
            return


def _unchunked(body: bytes) -> bytes:
    """The data of a chunked body, and what follows where it is broken."""
    data = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        data += rest[:length]
        body = rest[length + 2 :]
    return data


def both(pieces: list[bytes], **how: bool) -> tuple[Seen, Seen, int]:
    """The stream by the transports alone and by the pump, and how many pieces came while the sockets were lent."""
    seen: list[Seen] = []
    lent = 0

    async def scenario(rig: Rig) -> None:
        nonlocal lent
        for pumped in (False, True):
            with pytest.MonkeyPatch.context() as patch:
                if not pumped:
                    patch.setattr(upstream_client, "Pump", None)
                before = open_fds()
                stream = Stream(rig)
                seen.append(await stream.run(pieces, **how))
                lent = stream.lent
                async with asyncio.timeout(60):
                    while open_fds() > before:
                        await asyncio.sleep(0)

    serve(scenario)
    return seen[0], seen[1], lent


EVENTS = st.sampled_from([
    delta(b"a"),
    delta(b"D" * 300),
    delta(b"x" * 5000),
    delta(rb"\"usage\": 1"),
    chunk(b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":9,"total_tokens":16}}\n\n'),
    chunk(b'data: {"error":{"message":"no"}}\n\n'),
    chunk(b'data: {"choices":[{"index":0,"delta":{"content":"two lines'),
    chunk(b' of one event"}}]}\n\n'),
    chunk(b": comment\r\n\r\n"),
    chunk(b"data: a\n\ndata: b\n\n"),
    b"005;x=y\r\nda\n\n\n\r\n",
    b"04\r\nda\n\n\r\n",
    b"4\r\nda\n\nX\n",  # no chunk
    chunk(b"\n\n"),
])  # fmt: skip


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Pieces of a stream: events with markers among them, cut and joined at random."""
    events = [delta(b"1"), delta(b"2"), delta(b"3"), *draw(st.lists(EVENTS, max_size=12)), delta(b"4"), delta(b"5")]
    pieces = []
    for event in [*events, DONE]:
        how = draw(st.integers(0, 5))
        if how == 0 and pieces[3:]:
            pieces[-1] += event
        elif how == 1 and pieces[3:]:
            at = draw(st.integers(1, len(event) - 1))
            pieces += [event[:at], event[at:]]
        else:
            pieces.append(event)
    return pieces


@settings(max_examples=examples(150), deadline=None)
@example([delta(b"1"), delta(b"2"), delta(b"3"), chunk(b"data: half of an event")], 4)
@given(streams(), st.none() | st.integers(4, 20))
def test_any_stream_is_the_same_either_way(pieces: list[bytes], cut: int | None) -> None:
    by_transports, by_pump, _ = both(pieces[:cut], cut=cut is not None)
    assert by_pump == by_transports


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(st.sampled_from([20, 3000, 60_000]), min_size=20, max_size=40))
def test_a_client_that_takes_little_gets_the_same(sizes: list[int]) -> None:
    pieces = [delta(b"1"), delta(b"2"), *(delta(b"x" * size) for size in sizes), DONE]
    by_transports, by_pump, _ = both(pieces, tiny=True)
    # How many reads bring a large event differs with how much the engine's socket takes at once.
    assert by_pump._replace(reads=0) == by_transports._replace(reads=0)


def test_events_that_need_no_reading_are_pumped() -> None:
    pieces = [delta(b"%d" % number) for number in range(40)]
    by_transports, by_pump, lent = both([*pieces, DONE])
    assert by_pump == by_transports
    assert (by_pump.outcome, by_pump.reads) == ("ok", 41)
    assert lent > 30


@pytest.mark.parametrize("closing", [False, True])
def test_a_pumped_stream_leaves_its_connection_as_its_head_says(closing: bool) -> None:
    pieces = [delta(b"%d" % number) for number in range(9)]
    by_transports, by_pump, lent = both([*pieces, DONE], closing=closing)
    assert by_pump == by_transports
    assert (by_pump.outcome, by_pump.kept, lent > 3) == ("ok", not closing, True)


def test_none_is_counted_whatever_the_headers() -> None:
    """A wheel that is built with 3.12 or 3.13 serves 3.11 too, where None that nobody counts ends the process."""
    assert "RETURN_NONE" not in (ROOT / "gateway/native/pump.c").read_text()


@pytest.mark.slow
def test_the_sanitizers_find_nothing(tmp_path: Path) -> None:
    library = tmp_path / "pump.so"
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-fsanitize=address,undefined"]
    gcc = shutil.which("gcc") or "gcc"
    include = f"-I{sysconfig.get_paths()['include']}"
    source = ROOT / "gateway/native/pump.c"
    compiled = [gcc, *flags, "-fno-sanitize-recover", "-fPIC", "-shared", include, str(source), "-o", str(library)]
    subprocess.run(compiled, check=True, timeout=60)
    runtimes = [
        subprocess.run([gcc, f"-print-file-name={name}.so"], check=True, capture_output=True, text=True, timeout=60)
        for name in ("libasan", "libubsan")
    ]
    preloaded = " ".join(run.stdout.strip() for run in runtimes)
    done = subprocess.run(
        [sys.executable, "-c", SANITIZED, str(library)],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": preloaded, "ASAN_OPTIONS": "detect_leaks=0"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# The tests of this file over a library that is not in its place.
SANITIZED = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("gateway.native.pump", sys.argv[1])
sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
import pytest
plugins = ["-p", "no:cacheprovider", "-p", "no:xdist"]
sys.exit(pytest.main(["-q", "--hypothesis-profile=quick", *plugins, "-m", "not slow", "tests/wire/test_pump.py"]))
"""
