"""Calls that a proxy forwards, in virtual time: the same decisions, and nothing is left on any path."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from gateway.core.answer.json_usage import JSONUsage
from gateway.core.policy.policy import BodyPolicy, Budget, EngineEntry, FleetPolicy, Policy, Timeouts
from gateway.core.policy.traffic import Limit, Limits, RateLimit, ShapingTier, TrafficClass
from gateway.core.policy.types import Rate
from gateway.core.request.body_memory import BodyLease
from gateway.core.request.record import Record
from gateway.decider.call_log import CallLog
from gateway.decider.loading import Configuration
from gateway.relay.epp.lending import EndReport, Failure, LentCall
from gateway.relay.epp.stream import Answer, KeptReply
from gateway.relay.wire.messages import Request
from gateway.serve.assembly import Gateway
from gateway.serve.epp_port import LentCalls
from gateway.shared.vllm.answers import ModelCard
from loadtest.simulate import vtime
from tests.examples import examples

URL = "http://10.0.0.5:8000"
FIRST_BYTE, DEADLINE = 20.0, 60.0
PLAIN = Policy(
    classes={"default": TrafficClass(max_queue=100, deadline=DEADLINE)},
    fleet=FleetPolicy(engines=(EngineEntry(url=URL),)),
    budget=Budget(capacity=1000),
    timeouts=Timeouts(first_byte=FIRST_BYTE),
    deadlines="drop",
    service_tiers={},
)
USAGE_TEXT = (
    b'{"usage":{"prompt_tokens":7,"completion_tokens":5,"total_tokens":12,"prompt_tokens_details":{"cached_tokens":3}}}'
)
USAGE = JSONUsage()
USAGE.whole(USAGE_TEXT)


def _with(**fields: Any) -> Policy:
    return structs.replace(PLAIN, **fields)


class Asked:
    """Call of a proxy."""

    def __init__(self, request: Request, reply: KeptReply) -> None:
        self.request = request
        self.reply = reply

    @property
    def here(self) -> bool:
        return self.reply.answer.done()

    @property
    def refusal(self) -> Answer:
        assert self.request.lent is None
        return self.reply.answer.result()

    @property
    def lent(self) -> LentCall:
        assert self.request.lent is not None, self.reply.answer
        return self.request.lent

    def end(self, status: int | None = 200, failure: Failure | None = None, usage: JSONUsage = USAGE) -> None:
        self.lent.end(EndReport(status, failure, usage))


class Site:
    """Gateway that lends, over one engine of 1,000 tokens, without sockets."""

    def __init__(self, policy: Policy) -> None:
        self.loop = asyncio.get_running_loop()
        self.records: list[Record] = []
        log = cast("CallLog", self)
        self.gateway = Gateway(Configuration(policy), (), log, random.Random(1), say=lambda _: None)
        self.engine = next(iter(self.gateway.fleet))
        self.gateway.fleet.has_models(self.engine, [ModelCard(id="m", max_model_len=4096)])
        self.engine.check(True, self.loop.time())
        self.gateway.engines.changed(self.engine)
        self.port = LentCalls(self.gateway)

    def write(self, record: Record, _: float) -> None:
        """As the call log."""
        self.records.append(record)

    async def aclose(self) -> None:
        """Of the call log."""

    def ask(self, tokens: int = 100, headers: dict[bytes, bytes] | None = None, **asked: Any) -> Asked:
        call = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, **asked}
        body = json.dumps(call).encode()
        fields = {b"content-type": b"application/json", **(headers or {})}
        path = b"/v1/chat/completions"
        request = Request(b"POST", path, b"", fields, 0, len(body), False)
        request.peer, request.at = "proxy", self.loop.time()
        assert self.port.pipeline.head(request) is None
        request.body = body
        request.held = BodyLease(self.gateway.bodies, request.owner or request.peer)
        assert not request.held.resize(len(body))
        reply = KeptReply(request)
        self.port.pipeline.call(request, reply.client.responder)
        return Asked(request, reply)

    async def granted(self, tokens: int = 100, **asked: Any) -> Asked:
        one = self.ask(tokens, **asked)
        await until(lambda: one.here)
        assert one.lent
        return one

    def states(self) -> list[str]:
        return [call.state for call in self.port.calls()]

    def outcomes(self) -> list[str]:
        return [record.outcome.value for record in self.records]

    def idle(self) -> None:
        """Everything has been given back."""
        engine, dispatch = self.engine, self.gateway.dispatch
        assert (engine.ledger.held, engine.ledger.in_flight, engine.prefills.queued) == (0, 0, 0)
        assert not any(map(any, engine.ledger.used.values()))
        assert not any(dispatch.queues.values())
        assert not any(dispatch.running.values())
        assert not dispatch.waiting.turns
        assert not self.port.pipeline.tasks
        assert not self.gateway.bodies.held
        assert len(self.records) == len({record.request_id for record in self.records})


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(1000):
        while not true():
            await asyncio.sleep(0.001)


def run(body: Callable[[Site], Awaitable[None]], policy: Policy = PLAIN) -> None:
    async def main() -> None:
        site = Site(policy)
        await body(site)
        await asyncio.sleep(0.1)
        site.idle()
        await site.gateway.aclose()

    vtime.run(main())


def test_a_call_is_granted_reported_and_settled() -> None:
    async def body(site: Site) -> None:
        one = await site.granted(stream=True, headers={b"x-request-id": b"mine", b"authorization": b"Bearer x"})
        lent = one.lent
        assert lent.url == URL
        assert (lent.by, lent.until) == (FIRST_BYTE, DEADLINE)
        engine, client = dict(lent.for_engine), dict(lent.for_client)
        assert engine == {b"content-type": b"application/json", b"x-request-id": b"mine"}, "not the client's key"
        assert (client[b"x-request-id"], client[b"x-weir-class"]) == (b"mine", b"default")
        assert lent.hides_usage
        assert json.loads(lent.body or b"")["stream_options"] == {"include_usage": True}
        assert site.engine.ledger.held > 50
        assert site.states() == ["running"]
        await asyncio.sleep(2.0)
        lent.first_byte()
        lent.first_byte()
        assert site.engine.prefills.queued == 0
        assert site.states() == ["streaming"]
        await asyncio.sleep(3.0)
        one.end()
        one.end(500)
        await until(lambda: site.records)
        record = site.records[0]
        assert (record.outcome.value, record.status, record.settled, record.request_id) == ("ok", 200, True, "mine")
        assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (7, 5, 3)
        assert record.ttft == pytest.approx(2.0, abs=0.01)
        assert record.total == pytest.approx(5.0, abs=0.01)
        assert record.engine == site.engine.id
        assert site.gateway.metrics.outcomes()["ok"] == 1

    run(body)


def test_no_more_of_a_prompt_counts_as_cached_than_it_has() -> None:
    lie = JSONUsage()
    lie.whole(USAGE_TEXT.replace(b'cached_tokens":3', b'cached_tokens":1099511627776'))

    async def body(site: Site) -> None:
        one = await site.granted()
        one.end(usage=lie)
        await until(lambda: site.records)
        assert (site.records[0].prompt_tokens, site.records[0].cached_tokens) == (7, 7)

    run(body)


def test_an_end_without_usage_is_charged_by_an_estimate_and_says_so() -> None:
    async def body(site: Site) -> None:
        one = await site.granted(stream=True)
        await asyncio.sleep(1.0)
        one.lent.first_byte()
        await asyncio.sleep(1.0)
        one.end(usage=JSONUsage())
        await until(lambda: site.records)
        record = site.records[0]
        assert (record.outcome.value, record.settled) == ("ok", False)
        assert record.prompt_tokens == record.estimated_prompt_tokens
        assert record.completion_tokens == pytest.approx(100, abs=2), "a second at the pace of the engine"
        assert site.engine.ledger.held == 0

    run(body)


def test_a_body_that_need_not_change_is_not_sent_back() -> None:
    async def body(site: Site) -> None:
        one = await site.granted(stream=False)
        assert one.lent.body is None
        assert not one.lent.hides_usage
        await asyncio.sleep(1.0)
        one.end()
        await until(lambda: site.records)
        assert site.records[0].settled
        assert site.records[0].ttft > 0.0, "a whole answer's first byte comes with its last"

    run(body)


def test_shaping_is_that_of_the_policy() -> None:
    shaped = _with(shaping=(ShapingTier(kv_above=-1.0, max_tokens=64, except_=()),))

    async def body(site: Site) -> None:
        one = await site.granted(500)
        assert json.loads(one.lent.body or b"")["max_tokens"] == 64
        one.end()

    run(body, shaped)


def test_a_call_waits_its_turn_and_a_client_that_leaves_leaves_the_queue() -> None:
    async def body(site: Site) -> None:
        first = await site.granted(1200)
        waiting, gone = site.ask(1200), site.ask(1200)
        await asyncio.sleep(5.0)
        assert not waiting.here
        assert site.states() == ["running", "queued", "queued"]
        gone.reply.client.leave()
        await asyncio.sleep(0.01)
        assert site.outcomes() == ["client_gone"]
        first.end()
        await until(lambda: waiting.here)
        waiting.end()
        await until(lambda: len(site.records) == 3)
        assert not gone.here
        assert site.records[-1].queue == pytest.approx(5.0, abs=0.1)

    run(body)


def test_a_refusal_is_whole() -> None:
    once = Limits(per_tenant=Limit(requests=RateLimit(rate=Rate(1, 60.0))))

    async def body(site: Site) -> None:
        (await site.granted()).end()
        refused = site.ask()
        await until(lambda: refused.here)
        headers = dict(refused.refusal.headers)
        assert (refused.refusal.status, headers[b"x-weir-reason"]) == (429, b"rate_limited")
        assert int(headers[b"retry-after"]) > 30
        assert not {b"content-length", b"connection"} & set(headers)
        assert json.loads(refused.refusal.body)["error"]["type"] == "rate_limit_error"

    run(body, _with(limits=once))


@pytest.mark.parametrize(("begun", "lasts"), [(False, FIRST_BYTE), (True, DEADLINE)])
def test_a_hold_that_nothing_is_heard_of_is_given_back(begun: bool, lasts: float) -> None:
    async def body(site: Site) -> None:
        one = await site.granted(stream=True)
        if begun:
            await asyncio.sleep(1.0)
            one.lent.first_byte()
        await asyncio.sleep(lasts - 1.5)
        assert site.engine.ledger.held > 0
        await asyncio.sleep(3.0)
        assert site.engine.ledger.held == 0
        one.end()
        record = site.records[0]
        assert (record.outcome.value, record.status, record.reason) == ("client_gone", 499, "hold_expired")
        assert bool(record.completion_tokens) is begun, "what the engine may have written is charged"
        assert site.engine.breaker.failures == 0, "whose fault it was is not known"

    run(body)


@pytest.mark.parametrize(
    ("status", "failure", "outcome", "failures"),
    [
        (None, "connect", "upstream", 1),
        (None, "reset", "upstream", 1),
        (None, "timeout", "upstream", 1),
        (500, None, "upstream", 1),
        (400, None, "engine_refused", 0),
        (302, None, "upstream", 1),
        (401, None, "upstream", 1),
        (None, "client_gone", "client_gone", 0),
        (200, "client_gone", "client_gone", 0),
        (200, "truncated", "truncated", 1),
        (200, None, "ok", 0),
    ],
)
def test_every_end_is_told_apart(status: int | None, failure: Failure | None, outcome: str, failures: int) -> None:
    async def body(site: Site) -> None:
        one = await site.granted(stream=True)
        if status == 200:
            one.lent.first_byte()
        await asyncio.sleep(1.0)
        one.end(status, failure, JSONUsage())
        await until(lambda: site.records)
        assert site.outcomes() == [outcome]
        assert site.engine.breaker.failures == failures
        assert site.engine.health.up is (failure != "connect")

    run(body)


def test_an_engine_that_does_not_answer_by_the_deadline_was_at_work() -> None:
    async def body(site: Site) -> None:
        one = await site.granted()
        await asyncio.sleep(5.0)
        one.end(None, "timeout", JSONUsage())
        await until(lambda: site.records)
        record = site.records[0]
        assert (record.outcome.value, record.settled) == ("expired", False)
        assert record.completion_tokens > 0

    run(body, _with(classes={"default": TrafficClass(max_queue=100, deadline=5.0)}))


def test_a_report_that_comes_as_the_gateway_ends_is_settled() -> None:
    async def body(site: Site) -> None:
        one = await site.granted()
        one.end()
        for task in site.port.pipeline.tasks:
            task.cancel()  # as at the end of a drain, before the report was read
        await until(lambda: not site.port.pipeline.tasks)
        assert site.outcomes() == ["ok"]
        assert (site.records[0].prompt_tokens, site.records[0].completion_tokens) == (7, 5)

    run(body)


def test_a_reload_and_a_drain_go_for_these_calls_too() -> None:
    async def body(site: Site) -> None:
        running, kept = await site.granted(1200), await site.granted(10)
        waiting = site.ask(1200)
        await asyncio.sleep(1.0)
        site.gateway.apply(Configuration(_with(body=BodyPolicy(max=1 << 20))))
        assert site.port.pipeline.current.snapshot is site.gateway.current.snapshot
        drained = asyncio.ensure_future(site.port.drain(10.0))
        site.gateway.dispatch.refuse_waiting()
        await until(lambda: waiting.here)
        assert waiting.refusal.status == 503
        assert dict(waiting.refusal.headers)[b"x-weir-reason"] == b"draining"
        running.end()
        await asyncio.sleep(1.0)
        assert not drained.done()
        late = site.ask()
        await until(lambda: late.here)
        assert late.refusal.status == 503
        await drained
        assert site.loop.time() == pytest.approx(11.0, abs=0.1)
        kept.end()
        assert sorted(site.outcomes()) == ["draining", "draining", "draining", "ok"]

    run(body)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "stream", "leave", "first", "end", "gone", "broken", "wait", "long", "reload"]),
        st.integers(0, 7),
    ),
    max_size=40,
)


@settings(max_examples=examples(30))
@given(STEPS, st.integers(0, 2**16))
def test_nothing_is_left_by_any_life(steps: list[tuple[str, int]], seed: int) -> None:
    async def body(site: Site) -> None:
        rng = random.Random(seed)
        asked: list[Asked] = []
        for step, number in steps:
            one = asked[number % len(asked)] if asked else None
            match step:
                case "ask" | "stream":
                    asked.append(site.ask(rng.choice([10, 300, 700]), stream=step == "stream"))
                case "wait" | "long":
                    await asyncio.sleep(rng.uniform(0.0, 2.0 if step == "wait" else 40.0))
                case "reload":
                    site.gateway.apply(Configuration(PLAIN))
                case "leave" if one is not None:
                    one.reply.client.leave()
                case _ if one is not None and one.request.lent is not None:
                    match step:
                        case "first" if not one.lent.ended.done():
                            one.lent.first_byte()
                        case "end":
                            one.end(rng.choice([200, 200, 400, 500]), usage=rng.choice([JSONUsage(), USAGE]))
                        case "gone":
                            one.end(None, "client_gone")
                        case "broken":
                            one.end(None, rng.choice(["timeout", "reset"]))
            assert site.engine.ledger.held <= 900
        await asyncio.sleep(2 * DEADLINE)
        assert len(site.records) == len(asked)
        assert "bug" not in site.outcomes()

    run(body)
