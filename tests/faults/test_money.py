"""Money over real sockets: 200 calls at once at the edge of a budget, and a caller that leaves."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable

import pytest
from msgspec import structs

from gateway.core.engines.breaker import BreakerState
from gateway.core.money.tariff import MICRO, Tariff
from gateway.core.policy.file import decode
from gateway.core.policy.policy import BodyPolicy
from gateway.core.policy.providers import MoneyLimit
from gateway.core.policy.snapshot import Current, Snapshot
from gateway.decider import grant
from gateway.decider.loading import Configuration
from gateway.serve.assembly import Gateway
from tests.faults import scripted
from tests.faults.scripted import ScriptedEngine, ask, gateway_over, port_of, settled
from tests.faults.test_providers import asked, outside_of, over, own_of, spent

__all__ = ["over"]  # a fixture
pytestmark = pytest.mark.slow


def test_two_hundred_calls_at_once_spend_no_more_than_the_budget(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        own_of(gateway).down()
        calls = [ask(port_of(gateway), asked("mini")) for _ in range(200)]
        most, budget = 0, 100_000
        tasks = asyncio.gather(*calls)
        while not tasks.done():
            for _, _, purse in gateway.limits.money.purses():
                most = max(most, purse.window.used(gateway.clock()) + purse.window.reserved)
            await asyncio.sleep(0)
        statuses = [answer.status for answer in tasks.result()]
        assert set(statuses) == {200, 429}
        assert len(provider.requests) == statuses.count(200)
        await settled(gateway)  # what a call has cost is told with its end
        assert spent(gateway) == 1300 * statuses.count(200)
        assert budget / 2 < most <= budget, "it was at the edge"

    over(body, budget=(MoneyLimit(0.1, "day"),), prices=Tariff(100 * MICRO, 100 * MICRO, 200 * MICRO))


def test_a_caller_that_leaves_is_charged_and_nothing_stays_reserved(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        own_of(gateway).down()
        running = asyncio.create_task(ask(port_of(gateway), asked("mini")))
        while not provider.requests:
            await asyncio.sleep(0.001)
        (reserved,) = [purse.window.reserved for _, _, purse in gateway.limits.money.purses()]
        assert reserved > 0
        running.cancel()
        await asyncio.wait([running])
        while outside_of(gateway).ledger.in_flight:
            await asyncio.sleep(0.001)
        assert spent(gateway) == reserved, "nobody knows how much of its answer there was"

    over(body, outside="hang")


@pytest.mark.parametrize("hedging", [None, 30.0])
def test_a_caller_that_leaves_before_a_byte_is_sent_pays_nothing(
    over: Callable[..., None], hedging: float | None
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are made, and no TLS handshake ends
        silent.setblocking(False)

        async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
            for stream in (False, True):
                running = asyncio.create_task(ask(port_of(gateway), asked("mini", stream=stream)))
                peer, _ = await asyncio.get_running_loop().sock_accept(silent)
                with peer:
                    assert sum(purse.window.reserved for _, _, purse in gateway.limits.money.purses()) > 0
                    running.cancel()
                    await asyncio.wait([running])
                    await settled(gateway)
                assert spent(gateway) == 0
            assert outside_of(gateway).breaker.failures == 0, "it is no fault of the provider"

        over(body, rules={"hedging": hedging}, url=f"https://127.0.0.1:{silent.getsockname()[1]}/v1")


def test_each_request_that_a_provider_got_whole_is_counted_as_billed(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        assert (await ask(port_of(gateway), asked("mini"))).status == 200
        await settled(gateway)
        first = spent(gateway)
        provider.behaviour = "die_before_headers"
        highest, dying = 0, asyncio.create_task(ask(port_of(gateway), asked("mini")))
        while not dying.done():
            highest = max(highest, sum(purse.window.reserved for _, _, purse in gateway.limits.money.purses()))
            await asyncio.sleep(0)
        assert dying.result().status == 502
        await settled(gateway)
        assert len(provider.requests) > 1
        assert spent(gateway) == first + highest * (len(provider.requests) - 1), "each may have been billed"

    over(body)


def test_an_answer_is_no_longer_than_what_was_reserved_for_it(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        answer = await ask(port_of(gateway), asked(max_tokens=100_000))  # more than its own model's context of 8192
        assert (answer.status, answer.headers["x-weir-model"]) == (200, "mini")
        assert json.loads(provider.requests[0])["max_tokens"] < 8192

    over(body, own="503")


def test_a_call_that_a_reload_keeps_from_its_provider_costs_nothing(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        policy = structs.replace(gateway.policy, providers={}, models={})
        gateway.attempts.current = Current(Snapshot(policy))  # the reload has come here, and not to the decider yet
        assert (await ask(port_of(gateway), asked("mini"))).status == 502
        assert not provider.heads
        await settled(gateway)
        assert spent(gateway) == 0
        assert outside_of(gateway).breaker.failures == 0

    over(body)


def cut_off(gateway: Gateway) -> None:
    """Let the name server of the provider's host answer nothing."""

    async def silent(*_: object) -> tuple[str, ...]:
        await asyncio.Event().wait()
        raise AssertionError

    gateway.engines.clients[outside_of(gateway).id]._names.addresses = silent  # type: ignore[method-assign]


