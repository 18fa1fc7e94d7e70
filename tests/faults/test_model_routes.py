"""Model routes over real sockets: who answers, under which name, and what becomes of a call whose member fails."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial

import pytest
import uvloop
from msgspec import structs

from gateway.core.policy.policy import Budget, Policy, Routing
from gateway.core.policy.routes import Mirror, ModelRoute, RouteMember
from gateway.core.policy.traffic import Breaker, Limit, Limits, RateLimit, Tenant, TrafficClass, default_classes
from gateway.core.policy.types import Rate
from gateway.core.request.outcome import Outcome
from gateway.relay import mirror
from gateway.relay.inner_client import InnerClient, inner_request
from gateway.serve.run import Gateway
from gateway.shared.vllm.answers import ModelCard
from loadtest.simulate import vtime
from tests import over_frames
from tests.faults import scripted
from tests.faults.scripted import Answer, ScriptedEngine, ask, port_of, request, settled

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

ROUTE = ModelRoute(members=(RouteMember(model="m0", weight=3), RouteMember(model="m1")), fallback=("m2",))
POLICY = Policy(models={"support": ROUTE}, routing=Routing(hold_unserved=5.0))
Body = Callable[[Gateway, list[ScriptedEngine]], Awaitable[None]]


@pytest.fixture(params=["direct", "frames"])
def over(request: pytest.FixtureRequest) -> Callable[[Body, Policy, list[str]], None]:
    gateway_over = scripted.gateway_over if request.param == "direct" else over_frames.gateway_over

    def scenario(body: Body, policy: Policy = POLICY, behaviours: list[str] | None = None) -> None:
        """Run `body` over three engines, which serve m0, m1 and m2."""

        async def main() -> None:
            engines = [ScriptedEngine(behaviour) for behaviour in behaviours or ["good"] * 3]
            async with AsyncExitStack() as stack:
                for engine in engines:
                    await stack.enter_async_context(engine.running())
                gateway = await stack.enter_async_context(gateway_over(engines, policy))
                for number, engine in enumerate(gateway.fleet):
                    gateway.fleet.has_models(engine, [ModelCard(id=f"m{number}", max_model_len=8192 >> number)])
                await body(gateway, engines)
                await settled(gateway)

        uvloop.run(main())

    return scenario


def asked(number: int, stream: bool = False, headers: bytes = b"", **more: object) -> bytes:
    messages = [{"role": "user", "content": f"question {number}"}]
    payload = request(stream, model="support", messages=messages, **more)
    return payload.replace(b"host: localhost\r\n", b"host: localhost\r\n" + headers, 1)


async def answers(gateway: Gateway, calls: range, **more: object) -> list[Answer]:
    return [await ask(port_of(gateway), asked(number, **more)) for number in calls]  # type: ignore[arg-type]


def test_members_share_the_calls_and_a_conversation_stays(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        first = [answer.headers["x-weir-model"] for answer in await answers(gateway, range(60))]
        again = [answer.headers["x-weir-model"] for answer in await answers(gateway, range(60), stream=True)]
        assert first == again
        assert 30 <= Counter(first)["m0"] <= 57, "three of four, give or take"
        for number, engine in enumerate(engines):
            assert {json.loads(body)["model"] for body in engine.requests} <= {f"m{number}"}
        assert not engines[2].requests
        counts = gateway.dispatch.routes.resolved
        assert counts == {("support", name, "member"): 2 * first.count(name) for name in ("m0", "m1")}

    over(body)


def test_a_session_stays_whatever_it_asks(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        for session in (b"a", b"b", b"c"):
            header = b"x-weir-session: %b\r\n" % session
            found = {answer.headers["x-weir-model"] for answer in await answers(gateway, range(12), headers=header)}
            assert len(found) == 1

    over(body)


def test_a_member_without_an_engine_is_not_waited_for(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        first, second, third = gateway.fleet
        first.down()
        assert {each.headers["x-weir-model"] for each in await answers(gateway, range(12))} == {"m1"}
        second.down()
        found = await answers(gateway, range(3))
        assert [(each.status, each.headers["x-weir-model"]) for each in found] == [(200, "m2")] * 3
        third.down()
        refused = await ask(port_of(gateway), asked(1, headers=b"x-weir-deadline-ms: 200\r\n"))
        assert refused.status in (503, 504)

    over(body)


@pytest.mark.parametrize("behaviour", ["die_before_headers", "503"])
def test_a_call_whose_member_fails_is_answered_by_another_model(over: Callable[..., None], behaviour: str) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        answer = await ask(port_of(gateway), asked(1, stream=behaviour == "503"))
        assert (answer.status, answer.headers.get("x-weir-model")) == (200, "m2"), answer.body
        await settled(gateway)
        assert gateway.metrics.outcomes() == {"ok": 1}
        assert {json.loads(body)["model"] for body in engines[2].requests} == {"m2"}

    over(body, structs.replace(POLICY, retries=1.0), [behaviour, behaviour, "good"])


def test_a_caller_that_wants_no_fallback(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        for engine in list(gateway.fleet)[:2]:
            engine.down()
        none = b"x-weir-fallback: none\r\nx-weir-deadline-ms: 200\r\n"
        assert (await ask(port_of(gateway), asked(1, headers=none))).status in (503, 504)
        assert not engines[2].requests
        wrong = await ask(port_of(gateway), asked(1, headers=b"x-weir-fallback: no\r\n"))
        assert wrong.status == 400
        assert json.loads(wrong.body)["error"]["param"] == "x-weir-fallback"

    over(body)


def test_models_lists_routes(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        get = b"GET /v1/models%b HTTP/1.1\r\nhost: localhost\r\n\r\n"
        listed = json.loads((await ask(port_of(gateway), get % b"")).body)["data"]
        assert {card["id"]: card["max_model_len"] for card in listed} == {
            "m0": 8192, "m1": 4096, "m2": 2048, "support": 2048,
        }  # fmt: skip
        assert json.loads((await ask(port_of(gateway), get % b"/support")).body)["id"] == "support"

    over(body)


def test_a_tenants_models_and_the_limits_of_a_member(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        found = await answers(gateway, range(20))
        assert {each.headers.get("x-weir-model") for each in found if each.status == 200} == {"m1"}
        assert [each.status for each in found].count(429) == 18
        await settled(gateway)
        assert gateway.metrics.outcomes() == {Outcome.OK.value: 2, Outcome.RATE_LIMITED.value: 18}

    limit = Limit(requests=RateLimit(rate=Rate(2, 86_400.0)))
    over(
        body,
        structs.replace(POLICY, tenants={"anonymous": Tenant(models=("m1",))}, limits=Limits(models={"m1": limit})),
    )


def test_a_tenant_that_may_use_none_of_a_route(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        (answer,) = await answers(gateway, range(1))
        assert answer.status == 403
        assert b"support" in answer.body

    over(body, structs.replace(POLICY, tenants={"anonymous": Tenant(models=("other",))}))


def test_a_full_member_is_not_waited_for(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        held = [asyncio.create_task(ask(port_of(gateway), asked(7))) for _ in range(3)]
        async with asyncio.timeout(60):
            while sum(len(engine.requests) for engine in engines) < 2:
                await asyncio.sleep(0.001)
        assert [len(engine.requests) for engine in engines] == [1, 1, 0]
        for task in held:
            task.cancel()

    over(body, structs.replace(POLICY, budget=Budget(max_concurrency=1)), ["hang"] * 3)


def embedding(model: str, number: int) -> bytes:
    body = json.dumps({"model": model, "input": [f"text {number}"]}).encode()
    head = b"POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d"
    return head % len(body) + b"\r\n\r\n" + body


def test_calls_that_were_merged_fall_back_and_others_get_no_other_model(over: Callable[..., None]) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        for number in range(12):  # the budget of retries is a share of all calls: whoever comes first may take two
            assert (await ask(port_of(gateway), embedding("m1", number))).status == 200
        names = ["support", "m0"] * 3
        calls = [ask(port_of(gateway), embedding(name, number)) for number, name in enumerate(names)]
        found = await asyncio.gather(*calls)
        assert {each.status for each in found[1::2]} == {502}, found[1].body
        assert found[0].status == 200, found[0].body
        assert [(each.status, each.headers.get("x-weir-model")) for each in found[::2]] == [(200, "m2")] * 3
        assert max(len(json.loads(sent)["input"]) for sent in engines[0].requests) > 1, "some were merged"
        sent = [json.loads(each) for each in engines[2].requests]
        assert {each["model"] for each in sent} == {"m2"}
        assert sorted(text for each in sent for text in each["input"]) == sorted(f"text {n}" for n in range(0, 6, 2))
        await settled(gateway)

    route = ModelRoute(members=(RouteMember(model="m0"),), fallback=("m2",))
    policy = structs.replace(
        POLICY,
        models={"support": route},
        batching={"embeddings": 0.02},
        retries=1.0,
        breaker=Breaker(failures=1000),
    )
    over(body, policy, ["503", "good", "good"])


CLASSES = default_classes() | {"batch": TrafficClass(weight=1, deadline=3600.0, headroom=0.3)}
MIRRORED = ModelRoute(members=(RouteMember(model="m0"),), mirror=Mirror(model="m1", share=1.0))
LIMITED = Limits(global_=Limit(requests=RateLimit(rate=Rate(10, 86_400.0))))
COPIED = Policy(models={"support": MIRRORED}, classes=CLASSES, limits=LIMITED)


async def copies_end(gateway: Gateway) -> None:
    async with asyncio.timeout(60):
        while gateway.pipeline.tasks:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("stream", [False, True])
def test_a_mirror_gets_copies_that_the_caller_does_not_feel(over: Callable[..., None], stream: bool) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        for number in range(10):
            found = await ask(port_of(gateway), asked(number, stream))
            assert (found.status, found.headers["x-weir-model"]) == (200, "m0")
            await settled(gateway)  # a copy that finds no room beside the last one is dropped
        assert [len(engine.requests) for engine in engines] == [10, 10, 0]
        sent, copied = json.loads(engines[0].requests[0]), json.loads(engines[1].requests[0])
        assert (sent.pop("model"), copied.pop("model")) == ("m0", "m1")
        assert sent == copied
        assert (await ask(port_of(gateway), asked(11))).status == 429, "ten are the callers', no copy is charged"

    over(body, COPIED)


@pytest.mark.parametrize("behaviour", ["503", "die_mid_body", "garbage", "hang"])
def test_a_mirror_that_fails_or_hangs_is_felt_by_nobody(over: Callable[..., None], behaviour: str) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        found = await answers(gateway, range(3), stream=True)
        assert [(each.status, each.complete) for each in found] == [(200, True)] * 3
        gateway.pipeline.mirrors.close()
        await copies_end(gateway)
        assert not gateway.pipeline.mirrors._copies
        assert gateway.pipeline.mirrors._bytes == 0
        assert gateway.metrics.outcomes() == {"ok": 3}

    over(body, COPIED, ["good", behaviour, "good"])


def test_an_endless_answer_of_a_mirror_is_read_no_faster_than_its_turns(
    over: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "PER_TURN", 64 * 1024)
    monkeypatch.setattr(mirror, "TURN", 3600.0)

    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        paused = gateway.pipeline.mirrors.pace.waiting
        for number in range(3):
            assert (await answers(gateway, [number], stream=True))[0].complete
            async with asyncio.timeout(30):
                while len(paused) <= number:
                    await asyncio.sleep(0.001)
        gateway.pipeline.mirrors.close()
        await copies_end(gateway)

    over(body, COPIED, ["good", "endless", "good"])


def test_answers_of_mirrors_take_turns() -> None:
    log: list[str] = []

    async def main() -> None:
        pace = mirror.Pace()
        responders = []
        for number in range(mirror.RESUMED + 1):
            request = inner_request("mirror", "/v1/completions", {}, b"")
            responder = InnerClient(request, print, print, print).responder
            responder.flow(partial(log.append, f"{number} waits"), partial(log.append, f"{number} reads"))
            responders.append(responder)
        pace.count(mirror.PER_TURN, responders[0])
        assert not log
        for responder in responders * 2:
            pace.count(1, responder)
        assert log == [f"{number} waits" for number in range(mirror.RESUMED + 1)]
        await asyncio.sleep(mirror.TURN)
        pace.count(mirror.PER_TURN, responders[0])
        assert log[mirror.RESUMED + 1 :] == [f"{number} reads" for number in range(mirror.RESUMED)]
        await asyncio.sleep(mirror.TURN)
        assert log[-1] == f"{mirror.RESUMED} reads"
        assert not pace.waiting
        await asyncio.sleep(2 * mirror.TURN)
        assert len(log) == 2 * mirror.RESUMED + 2

    vtime.run(main())


def test_a_copy_without_room_is_dropped_and_copies_are_bounded(
    over: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "MOST", 2)

    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        await answers(gateway, range(6))
        assert len(gateway.pipeline.mirrors._copies) <= 2
        assert len(engines[1].requests) <= 2
        assert not any(gateway.dispatch.queues.values()), "none waits"
        gateway.pipeline.mirrors.close()
        await copies_end(gateway)

    over(body, COPIED, ["good", "hang", "good"])
