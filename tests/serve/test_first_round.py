"""Start of a gateway: calls that come before its engines were checked wait, and are not refused."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable

import httpx
import pytest
from msgspec import structs

from gateway.core.policy.policy import EngineEntry, Policy
from gateway.core.policy.traffic import TrafficClass
from gateway.core.request.record import Record
from gateway.decider.loading import Configuration
from gateway.serve.assembly import Gateway
from gateway.shared.vllm.answers import ModelCard
from tests.plain_http import NOBODY

MODELS = json.dumps({"data": [{"id": "m", "max_model_len": 4096}]}).encode()
ANSWER = json.dumps({"choices": [{"message": {"content": "hi"}}], "usage": {"prompt_tokens": 1}}).encode()
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


class SlowEngine:
    """It answers no health check before `wake` is set. `asked` is set by the first."""

    def __init__(self) -> None:
        self.wake, self.asked = asyncio.Event(), asyncio.Event()
        self.port = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bodies = {"/health": b"", "/v1/models": MODELS, "/v1/chat/completions": ANSWER}
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = next(line for line in head.split("\r\n") if line.startswith("content-length"))
                await reader.readexactly(int(length.partition(":")[2]))
                path = head.split()[1]
                if path == "/health":
                    self.asked.set()
                    await self.wake.wait()
                body = bodies.get(path, b"")
                kind = b"content-type: application/json\r\n"
                writer.write(b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n\r\n%b" % (kind, len(body), body))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


class World:
    def __init__(self, engine: SlowEngine, policy: Policy) -> None:
        self.engine = engine
        self.records: list[Record] = []
        entries = [EngineEntry(url=f"http://127.0.0.1:{engine.port}")]
        self.gateway = Gateway(Configuration(policy), entries, None, random.Random(1), say=lambda _: None)
        observe = self.gateway.pipeline.endings.observe
        self.gateway.pipeline.endings.observe = lambda record: (self.records.append(record), observe(record))[1]

    async def start(self) -> None:
        self.gateway.telemetry.start()
        await self.gateway.server.listen("127.0.0.1:0")
        self.client = httpx.AsyncClient(
            base_url=self.gateway.server.addresses[0], trust_env=False, verify=NOBODY, timeout=60.0
        )

    def call(self, model: str = "m") -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.client.post("/v1/chat/completions", json=BODY | {"model": model}))

    async def held(self, calls: int) -> None:
        """Until so many calls have come."""
        while len(self.gateway.pipeline.tasks) < calls:  # it has no event
            await asyncio.sleep(0.001)


def play(scenario: Callable[[World], Awaitable[None]], policy: Policy | None = None) -> None:
    async def main() -> None:
        engine = SlowEngine()
        listening = await asyncio.start_server(engine.answer, "127.0.0.1", 0)
        engine.port = listening.sockets[0].getsockname()[1]
        # A check may take a quarter of this.
        fleet = structs.replace(Policy().fleet, health=40.0)
        world = World(engine, structs.replace(policy or Policy(), fleet=fleet))
        await world.start()
        try:
            async with asyncio.timeout(60):
                await scenario(world)
        finally:
            engine.wake.set()
            await world.client.aclose()
            await world.gateway.server.drain(0.0)
            await world.gateway.aclose()
            listening.close()
            await listening.wait_closed()
            while len(asyncio.all_tasks()) > 1:  # the engine's ends of its connections
                await asyncio.sleep(0.001)

    asyncio.run(main())


def test_calls_wait_until_the_engines_have_been_asked() -> None:
    async def scenario(world: World) -> None:
        calls = [world.call() for _ in range(20)]
        unknown = world.call("nobody-has-it")
        listing = asyncio.create_task(world.client.get("/v1/models"))
        await world.engine.asked.wait()
        await world.held(21)
        assert not any(call.done() for call in (*calls, unknown, listing))
        world.engine.wake.set()
        assert [(await call).status_code for call in calls] == [200] * 20
        assert (await unknown).status_code == 404
        assert [model["id"] for model in (await listing).json()["data"]] == ["m"]
        assert {record.outcome.value for record in world.records} == {"ok", "not_found"}

    play(scenario)


def test_they_wait_no_longer_than_their_class_does() -> None:
    policy = Policy(classes={"default": TrafficClass(ttft=0.05)}, service_tiers={})

    async def scenario(world: World) -> None:
        answer = await world.call()
        assert answer.status_code == 503
        assert [record.outcome.value for record in world.records] == ["no_engine"]
        assert "Not every engine has been reached yet" in answer.text

    play(scenario, policy)


def test_they_wait_for_an_engine_that_has_told_its_models_and_not_yet_its_health() -> None:
    async def scenario(world: World) -> None:
        await world.engine.asked.wait()
        fleet = world.gateway.fleet
        (engine,) = fleet
        fleet.has_models(engine, [ModelCard(id="m", max_model_len=4096)])
        call = world.call()
        await world.held(1)
        for _ in range(50):
            await asyncio.sleep(0)
        assert not call.done()
        assert not world.records
        world.engine.wake.set()
        assert (await call).status_code == 200

    play(scenario)


@pytest.mark.parametrize("how", ["drain", "leave"])
def test_one_that_waits_so_is_ended_like_any_other(how: str) -> None:
    async def scenario(world: World) -> None:
        call = world.call()
        await world.held(1)
        if how == "drain":
            world.gateway.dispatch.refuse_waiting()
            world.engine.wake.set()
            assert (await call).status_code == 503
            assert [record.outcome.value for record in world.records] == ["draining"]
        else:
            call.cancel()
            await asyncio.wait((call,))
            while not world.records:  # its connection's end is noticed by the loop
                await asyncio.sleep(0.001)
            assert [record.outcome.value for record in world.records] == ["client_gone"]
        assert not world.gateway.dispatch.waiting.turns

    play(scenario)