def test_a_caller_without_the_time_to_connect_costs_nothing(
    over: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        cut_off(gateway)
        for _ in range(20):
            answer = await ask(port_of(gateway), asked("mini", headers=b"x-weir-deadline-ms: 50\r\n"))
            assert answer.status in (502, 504)
        assert not provider.heads
        await settled(gateway)
        assert spent(gateway) == 0
        assert outside_of(gateway).breaker.failures == 0

    monkeypatch.setattr(grant, "FAIR", 60.0)  # longer than a machine stands still
    over(body)


@pytest.mark.parametrize(
    ("patience", "headers", "stream"),
    [(0.05, b"", True), (60.0, b"x-weir-deadline-ms: 300\r\n", True), (60.0, b"x-weir-deadline-ms: 300\r\n", False)],
)
def test_a_provider_that_cannot_be_connected_to_in_time_is_let_alone(
    over: Callable[..., None], monkeypatch: pytest.MonkeyPatch, patience: float, headers: bytes, stream: bool
) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        timeouts = structs.replace(gateway.policy.timeouts, first_byte=patience)
        gateway.attempts.current = Current(Snapshot(structs.replace(gateway.policy, timeouts=timeouts)))
        cut_off(gateway)
        breaker = outside_of(gateway).breaker
        payload = asked("mini", headers=headers, stream=stream, max_tokens=2000)
        for _ in range(8):
            assert (await ask(port_of(gateway), payload)).status in (502, 503, 504)
        assert breaker.state is BreakerState.OPEN
        await settled(gateway)
        assert spent(gateway) == 0

    monkeypatch.setattr(grant, "FAIR", 0.0)
    over(body)


def test_a_provider_gets_no_second_attempt_beside_the_first(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        cloud = gateway.policy.providers["cloud"]
        twice = {"cloud": cloud, "other": structs.replace(cloud, url=f"{engine.url}/v1")}
        policy = structs.replace(gateway.policy, providers=twice, hedging=0.03)
        gateway.apply(Configuration(policy, dict.fromkeys(twice, "key")))
        running = asyncio.create_task(ask(port_of(gateway), asked("mini", stream=True)))
        async with asyncio.timeout(60):
            while not engine.heads + provider.heads:
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.3)  # ten times as long as hedging waits
        running.cancel()
        await asyncio.wait([running])
        await settled(gateway)
        assert len(engine.heads) + len(provider.heads) == 1
        assert sum(micro > 0 for micro, _ in gateway.limits.money.totals.values()) == 1

    over(body, own="hang", outside="hang")


def test_a_call_that_a_provider_breaks_off_costs_nothing_and_its_error_says_so(over: Callable[..., None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

        async def breaks_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.transport.abort()

        async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
            async with await asyncio.start_server(breaks_off, sock=server):
                answer = await ask(port_of(gateway), asked("mini", functions=["x" * 8_000_000]))
            assert answer.status == 502
            assert b"closed the connection before answering" in answer.body, answer.body
            await settled(gateway)
            assert spent(gateway) == 0

        prices = Tariff(1, 1, 1)
        rules = {"body": BodyPolicy(max=16 << 20, max_media=16 << 20)}
        over(body, rules=rules, prices=prices, url=f"http://127.0.0.1:{server.getsockname()[1]}/v1")


@pytest.mark.parametrize("field", ["functions", "response_format", "logit_bias"])
def test_fields_beside_the_prompt_are_reserved_for(over: Callable[..., None], field: str) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        assert (await ask(port_of(gateway), asked("mini"))).status == 200
        answer = await ask(port_of(gateway), asked("mini", **{field: {"description": "x " * 5_000}}))
        assert (answer.status, len(provider.requests)) == (429, 1)

    over(body, budget=(MoneyLimit(0.01, "day"),))


@pytest.mark.parametrize(("told", "most"), [(7, 7), (2**39, 5000)])
def test_tokens_of_calls_that_may_share_a_request_count_on_own_engines(
    told: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than are possible, whatever the engine tells."""
    usage = b'{"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (told, told)
    monkeypatch.setattr(scripted, "PLAIN", scripted.answer(200, usage))
    policy = decode(b"engines_price: 3600/hour\nstorage: kept\nbatching: {embeddings: 20ms}\n")
    body = json.dumps({"model": "m", "input": "a b c d e f g"}).encode()
    head = b"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"

    async def scenario() -> None:
        async with ScriptedEngine("good").running() as engine, gateway_over([engine], policy) as gateway:
            request = b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)
            assert (await ask(port_of(gateway), request)).status == 200
            await settled(gateway)
            ((_, tokens),) = gateway.limits.money.totals.values()
            counted = [tokens, *(each.tokens for each in gateway.limits.quotas.states())]
            assert len(counted) > 1
            assert all(7 <= each <= most for each in counted), counted

    asyncio.run(scenario())
