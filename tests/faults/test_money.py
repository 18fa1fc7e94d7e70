"""Money over real sockets: 200 calls at once at the edge of a budget, and a caller that leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from msgspec import structs

from gateway.core.policy.providers import MoneyBudget, Prices
from gateway.core.policy.snapshot import Current, Snapshot
from gateway.serve.assembly import Gateway
from tests.faults.scripted import ScriptedEngine, ask, port_of, settled
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
        assert spent(gateway) == 1300 * statuses.count(200)
        assert budget / 2 < most <= budget, "it was at the edge"

    over(body, budget=MoneyBudget(day=0.1), prices=Prices(prompt=100.0, completion=200.0))


def test_a_caller_that_leaves_is_charged_and_nothing_stays_reserved(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        own_of(gateway).down()
        running = asyncio.create_task(ask(port_of(gateway), asked("mini")))
        while not provider.requests:
            await asyncio.sleep(0.001)
        assert any(purse.window.reserved for _, _, purse in gateway.limits.money.purses())
        running.cancel()
        await asyncio.wait([running])
        while outside_of(gateway).ledger.in_flight:
            await asyncio.sleep(0.001)
        assert spent(gateway) > 0

    over(body, outside="hang")


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


def test_a_caller_without_the_time_to_connect_costs_nothing(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        client = gateway.engines.clients[outside_of(gateway).id]

        async def silent(*_: object) -> tuple[str, ...]:
            await asyncio.Event().wait()
            raise AssertionError

        client._names.addresses = silent  # type: ignore[method-assign] # a name server that does not answer
        for _ in range(20):
            answer = await ask(port_of(gateway), asked("mini", headers=b"x-weir-deadline-ms: 50\r\n"))
            assert answer.status in (502, 504)
        assert not provider.heads
        await settled(gateway)
        assert spent(gateway) == 0
        assert outside_of(gateway).breaker.failures == 0

    over(body)


@pytest.mark.parametrize("field", ["functions", "response_format", "logit_bias"])
def test_fields_beside_the_prompt_are_reserved_for(over: Callable[..., None], field: str) -> None:
    async def body(gateway: Gateway, engine: ScriptedEngine, provider: ScriptedEngine) -> None:
        assert (await ask(port_of(gateway), asked("mini"))).status == 200
        answer = await ask(port_of(gateway), asked("mini", **{field: {"description": "x " * 5_000}}))
        assert (answer.status, len(provider.requests)) == (429, 1)

    over(body, budget=MoneyBudget(day=0.01))
