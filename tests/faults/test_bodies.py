"""Cost of bodies to other clients: time of the event loop, and memory. Real sockets; the engines are scripted."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import pytest
import uvloop

from gateway.core.policy.policy import BodyPolicy, Budget, Policy
from gateway.core.policy.traffic import Tenant
from gateway.core.request.body_memory import SHARE
from gateway.core.request.call import Call
from gateway.relay import pipeline
from gateway.relay.large_bodies import LARGE, LargeBodies
from gateway.relay.wire.connection import ClientConnection
from gateway.serve.run import Gateway
from tests.faults.scripted import ScriptedEngine, ask, gateway_over, port_of, request, settled


def scenario(
    policy: Policy,
    body: Callable[[Gateway, ScriptedEngine], Awaitable[None]],
    behaviour: str = "good",
    share: float = SHARE,
) -> None:
    """Run `body` over one scripted engine, then assert that nothing is left. `share`: of the memory for bodies, for one
    owner."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(ScriptedEngine(behaviour).running())
            gateway = await stack.enter_async_context(gateway_over([engine], policy))
            gateway.bodies.share = share
            await body(gateway, engine)
            await settled(gateway)

    uvloop.run(main())


def test_a_large_body_is_parsed_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed_by: list[int] = []
    parse = pipeline._parse

    def recorded(*what: Any) -> Call:
        parsed_by.append(threading.get_ident())
        return parse(*what)

    async def body(gateway: Gateway, engine: ScriptedEngine) -> None:
        here = threading.get_ident()
        with ThreadPoolExecutor(1) as parser:
            gateway.pipeline.large = LargeBodies(parser, gateway.pipeline.clock)
            small, large = request(), request(unread="x" * LARGE)
            assert [(await ask(port_of(gateway), each)).status for each in (small, large)] == [200, 200]
            refused = await ask(port_of(gateway), request(unread="x" * LARGE, n=0))
            assert (refused.status, json.loads(refused.body)["error"]["param"]) == (400, "n")
        assert parsed_by[0] == here
        assert len(parsed_by) == 3
        assert here not in parsed_by[1:]
        assert len(engine.requests) == 2

    monkeypatch.setattr(pipeline, "_parse", recorded)
    scenario(Policy(), body)


def test_a_client_that_leaves_while_its_body_is_parsed_is_not_sent_on() -> None:
    begun, go_on = threading.Event(), threading.Event()

    async def body(gateway: Gateway, engine: ScriptedEngine) -> None:
        with ThreadPoolExecutor(1) as parser:
            gateway.pipeline.large = LargeBodies(parser, gateway.pipeline.clock)
            parser.submit(lambda: (begun.set(), go_on.wait(60)))
            assert begun.wait(60)
            asking = asyncio.create_task(ask(port_of(gateway), request(unread="x" * LARGE)))
            async with asyncio.timeout(60):
                while not gateway.pipeline.tasks:
                    await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
            async with asyncio.timeout(60):
                while gateway.pipeline.tasks:
                    await asyncio.sleep(0.001)
            go_on.set()
        assert gateway.metrics.outcomes() == {"client_gone": 1}
        assert engine.requests == []

    scenario(Policy(), body)


