"""What bodies may cost others: time of the event loop, and memory. Real sockets; the engines are scripted."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

import pytest
import uvloop

from gateway.core.call import Call
from gateway.core.policy import Body, Policy
from gateway.pipeline import READ_HERE, Pipeline
from gateway.serve import Gateway
from tests.faults.scripted import ScriptedEngine, ask, gateway_over, port_of, request, settled


def scenario(
    policy: Policy, body: Callable[[Gateway, ScriptedEngine], Awaitable[None]], behaviour: str = "good"
) -> None:
    """Run `body` over one scripted engine, then assert that nothing is left."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(ScriptedEngine(behaviour).running())
            gateway = await stack.enter_async_context(gateway_over([engine], policy))
            await body(gateway, engine)
            await settled(gateway)

    uvloop.run(main())


def test_a_large_body_is_parsed_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed_by: list[int] = []
    parse = Pipeline._parse

    def recorded(*what: Any) -> Call:
        parsed_by.append(threading.get_ident())
        return parse(*what)

    async def body(gateway: Gateway, engine: ScriptedEngine) -> None:
        here = threading.get_ident()
        with ThreadPoolExecutor(1) as parser:
            gateway.pipeline.parser = parser
            small, large = request(), request(unread="x" * READ_HERE)
            assert [(await ask(port_of(gateway), each)).status for each in (small, large)] == [200, 200]
            refused = await ask(port_of(gateway), request(unread="x" * READ_HERE, n=0))
            assert (refused.status, json.loads(refused.body)["error"]["param"]) == (400, "n")
        assert parsed_by[0] == here
        assert len(parsed_by) == 3
        assert here not in parsed_by[1:]
        assert len(engine.requests) == 2

    monkeypatch.setattr(Pipeline, "_parse", recorded)
    scenario(Policy(), body)


def test_a_client_that_leaves_while_its_body_is_parsed_is_not_sent_on() -> None:
    begun, go_on = threading.Event(), threading.Event()

    async def body(gateway: Gateway, engine: ScriptedEngine) -> None:
        with ThreadPoolExecutor(1) as parser:
            gateway.pipeline.parser = parser
            parser.submit(lambda: (begun.set(), go_on.wait(5)))
            assert begun.wait(5)
            asking = asyncio.create_task(ask(port_of(gateway), request(unread="x" * READ_HERE)))
            async with asyncio.timeout(5):
                while not gateway.pipeline.tasks:
                    await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
            async with asyncio.timeout(5):
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
        ("/ping", "none", 0),
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_larger_than_its_route_takes_is_refused_unread(path: str, media: str, limit: int, chunked: bool) -> None:
    """By its announced length, or by the first chunk that goes beyond."""
    policy = Policy(body=Body(max=2000, max_media=8000, media=media))  # type: ignore[arg-type]  # one of its literals
    length = b"transfer-encoding: chunked\r\n\r\n%x\r\n" if chunked else b"content-length: %d\r\n\r\n"

    async def body(gateway: Gateway, engine: ScriptedEngine) -> None:
        head = b"POST %b HTTP/1.1\r\nhost: x\r\n" % path.encode()
        refused = await ask(port_of(gateway), head + length % (limit + 1))
        assert refused.status == 413
        assert f"limit of {limit}".encode() in refused.body
        if limit:
            taken = await ask(port_of(gateway), head + length % limit + b"x" * limit + b"\r\n0\r\n\r\n" * chunked)
            assert taken.status == 400  # it is no JSON and no form: so it was read

    scenario(policy, body)
