"""Subscriptions to engines' cache events, over real ZeroMQ sockets: arrival, loss, reconnection, an orderly end."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
import zmq

from gateway.core.engines.cache_age import CacheAge
from gateway.core.engines.engine import Engine
from gateway.core.policy.policy import EngineEntry, FleetPolicy, Policy
from gateway.decider import cache_events
from gateway.decider.cache_events import LARGEST, QUEUED, KvEvents
from gateway.decider.loading import Configuration
from gateway.serve.assembly import Gateway
from loadtest.processes import Child
from tests.e2e.children import SimEngine, post

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

WITHIN = 60.0  # seconds any of these tests may wait for something


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: a unix socket's has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="weir-") as path:
        yield Path(path)


class Publisher:
    """What publishes in an engine: a PUB socket that listens."""

    def __init__(self, url: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PUB)
        self.socket.bind(url)
        self.number = 0

    def send(self, *events: Any, topic: bytes = b"") -> None:
        self.frames(topic, self.number.to_bytes(8), msgspec.msgpack.encode([1.5, events, 0]))
        self.number += 1

    def frames(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def store(self, block: int, topic: bytes = b"") -> None:
        self.send({"type": "BlockStored", "block_hashes": [block], "block_size": 16, "medium": "GPU"}, topic=topic)

    def close(self) -> None:
        self.context.destroy(linger=0)


class Scene:
    """An engine, and the gateway's subscriptions."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.engine = Engine("e", "http://127.0.0.1:1", Policy())
        self.clock = asyncio.get_running_loop().time
        self.events = KvEvents(self.clock)
        self._publishers: list[Publisher] = []

    def publisher(self, more: str = "") -> Publisher:
        made = Publisher(self.url + more)
        self._publishers.append(made)
        return made

    def close(self) -> None:
        for publisher in self._publishers:
            publisher.close()

    @property
    def cache_age(self) -> CacheAge:
        assert self.engine.cache.age is not None
        return self.engine.cache.age

    async def until(self, holds: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
        async with asyncio.timeout(WITHIN):
            while not holds():
                meanwhile()
                await asyncio.sleep(0.005)

    async def join(self, publisher: Publisher) -> None:
        """Until what is published arrives: what a publisher sends before it knows of a subscriber is lost. Then nothing
        is on its way any more."""
        blocks = iter(range(10**6, 10**7))
        await self.until(lambda: self.cache_age.live, lambda: publisher.store(next(blocks)))
        await self.until(lambda: self.cache_age.expected == publisher.number)


def play(folder: Path, scene: Callable[[Scene], Awaitable[None]]) -> None:
    """After the scene its subscriptions must end and leave nothing behind."""

    async def main() -> None:
        made = Scene(f"ipc://{folder}/e")
        try:
            await scene(made)
        finally:
            made.close()
            async with asyncio.timeout(60.0):
                await made.events.aclose()
        assert made.engine.cache.age is None
        assert asyncio.all_tasks() == {asyncio.current_task()}

    uvloop.run(main())  # as the gateway


def test_what_is_published_arrives(folder: Path) -> None:
    async def scenario(scene: Scene) -> None:
        scene.events.listen(scene.engine, scene.url)  # before there is anybody to listen to
        await asyncio.sleep(0)
        publisher = scene.publisher()
        assert not scene.cache_age.live
        await scene.join(publisher)
        known = scene.cache_age.cached
        publisher.store(1)
        await scene.until(lambda: scene.cache_age.cached == known + 1)
        publisher.send({"type": "AllBlocksCleared"})
        await scene.until(lambda: scene.cache_age.cached == 0)
        assert scene.cache_age.live

    play(folder, scenario)


def test_a_connection_that_is_lost_is_noticed_and_made_again(folder: Path) -> None:
    async def scenario(scene: Scene) -> None:
        publisher = scene.publisher()
        scene.events.listen(scene.engine, scene.url)
        await scene.join(publisher)
        for block in range(1000):
            publisher.store(block)
        await scene.until(lambda: scene.cache_age.cached >= 1000)
        publisher.close()
        await scene.until(lambda: not scene.cache_age.live)
        assert scene.cache_age.cut == -math.inf
        died = scene.clock()
        publisher = scene.publisher()
        await scene.join(publisher)
        assert scene.cache_age.cut > died, "a new process has cached nothing"

    play(folder, scenario)


def test_more_than_the_gateway_can_follow_is_a_gap_and_no_memory(folder: Path) -> None:
    async def scenario(scene: Scene) -> None:
        publisher = scene.publisher()
        publisher.socket.sndhwm = QUEUED
        scene.events.listen(scene.engine, scene.url)
        await scene.join(publisher)

        def missed() -> int:
            """Messages that came no more: each stores one block."""
            return scene.cache_age.expected - scene.cache_age.cached

        before = missed()
        for block in range(20 * QUEUED):  # in the loop's own thread: the gateway cannot follow, ZeroMQ's threads can
            publisher.store(block, topic=bytes(10_000))
            if block % 32 == 0:
                time.sleep(0.001)  # noqa: ASYNC251 # see above
        await scene.until(lambda: missed() > before, lambda: publisher.store(random.getrandbits(63)))
        assert scene.cache_age.live

    play(folder, scenario)


def test_a_subscription_ends_while_messages_come(folder: Path) -> None:
    async def scenario(scene: Scene) -> None:
        publisher = scene.publisher()
        for _ in range(20):
            scene.events.listen(scene.engine, scene.url)
            await scene.join(publisher)
            for block in range(QUEUED):
                publisher.store(block)
            cached = scene.cache_age.cached
            await scene.until(lambda before=cached: scene.cache_age.cached > before)
            scene.events.forget(scene.engine)  # the next message is about to be received

    play(folder, scenario)


def test_what_cannot_be_read_does_no_harm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_events, "AGAIN", 0.3)

    async def scenario(scene: Scene) -> None:
        publisher = scene.publisher()
        scene.events.listen(scene.engine, scene.url)
        await scene.join(publisher)
        publisher.frames(b"\xc1")
        await scene.until(lambda: bool(scene.cache_age.problem))
        assert scene.cache_age.cached == 0
        publisher.store(1)
        await scene.until(lambda: scene.cache_age.cached == 1)
        assert not scene.cache_age.problem
        publisher.frames(b"", b"\0" * 8, bytes(LARGEST + 1))  # costs the connection
        await scene.until(lambda: not scene.cache_age.live)
        await scene.join(publisher)

    play(folder, scenario)