@pytest.mark.parametrize(
    ("path", "media", "limit"),
    [
        ("/v1/chat/completions", "data_urls_only", 8000),
        ("/v1/chat/completions", "none", 2000),
        ("/v1/completions", "data_urls_only", 2000),
        ("/v1/audio/transcriptions", "none", 8000),
        ("/ping", "none", pipeline.KEYLESS_BODY),
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_larger_than_its_route_takes_is_refused_unread(path: str, media: str, limit: int, chunked: bool) -> None:
    """By its announced length, or by the first chunk that goes beyond."""
    policy = Policy(body=BodyPolicy(max=2000, max_media=8000, media=media))  # type: ignore[arg-type]  # one of its literals
    length = b"transfer-encoding: chunked\r\n\r\n%x\r\n" if chunked else b"content-length: %d\r\n\r\n"

    async def body(gateway: Gateway, engine: ScriptedEngine) -> None:
        head = b"POST %b HTTP/1.1\r\nhost: localhost\r\n" % path.encode()
        refused = await ask(port_of(gateway), head + length % (limit + 1))
        assert refused.status == 413
        assert f"limit of {limit}".encode() in refused.body
        taken = await ask(port_of(gateway), head + length % limit + b"x" * limit + b"\r\n0\r\n\r\n" * chunked)
        assert taken.status == (200 if path == "/ping" else 400)  # it is no JSON and no form: so it was read

    scenario(policy, body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_body_is_held_until_the_first_byte_of_its_answer(stream: bool) -> None:
    """What an engine is not sent again needs no memory, however long its answer takes."""

    async def body(gateway: Gateway, engine: ScriptedEngine) -> None:
        asking = asyncio.create_task(ask(port_of(gateway), request(stream, unread="x" * 100_000)))
        async with asyncio.timeout(60):
            while not engine.requests:
                await asyncio.sleep(0.001)
            if not stream:
                assert gateway.bodies.held == len(engine.requests[0])
            else:
                while gateway.bodies.held:
                    await asyncio.sleep(0.001)
        (live,) = gateway.pipeline.tasks.values()
        assert live.call is not None
        assert bool(live.call.body) is not stream
        asking.cancel()
        await asyncio.wait([asking])

    scenario(Policy(), body, "stall" if stream else "hang")


def test_who_gives_up_waiting_leaves_no_body_in_the_timers() -> None:
    """Their tickets stay for as long as one with an earlier deadline waits, which may be a day."""

    async def body(gateway: Gateway, engine: ScriptedEngine) -> None:
        port, asking = port_of(gateway), []
        for number in range(1, 6):
            asking.append(asyncio.create_task(ask(port, request(unread="x" * 100_000))))
            async with asyncio.timeout(60):
                while len(gateway.pipeline.tasks) < number:
                    await asyncio.sleep(0.001)
        for each in asking[2:]:
            each.cancel()
        await asyncio.wait(asking[2:])
        async with asyncio.timeout(60):
            while len(gateway.pipeline.tasks) > 2:
                await asyncio.sleep(0.001)
        left = [ticket for *_, ticket in gateway.dispatch.waiting.expiries.tickets if not ticket.waiting]
        assert len(left) == 3
        assert all(ticket.call.body == b"" for ticket in left)
        assert gateway.bodies.held <= 2 * 101_000
        for each in asking[:2]:
            each.cancel()
        await asyncio.wait(asking[:2])

    scenario(Policy(budget=Budget(max_concurrency=1)), body, "hang")


def test_bodies_that_wait_are_bounded_together() -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine) -> None:
        port = port_of(gateway)
        asking = [asyncio.create_task(ask(port, request(unread="x" * 100_000))) for _ in range(10)]
        done, waiting = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        while len(done) < 7:
            more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            done |= more
        assert {each.result().headers["x-weir-reason"] for each in done} == {"bodies"}
        assert {each.result().status for each in done} == {503}
        assert len(gateway.pipeline.tasks) == 3
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)

    scenario(Policy(budget=Budget(max_concurrency=1), body=BodyPolicy(memory=350_000)), body, "hang", 1.0)


def test_a_body_is_waited_for_no_longer_than_its_callers_deadline() -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine) -> None:
        head = request().replace(b"host: localhost\r\n", b"host: localhost\r\nx-weir-deadline-ms: 100\r\n")[:-1]
        refused = await ask(port_of(gateway), head)
        assert (refused.status, json.loads(refused.body)["error"]["code"]) == (504, "deadline_exceeded")
        assert engine.requests == []

    scenario(Policy(), body)


def test_a_streams_body_may_take_longer_than_its_sdk_waits_for_a_byte_of_the_answer() -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine) -> None:
        asked = request(True).replace(b"localhost\r\n", b"localhost\r\nx-stainless-read-timeout: 0.1\r\n")
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gateway))
        writer.write(asked[:-1])
        await asyncio.sleep(0.3)
        writer.write(asked[-1:])
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        await reader.readuntil(b"[DONE]")
        writer.transport.abort()

    scenario(Policy(), body)


def test_without_a_key_where_keys_exist_nothing_of_a_body_is_held() -> None:
    keyed = Policy(tenants={"acme": Tenant(keys=(hashlib.sha256(b"k").hexdigest(),))})

    async def body(gateway: Gateway, engine: ScriptedEngine) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port_of(gateway))
        writer.write(request(unread="x" * 250_000)[:200_000])
        async with asyncio.timeout(60):
            while not gateway.metrics.outcomes():
                await asyncio.sleep(0.001)
        assert gateway.metrics.outcomes() == {"unauthorized": 1}
        assert gateway.bodies.held == 0
        (connection,) = gateway.server._shared.open
        assert isinstance(connection, ClientConnection)
        assert (connection.requests._buffer, connection.requests._body, connection.requests._request) == (
            b"",
            None,
            None,
        )
        writer.transport.abort()

    scenario(keyed, body)


def test_tenants_have_a_share_each_and_so_has_who_has_no_key() -> None:
    keyed = Policy(
        tenants={
            "anonymous": Tenant(),
            "acme": Tenant(keys=(hashlib.sha256(b"a").hexdigest(),)),
            "zeta": Tenant(keys=(hashlib.sha256(b"z").hexdigest(),)),
        },
        body=BodyPolicy(memory=450_000),
        budget=Budget(max_concurrency=1),
    )

    async def body(gateway: Gateway, engine: ScriptedEngine) -> None:
        port, plain = port_of(gateway), request(unread="x" * 100_000)
        for number, key in enumerate((b"", b"authorization: Bearer a\r\n", b"authorization: Bearer z\r\n"), 1):
            asked = plain.replace(b"host: localhost\r\n", b"host: localhost\r\n" + key)
            waiting.append(asyncio.create_task(ask(port, asked)))
            async with asyncio.timeout(60):
                while len(gateway.pipeline.tasks) < number:
                    await asyncio.sleep(0.001)
            refused = await ask(port, asked)
            assert (refused.status, refused.headers["x-weir-reason"]) == (503, "bodies")
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)
        assert gateway.bodies.refused == {"memory": 0, "share": 3}

    waiting: list[asyncio.Task[Any]] = []
    scenario(keyed, body, "hang", share=0.34)
