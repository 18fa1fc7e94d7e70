"""Providers over real sockets: which calls leave the house, what goes out, and what a provider may do to us."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, closing
from email.utils import formatdate, parsedate_to_datetime
from typing import Any

import pytest
import uvloop
from msgspec import structs

from gateway.core.engines.breaker import BreakerState
from gateway.core.engines.engine import Engine
from gateway.core.engines.origin import origin_of
from gateway.core.money.tariff import MICRO, Tariff
from gateway.core.policy.policy import EngineEntry, Policy, Routing
from gateway.core.policy.providers import MoneyLimit, Provider
from gateway.core.policy.routes import ModelRoute, RouteMember
from gateway.core.policy.traffic import Tenant, TrafficClass, default_classes
from gateway.decider.loading import Configuration
from gateway.serve.assembly import Gateway
from gateway.shared.vllm.answers import ModelCard
from gateway.upstream.client import Client, ClientSettings, EngineError
from gateway.upstream.names import Names
from tests import over_frames
from tests.faults import scripted
from tests.faults.scripted import ScriptedEngine, ask, open_fds, port_of, request, settled

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

ROUTE = ModelRoute(members=(RouteMember(model="m"),), fallback=("mini",))
CLASSES = default_classes() | {"strict": TrafficClass(max_queue=0)}  # a full engine refuses it at once
Body = Callable[[Gateway, ScriptedEngine, ScriptedEngine], Awaitable[None]]


def policy_of(port: int, **more: Any) -> Policy:
    fields: dict[str, Any] = {
        "url": f"http://127.0.0.1:{port}/v1",
        "key_file": "cloud.key",
        "models": {"mini": "small-model-name"},
        "prices": Tariff(MICRO, MICRO, 2 * MICRO),
        "budget": (MoneyLimit(10.0, "day"),),
        "tenants": ("anonymous",),
        "classes": ("default", "strict"),
        "allow_private": True,
    }
    provider = Provider(**(fields | more))
    tenants = {"anonymous": Tenant(), "acme": Tenant()}
    return Policy(
        models={"support": ROUTE},
        providers={"cloud": provider},
        classes=CLASSES,
        tenants=tenants,
        routing=Routing(hold_unserved=0.5),
    )


@pytest.fixture(params=["direct", "frames"])
def over(request: pytest.FixtureRequest) -> Callable[..., None]:
    gateway_over = scripted.gateway_over if request.param == "direct" else over_frames.gateway_over

    def scenario(
        body: Body, own: str = "good", outside: str = "good", rules: Mapping[str, Any] | None = None, **more: Any
    ) -> None:
        """Run `body` over one engine, which serves m, and one provider, which serves mini. `rules`: of the policy;
        `more`: of the provider."""

        async def main() -> None:
            async with AsyncExitStack() as stack:
                engine = await stack.enter_async_context(ScriptedEngine(own).running())
                provider = await stack.enter_async_context(ScriptedEngine(outside).running())
                policy = structs.replace(policy_of(provider.port, **more), **(rules or {}))
                gateway = await stack.enter_async_context(gateway_over([engine], policy))
                await body(gateway, engine, provider)
                await settled(gateway)
                money = gateway.limits.money
                assert not any(purse.window.reserved for _, _, purse in money.purses())

        uvloop.run(main())

    return scenario


def own_of(gateway: Gateway) -> Engine:
    return next(engine for engine in gateway.fleet if not engine.provider)


def outside_of(gateway: Gateway) -> Engine:
    return next(engine for engine in gateway.fleet if engine.provider)


def asked(model: str = "support", headers: bytes = b"", stream: bool = False, **more: object) -> bytes:
    payload = request(stream, model=model, **more)
    return payload.replace(b"host: localhost\r\n", b"host: localhost\r\n" + headers, 1)


def spent(gateway: Gateway) -> int:
    """Micro-units that calls have cost."""
    return sum(micro for micro, _ in gateway.limits.money.totals.values())


# -- what goes out ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_provider_gets_its_own_key_name_and_fields(over: Callable[..., None], stream: bool) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        own_of(gateway).down()
        extras = {"top_k": 5, "min_p": 0.1, "temperature": 0.5, "service_tier": "auto", "stream_options": None}
        headers = b"authorization: Bearer of-the-caller\r\nx-secret: 1\r\ntraceparent: 00-1-2-01\r\n"
        answer = await ask(port_of(gateway), asked(headers=headers, stream=stream, **extras))
        assert answer.status == 200
        assert answer.headers["x-weir-model"] == "mini"
        assert answer.headers["x-weir-engine"] == "cloud"
        assert answer.headers["x-weir-dropped"] == "top_k, min_p, service_tier"
        assert b"data: [DONE]" in answer.body if stream else json.loads(answer.body)
        (head,) = provider.heads
        assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
        assert b"\r\nauthorization: Bearer key-of-cloud\r\n" in head
        assert b"of-the-caller" not in head
        assert b"x-secret" not in head
        assert b"traceparent" not in head
        sent = json.loads(provider.requests[0])
        assert sent.pop("messages")
        usage = {"stream_options": {"include_usage": True}} if stream else {}
        assert sent == {"model": "small-model-name", "max_tokens": 10, "stream": stream, "temperature": 0.5, **usage}
        assert not engine.requests
        await settled(gateway)
        assert spent(gateway) == 7 * 1 + 3 * 2
        assert gateway.dispatch.routes.resolved == {("support", "mini", "spilled"): 1}

    over(body)


def test_an_answer_without_a_limit_is_bounded(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        own_of(gateway).down()
        assert (await ask(port_of(gateway), asked(max_tokens=None))).status == 200
        assert json.loads(provider.requests[0])["max_completion_tokens"] == 2048

    over(body)


# -- who may leave ----------------------------------------------------------------------------------------------------


def test_no_call_leaves_while_a_member_serves_in_time(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        for number in range(20):
            answer = await ask(port_of(gateway), asked(messages=[{"role": "user", "content": str(number)}]))
            assert answer.headers["x-weir-model"] == "m"
        assert not provider.heads

    over(body)


@pytest.mark.parametrize(
    ("more", "headers", "payload"),
    [
        ({"tenants": ()}, b"", {}),
        ({"tenants": ("acme",)}, b"", {}),
        ({"classes": ()}, b"", {}),
        ({"classes": ("batch",)}, b"", {}),
        ({"spill": "never"}, b"", {}),
        ({}, b"x-weir-fallback: none\r\n", {}),
        ({}, b"x-weir-class: interactive\r\n", {}),
        ({}, b"", {"tools": [{"type": "web_search"}]}),
        ({"budget": (MoneyLimit(0.01, "day"),)}, b"", {"max_tokens": 100_000}),
    ],
)
def test_what_may_not_leave_does_not(
    over: Callable[..., None], more: dict[str, Any], headers: bytes, payload: dict[str, object]
) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        own_of(gateway).down()
        lines = headers + b"x-weir-deadline-ms: 200\r\n"
        assert (await ask(port_of(gateway), asked(headers=lines, **payload))).status in (503, 504)
        if more.get("spill") != "never" and not headers:
            direct = await ask(port_of(gateway), asked("mini", **payload))  # at once: it needs no deadline
            assert direct.status == (429 if "budget" in more else 404)
        assert not provider.heads

    over(body, **more)


def test_other_routes_are_not_a_providers(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        for path, more in (("embeddings", {"input": "x"}), ("responses", {"input": "x"}), ("rerank", {})):
            payload = json.dumps({"model": "mini", **more, **({"query": "a", "documents": ["b"]} if not more else {})})
            head = f"POST /v1/{path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(payload)}\r\n\r\n"
            answer = await ask(port_of(gateway), (head + payload).encode())
            assert answer.status == 404, path
        assert not provider.heads

    over(body)


def test_its_name_is_there_for_its_tenants_alone(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        listed = await ask(port_of(gateway), b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert {model["id"] for model in json.loads(listed.body)["data"]} == {"m", "support"}

    over(body, tenants=("acme",))

    async def known(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        listed = await ask(port_of(gateway), b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert {model["id"] for model in json.loads(listed.body)["data"]} == {"m", "mini", "support"}
        answer = await ask(port_of(gateway), asked("mini"))
        assert answer.status == 200
        assert "x-weir-model" not in answer.headers

    over(known, spill="never")


@pytest.mark.parametrize(("spill", "status"), [("late", 200), ("errors", 503)])
def test_a_full_house_is_late_and_not_down(over: Callable[..., None], spill: str, status: int) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        own_of(gateway).ledger.slots = own_of(gateway).ledger.max_slots = 1
        running = asyncio.create_task(ask(port_of(gateway), asked("m")))  # to the end of the test
        while not engine.requests:
            await asyncio.sleep(0.001)
        answer = await ask(port_of(gateway), asked(headers=b"x-weir-class: strict\r\n"))
        assert (answer.status, len(provider.heads)) == (status, status == 200)
        running.cancel()
        await asyncio.wait([running])

    over(body, own="hang", spill=spill)


@pytest.mark.parametrize("spill", ["late", "errors"])
def test_a_call_that_every_engine_has_failed_goes_out(over: Callable[..., None], spill: str) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        answer = await ask(port_of(gateway), asked())
        assert (answer.status, answer.headers["x-weir-model"]) == (200, "mini")
        assert (len(engine.heads), len(provider.heads)) == (1, 1)
        assert json.loads(provider.requests[0])["model"] == "small-model-name"

    over(body, own="503", spill=spill)


def test_a_reload_ends_a_provider(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        own_of(gateway).down()
        assert (await ask(port_of(gateway), asked("mini"))).status == 200
        gateway.apply(Configuration(structs.replace(gateway.policy, providers={}, models={})))
        assert (await ask(port_of(gateway), asked("mini"))).status == 404
        assert len(provider.heads) == 1
        assert [engine.provider for engine in gateway.fleet] == [""]

    over(body)


# Two minutes after the moment that scripted engines have on every answer.
LATER = formatdate(parsedate_to_datetime(scripted.NOW.decode()).timestamp() + 120, usegmt=True)


# -- what a provider may do -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", ["120", LATER])
@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_obeyed(over: Callable[..., None], status: int, after: str) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        answer = await ask(port_of(gateway), asked("mini"))
        assert answer.status in (502, 503)
        assert b"scripted" not in answer.body
        breaker = outside_of(gateway).breaker
        assert breaker.state is BreakerState.OPEN
        assert 100 < breaker.probe_at - gateway.clock() <= 121
        provider.behaviour = "good"
        assert (await ask(port_of(gateway), asked("mini"))).status == 503
        assert len(provider.heads) == 1
        assert spent(gateway) == 0

    over(body, outside=f"{status} after {after}")


@pytest.mark.parametrize("behaviour", ["302", "307", "401", "402", "403", "404", "429", "500", "502"])
def test_what_it_says_of_us_is_no_answer(over: Callable[..., None], behaviour: str) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        answer = await ask(port_of(gateway), asked("mini"))
        assert answer.status == 502
        assert b"scripted" not in answer.body
        assert "key-of-cloud" not in answer.body.decode()
        assert outside_of(gateway).breaker.failures >= 1
        assert spent(gateway) == 0

    over(body, outside=behaviour)


def test_a_bad_request_is_the_callers(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        answer = await ask(port_of(gateway), asked("mini"))
        assert answer.status == 400
        await settled(gateway)
        assert outside_of(gateway).breaker.failures == 0
        assert spent(gateway) == 0

    over(body, outside="400")


def test_failures_open_its_breaker_alone(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        for _ in range(8):
            await ask(port_of(gateway), asked("mini"))
        assert outside_of(gateway).breaker.state is BreakerState.OPEN
        heads = len(provider.heads)
        assert (await ask(port_of(gateway), asked("mini"))).status == 503
        assert len(provider.heads) == heads
        assert (await ask(port_of(gateway), asked("support"))).status == 200
        assert own_of(gateway).breaker.state is BreakerState.CLOSED

    over(body, outside="die_before_headers")


def test_a_stream_that_breaks_off_ends_with_an_error(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        answer = await ask(port_of(gateway), asked("mini", stream=True))
        assert answer.status == 200
        assert b'"error"' in answer.body
        assert b"[DONE]" not in answer.body
        await settled(gateway)
        assert spent(gateway) > 0

    over(body, outside="die_mid_body")


def test_a_provider_that_hangs_is_given_up_at_the_deadline(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        answer = await ask(port_of(gateway), asked("mini", headers=b"x-weir-deadline-ms: 150\r\n"))
        assert answer.status == 504
        async with asyncio.timeout(60):
            while provider.open:
                await asyncio.sleep(0.001)

    over(body, outside="hang")


def test_a_caller_that_leaves_ends_the_call_at_the_provider(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        call = asyncio.create_task(ask(port_of(gateway), asked("mini", stream=True)))
        while not provider.heads:
            await asyncio.sleep(0.001)
        call.cancel()
        await asyncio.wait([call])
        async with asyncio.timeout(60):
            while provider.open:
                await asyncio.sleep(0.001)

    over(body, outside="stall")


# -- its address ------------------------------------------------------------------------------------------------------


class Moving(Names):
    """Name servers by which a host leads elsewhere from its second look-up on."""

    def __init__(self, *addresses: str) -> None:
        super().__init__()
        self._left: Iterator[str] = iter(addresses)

    async def addresses(self, host: str) -> tuple[str, ...]:
        return (next(self._left),)


def test_no_private_address_is_connected_to() -> None:
    async def main() -> None:
        fds = open_fds()
        async with ScriptedEngine("good").running() as provider:
            url = f"http://api.example.com:{provider.port}/v1"
            for address in (
                "127.0.0.1",
                "::1",
                "10.0.0.1",
                "169.254.169.254",
                "::ffff:127.0.0.1",
                "fe80::1",
            ):
                client = Client(
                    origin_of("provider:cloud", url), ClientSettings(network="public"), names=Moving(address)
                )
                with closing(client), pytest.raises(EngineError, match="no public address") as caught:
                    await client.send(b"POST", b"/chat/completions", b"", b"{}", timeout=60.0)
                assert caught.value.before_bytes
            assert not provider.heads
            client = Client(origin_of("provider:cloud", url), ClientSettings(), names=Moving("127.0.0.1"))
            with closing(client), closing(await client.send(b"POST", b"/x", b"", b"{}", timeout=60.0)):
                assert provider.heads[0].startswith(b"POST /v1/x ")
        assert open_fds() <= fds + 2

    asyncio.run(main())


@pytest.mark.parametrize(
    ("host", "path", "shown"),
    [
        ("api.anthropic.com", b"/messages", b"x-api-key: k3y"),
        ("api.anthropic.com", b"/chat/completions", b"authorization: Bearer k3y"),
        ("api.example.com", b"/messages", b"authorization: Bearer k3y"),
    ],
)
def test_a_provider_gets_its_key_as_its_api_wants_it(host: str, path: bytes, shown: bytes) -> None:
    async def main() -> None:
        async with ScriptedEngine("good").running() as provider:
            origin = origin_of("provider:cloud", f"http://{host}:{provider.port}/v1")
            client = Client(origin, ClientSettings(), api_key="k3y", names=Moving("127.0.0.1"))
            with closing(client), closing(await client.send(b"POST", path, b"", b"{}", timeout=60.0)):
                lines = provider.heads[0].split(b"\r\n")
            assert [line for line in lines if line.endswith(b"k3y")] == [shown]

    asyncio.run(main())


def test_a_gateway_without_the_permission_goes_to_no_private_address(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        answer = await ask(port_of(gateway), asked("mini"))
        assert answer.status == 502
        assert not provider.heads
        assert outside_of(gateway).health.up

    over(body, allow_private=False)


def test_a_reload_moves_a_provider() -> None:
    async def main() -> None:
        async with (
            ScriptedEngine("good").running() as engine,
            ScriptedEngine("good").running() as before,
            ScriptedEngine("good").running() as after,
        ):
            policy = policy_of(before.port)
            async with scripted.gateway_over([engine], policy) as gateway:
                assert (await ask(port_of(gateway), asked("mini"))).status == 200
                gateway.apply(
                    Configuration(policy_of(after.port, models={"mini": "other", "nano": "n"}), {"cloud": "new-key"})
                )
                assert (await ask(port_of(gateway), asked("nano"))).status == 200
                assert (len(before.heads), len(after.heads)) == (1, 1)
                assert b"Bearer new-key\r\n" in after.heads[0]
                await settled(gateway)

    uvloop.run(main())


def test_an_engine_may_have_a_providers_name() -> None:
    async def main() -> None:
        async with ScriptedEngine("good").running() as engine, ScriptedEngine("good").running() as provider:
            gateway_policy = policy_of(provider.port)
            fleet = structs.replace(gateway_policy.fleet, engines=(EngineEntry(url=engine.url, name="cloud"),))
            policy = structs.replace(gateway_policy, fleet=fleet, retries=0.0)
            async with scripted.gateway_over([], policy) as gateway:
                gateway.fleet.has_models(own_of(gateway), [ModelCard(id="m")])
                assert len({engine.label for engine in gateway.fleet}) == 2
                assert (await ask(port_of(gateway), asked("m"))).status == 200
                assert not provider.heads

    uvloop.run(main())