def test_an_engine_is_listened_to_as_the_policy_says(folder: Path) -> None:
    async def scenario(scene: Scene) -> None:
        scene.events.listen(scene.engine, None)
        assert scene.engine.cache.age is None
        scene.events.listen(scene.engine, scene.url)
        first = scene.cache_age
        scene.events.listen(scene.engine, scene.url)
        assert scene.cache_age is first
        scene.events.listen(scene.engine, scene.url + "2")
        assert scene.cache_age is not first
        publisher = scene.publisher("2")
        await scene.join(publisher)
        scene.events.listen(scene.engine, None)
        scene.events.forget(scene.engine)
        assert scene.engine.cache.age is None
        scene.events.listen(scene.engine, scene.url + "2")
        await scene.join(publisher)

    play(folder, scenario)


def test_a_reload_begins_and_ends_subscriptions(folder: Path) -> None:
    def policy(kv_events: str | None) -> Policy:
        return Policy(fleet=FleetPolicy(engines=(EngineEntry(url="http://127.0.0.1:9", kv_events=kv_events),)))

    async def main() -> None:
        gateway = Gateway(Configuration(policy(None)), [], None, random.Random(1))
        (engine,) = gateway.fleet
        assert (gateway.engines.kv_events, engine.cache.age) == (None, None)
        gateway.apply(Configuration(policy(f"ipc://{folder}/e")))
        assert engine.cache.age is not None
        gateway.apply(Configuration(policy(None)))
        assert engine.cache.age is None
        gateway.apply(Configuration(policy(f"ipc://{folder}/e")))
        gateway.apply(Configuration(Policy()))
        assert (engine.cache.age, list(gateway.fleet)) == (None, [])
        await gateway.aclose()

    asyncio.run(main())


# -- processes --------------------------------------------------------------------------------------------------------


def words(*blocks: int) -> dict[str, Any]:
    """A chat of a few hundred tokens, its words those of `blocks`."""
    text = " ".join(f"{block:063d}" for block in blocks for _ in range(16))
    return {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 1}


def test_a_simulated_engine_publishes_what_becomes_of_its_cache(folder: Path, tmp_path: Path) -> None:
    url = f"ipc://{folder}/sim"
    arguments = ("--num-gpu-blocks", "65", "--speed", "20", "--kv-events", url)

    async def scenario(scene: Scene) -> None:
        sim = SimEngine(tmp_path / "one.log", *arguments)

        async def ask(number: int) -> None:
            answer = await asyncio.to_thread(post, f"{sim.url}/v1/chat/completions", words(number))
            assert answer[0] == 200

        with sim.child:
            scene.events.listen(scene.engine, url)
            numbers = itertools.count(100)
            async with asyncio.timeout(WITHIN):
                while scene.cache_age.cached < 16:  # what it publishes before it knows of a subscriber is lost
                    await ask(next(numbers))
                    await asyncio.sleep(0.2)
            assert scene.cache_age.cut == -math.inf
            for number in range(10, 20):  # 17 blocks each: the cache turns over
                await ask(number)
            await scene.until(lambda: scene.cache_age.cut > -math.inf)
            await scene.until(lambda: 32 <= scene.cache_age.cached <= 64)
            evicted = scene.cache_age.cut
            assert evicted <= scene.clock()
            assert (await asyncio.to_thread(post, f"{sim.url}/reset_prefix_cache", {}))[0] == 200
            reset = scene.clock()
            await ask(30)  # what was cleared is told with the next step
            await scene.until(lambda: scene.cache_age.cut >= reset)
            assert not scene.cache_age.problem
        await scene.until(lambda: not scene.cache_age.live)

    play(folder, scenario)


def test_an_address_that_is_taken_is_said(folder: Path, tmp_path: Path) -> None:
    (folder / "e").mkdir()
    argv = [sys.executable, "-m", "loadtest.engine", "--kv-events", f"ipc://{folder}/e"]
    with Child("engine", argv, tmp_path / "log") as child:
        assert child.process.wait(60) == 2
        assert f"cannot publish on ipc://{folder}/e" in child.output()


@pytest.mark.parametrize(
    ("program", "arguments", "told"),
    [
        (
            "gateway.cli",
            ("serve", "--policy", "{policy}"),
            "pip install 'WEIR.whl[kv-events]', or leave kv_events out",
        ),
        ("loadtest.engine", ("--kv-events", "ipc://x"), "--kv-events needs zmq: pip install 'WEIR.whl[kv-events]'"),
    ],
)
def test_without_pyzmq_it_is_said_what_to_install(
    tmp_path: Path, program: str, arguments: tuple[str, ...], told: str
) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("fleet: {engines: [{url: 'http://127.0.0.1:9', kv_events: 'tcp://127.0.0.1:5557'}]}\n")
    given = [each.format(policy=policy) for each in arguments]
    code = f"import sys, runpy; sys.modules['zmq'] = None; sys.argv[1:] = {given}; "
    code += f"runpy.run_module({program!r}, run_name='__main__', alter_sys=True)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (1, 2)
    assert told in done.stderr
    assert "Traceback" not in done.stderr
