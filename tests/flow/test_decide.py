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

from gateway.core.policy.policy import BodyPolicy, Budget, EngineEntry, FleetPolicy, Policy, ServerPolicy, Timeouts
from gateway.core.policy.traffic import Limit, Limits, RateLimit, ShapingTier, TrafficClass
from gateway.core.policy.types import Rate
from gateway.core.request.body_memory import BodyLease
from gateway.core.request.record import Record
from gateway.decider.call_log import CallLog
from gateway.decider.loading import Configuration
from gateway.relay.wire.messages import Request
from gateway.relay.wire.responder import Responder
from gateway.serve.assembly import Gateway
from gateway.serve.data_port import MachinePort
from gateway.serve.starting import Options
from gateway.serve.upgrade.receiver import InheritedSockets
from gateway.shared.vllm.answers import ModelCard
from loadtest.simulate import vtime
from tests.examples import examples

URL = "http://10.0.0.5:8000"
TOKEN = "a-token-of-the-proxy"  # noqa: S105 # of the test
FIRST_BYTE, DEADLINE = 20.0, 60.0
PLAIN = Policy(
    classes={"default": TrafficClass(max_queue=100, deadline=DEADLINE)},
    fleet=FleetPolicy(engines=(EngineEntry(url=URL),)),
    budget=Budget(capacity=1000),
    timeouts=Timeouts(first_byte=FIRST_BYTE),
    deadlines="drop",
    service_tiers={},
)
USAGE = {"prompt_tokens": 7, "completion_tokens": 5}


def _with(**fields: Any) -> Policy:
    return structs.replace(PLAIN, **fields)


class Wire:
    """The transport and the connection of one request, which keeps what is written."""

    write_paused = False

    def __init__(self) -> None:
        self.written = bytearray()

    def write(self, data: bytes) -> None:
        self.written += data

    def keeps_alive(self, _: Request) -> bool:
        return True

    def answered(self, close: bool) -> None:
        assert not close

    def abandoned(self) -> None:
        pytest.fail("an answer to a proxy was broken off")


class Answer:
    """An answer of the decide port, as soon as it is there."""

    def __init__(self, wire: Wire, responder: Responder | None) -> None:
        self.wire = wire
        self.responder = responder

    @property
    def here(self) -> bool:
        return bool(self.wire.written)

    @property
    def status(self) -> int:
        return int(self.wire.written.split(b" ", 2)[1])

    @property
    def headers(self) -> dict[str, str]:
        lines = bytes(self.wire.written).partition(b"\r\n\r\n")[0].decode().split("\r\n")[1:]
        return {name: value for name, _, value in (line.partition(": ") for line in lines)}

    @property
    def body(self) -> Any:
        return json.loads(bytes(self.wire.written).partition(b"\r\n\r\n")[2] or b"null")

    @property
    def hold(self) -> str:
        return self.headers.get("x-weir-hold", "")

    def leave(self) -> None:
        """The proxy goes away."""
        if self.responder is not None and not self.responder.closed:
            self.responder.left("client_gone")


class Site:
    """A gateway with a decide port, over one engine of 1,000 tokens, without sockets."""

    def __init__(self, policy: Policy, token: str | None) -> None:
        self.loop = asyncio.get_running_loop()
        self.records: list[Record] = []
        log = cast("CallLog", self)
        self.gateway = Gateway(Configuration(policy), (), log, random.Random(1), say=lambda _: None)
        self.engine = next(iter(self.gateway.fleet))
        self.gateway.fleet.has_models(self.engine, [ModelCard(id="m", max_model_len=4096)])
        self.engine.check(True, self.loop.time())
        self.gateway.engines.changed(self.engine)
        options = Options(announce=lambda _: None, decide="unix:/nowhere", decide_token=token)
        self.data = MachinePort(self.gateway, options, Configuration(), InheritedSockets(), int)
        assert self.data.decide is not None
        self.port = self.data.decide

    def write(self, record: Record, _: float) -> None:
        """As the call log."""
        self.records.append(record)

    async def aclose(self) -> None:
        """Of the call log."""

    def post(self, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Answer:
        return self.head(path, body, headers)()

    def head(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> Callable[[], Answer]:
        """A request whose head is here; its body comes when this is called."""
        fields = {name.encode(): value.encode() for name, value in (headers or {}).items()}
        request = Request(b"POST", path.encode(), b"", list(fields.items()), fields, 1, len(body), True)
        request.peer, request.at = "unix", self.loop.time()
        wire = Wire()
        refused = self.port.handler.head(request)
        if refused is None and len(body) > request.limit:
            refused = b"HTTP/1.1 413 \r\n\r\n"
        if refused is not None:
            wire.write(refused)
            return lambda: Answer(wire, None)

        def whole() -> Answer:
            request.body = body
            request.held = BodyLease(self.gateway.bodies, request.owner or request.peer)
            assert not request.held.resize(len(body))
            responder = Responder(wire, cast("asyncio.Transport", wire), request)
            self.port.handler.call(request, responder)
            return Answer(wire, responder)

        return whole

    def ask(self, tokens: int = 100, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
        return self.asks(tokens, headers, **fields)()

    def asks(self, tokens: int = 100, headers: dict[str, str] | None = None, **fields: Any) -> Callable[[], Answer]:
        call = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, **fields}
        lines = {"content-type": "application/json", "x-original-uri": "/v1/chat/completions", **(headers or {})}
        return self.head("/decide", json.dumps(call).encode(), lines)

    async def granted(self, tokens: int = 100, **fields: Any) -> Answer:
        answer = self.ask(tokens, **fields)
        await until(lambda: answer.here)
        assert answer.hold, bytes(answer.wire.written)
        return answer

    def first_byte(self, hold: str) -> int:
        return self.post(f"/decide/{hold}/first-byte").status

    def end(self, hold: str, **report: Any) -> int:
        return self.post(f"/decide/{hold}/end", json.dumps(report).encode()).status

    def outcomes(self) -> list[str]:
        return [record.outcome.value for record in self.records]

    def idle(self) -> None:
        """Everything has been given back."""
        engine, dispatch = self.engine, self.gateway.dispatch
        assert (engine.ledger.held, engine.ledger.in_flight, engine.prefills.queued) == (0, 0, 0)
        assert not any(map(any, engine.ledger.used.values()))
        assert not any(dispatch.queues.values())
        assert not any(dispatch.running.values())
        assert not dispatch._turns
        assert not self.port.pipeline.tasks
        assert not len(self.port.held)
        assert not self.gateway.bodies.held
        assert len(self.records) == len({record.request_id for record in self.records})


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(1000):
        while not true():
            await asyncio.sleep(0.001)


def run(body: Callable[[Site], Awaitable[None]], policy: Policy = PLAIN, token: str | None = None) -> None:
    async def main() -> None:
        site = Site(policy, token)
        await body(site)
        await asyncio.sleep(0.1)
        site.idle()
        await site.gateway.aclose()

    vtime.run(main())


def test_a_call_is_granted_reported_and_settled() -> None:
    async def body(site: Site) -> None:
        answer = await site.granted(stream=True, headers={"x-request-id": "mine", "authorization": "Bearer x"})
        told = answer.headers
        assert answer.status == 200
        assert told["x-weir-upstream"] == URL
        assert (told["x-weir-first-byte-within"], told["x-weir-end-within"]) == ("20.000", "60.000")
        assert told["x-weir-set-x-request-id"] == told["x-request-id"] == "mine"
        assert told["x-weir-set-content-type"] == "application/json"
        assert "x-weir-set-authorization" not in told, "the client's key is not the engine's"
        assert told["x-weir-hide-usage"] == "true"
        assert answer.body["stream_options"] == {"include_usage": True}
        assert site.engine.ledger.held > 50
        assert [call.state for call in site.port.calls()] == ["running"]
        await asyncio.sleep(2.0)
        assert site.first_byte(answer.hold) == 204
        assert site.engine.prefills.queued == 0
        assert [call.state for call in site.port.calls()] == ["streaming"]
        await asyncio.sleep(3.0)
        assert site.end(answer.hold, status=200, usage={**USAGE, "prompt_tokens_details": {"cached_tokens": 3}}) == 204
        await until(lambda: site.records)
        record = site.records[0]
        assert (record.outcome.value, record.status, record.settled, record.request_id) == ("ok", 200, True, "mine")
        assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (7, 5, 3)
        assert record.ttft == pytest.approx(2.0, abs=0.01)
        assert record.total == pytest.approx(5.0, abs=0.01)
        assert record.engine == site.engine.id
        assert site.gateway.metrics.outcomes()["ok"] == 1

    run(body)


def test_an_end_without_usage_is_charged_by_an_estimate_and_says_so() -> None:
    async def body(site: Site) -> None:
        answer = await site.granted(stream=True)
        await asyncio.sleep(1.0)
        assert site.first_byte(answer.hold) == 204
        await asyncio.sleep(1.0)
        assert site.end(answer.hold, status=200) == 204
        await until(lambda: site.records)
        record = site.records[0]
        assert (record.outcome.value, record.settled) == ("ok", False)
        assert record.prompt_tokens == record.estimated_prompt_tokens
        assert record.completion_tokens == pytest.approx(100, abs=2), "a second at the pace of the engine"
        assert site.engine.ledger.held == 0

    run(body)


def test_a_body_that_need_not_change_is_not_sent_back() -> None:
    async def body(site: Site) -> None:
        answer = await site.granted(stream=False)
        assert (answer.status, answer.body) == (204, None)
        assert "x-weir-hide-usage" not in answer.headers
        await asyncio.sleep(1.0)
        assert site.end(answer.hold, status=200, usage=USAGE) == 204
        await until(lambda: site.records)
        assert site.records[0].settled
        assert site.records[0].ttft > 0.0, "a whole answer's first byte comes with its last"

    run(body)


def test_shaping_is_that_of_the_policy() -> None:
    shaped = _with(shaping=(ShapingTier(kv_above=-1.0, max_tokens=64, except_=()),))

    async def body(site: Site) -> None:
        answer = await site.granted(500)
        assert (answer.status, answer.body["max_tokens"]) == (200, 64)
        assert site.end(answer.hold, status=200, usage=USAGE) == 204

    run(body, shaped)


def test_a_call_waits_its_turn_and_a_proxy_that_goes_away_leaves_the_queue() -> None:
    async def body(site: Site) -> None:
        first = await site.granted(1200)
        waiting, gone = site.ask(1200), site.ask(1200)
        await asyncio.sleep(5.0)
        assert not waiting.here
        assert [call.state for call in site.port.calls()] == ["running", "queued", "queued"]
        gone.leave()
        await asyncio.sleep(0.01)
        assert site.outcomes() == ["client_gone"]
        assert site.end(first.hold, status=200, usage=USAGE) == 204
        await until(lambda: waiting.here)
        assert site.end(waiting.hold, status=200, usage=USAGE) == 204
        await until(lambda: len(site.records) == 3)
        assert not gone.here
        assert site.records[-1].queue == pytest.approx(5.0, abs=0.1)

    run(body)


def test_a_proxy_that_chose_the_id_can_withdraw_its_call() -> None:
    async def body(site: Site) -> None:
        ids = ["first-of-the-proxy", "second-of-the-proxy"]
        first = await site.granted(1200, headers={"x-weir-hold": ids[0]})
        assert first.hold == ids[0]
        waiting = site.ask(1200, headers={"x-weir-hold": ids[1]})
        await asyncio.sleep(1.0)
        assert site.ask(headers={"x-weir-hold": ids[1]}).status == 409
        assert site.ask(headers={"x-weir-hold": ids[0]}).status == 409
        assert site.ask(headers={"x-weir-hold": "short"}).status == 400
        assert site.first_byte(ids[1]) == 404
        assert site.end(ids[1], status=200) == 404, "it has no engine yet"
        assert site.end(ids[1], failure="client_gone") == 204
        assert waiting.status == 499
        await asyncio.sleep(0.1)
        assert site.outcomes() == ["client_gone"]
        assert site.end(ids[1], failure="client_gone") == 404
        assert site.end(ids[0], status=200, usage=USAGE) == 204

    run(body)


def test_an_id_is_one_calls_however_their_bytes_come() -> None:
    async def body(site: Site) -> None:
        chosen = {"x-weir-hold": "both-of-the-proxys"}
        both = [site.asks(headers=chosen) for _ in range(2)]  # both heads are here before either's body
        first, second = both[0](), both[1]()
        await until(lambda: first.here and second.here)
        assert (first.hold, second.status, second.hold) == (chosen["x-weir-hold"], 409, "")
        made = await site.granted()
        assert site.ask(headers={"x-weir-hold": made.hold}).status == 409, "an id that was made here is one too"
        for hold in (first.hold, made.hold):
            assert site.end(hold, status=200, usage=USAGE) == 204

    run(body)


def test_a_refusal_is_whole() -> None:
    once = Limits(per_tenant=Limit(requests=RateLimit(rate=Rate(1, 60.0))))

    async def body(site: Site) -> None:
        first = await site.granted()
        assert site.end(first.hold, status=200, usage=USAGE) == 204
        refused = site.ask()
        await until(lambda: refused.here)
        assert (refused.status, refused.hold) == (429, "")
        assert refused.headers["x-weir-reason"] == "rate_limited"
        assert int(refused.headers["retry-after"]) > 30
        assert refused.body["error"]["type"] == "rate_limit_error"
        unknown = site.ask(model="nobody")
        await until(lambda: unknown.here)
        assert unknown.status in (404, 429)
        nowhere = site.ask(headers={"x-original-uri": "/v1/nothing"})
        assert nowhere.status == 404

    run(body, _with(limits=once))


@pytest.mark.parametrize(("begun", "lasts"), [(False, FIRST_BYTE), (True, DEADLINE)])
def test_a_hold_that_nothing_is_heard_of_is_given_back(begun: bool, lasts: float) -> None:
    async def body(site: Site) -> None:
        answer = await site.granted(stream=True)
        if begun:
            await asyncio.sleep(1.0)
            assert site.first_byte(answer.hold) == 204
        await asyncio.sleep(lasts - 1.5)
        assert site.engine.ledger.held > 0
        await asyncio.sleep(3.0)
        assert site.engine.ledger.held == 0
        assert site.end(answer.hold, status=200, usage=USAGE) == 404
        assert site.first_byte(answer.hold) == 404
        record = site.records[0]
        assert (record.outcome.value, record.status, record.reason) == ("client_gone", 499, "hold_expired")
        assert bool(record.completion_tokens) is begun, "what the engine may have written is charged"
        assert site.engine.breaker.failures == 0, "whose fault it was is not known"

    run(body)


@pytest.mark.parametrize(
    ("report", "outcome", "failures"),
    [
        ({"failure": "connect"}, "upstream", 1),
        ({"failure": "reset"}, "upstream", 1),
        ({"failure": "timeout"}, "upstream", 1),
        ({"status": 500}, "upstream", 1),
        ({"status": 400}, "engine_refused", 0),
        ({"status": 302}, "upstream", 1),
        ({"status": 401}, "upstream", 1),
        ({"failure": "client_gone"}, "client_gone", 0),
        ({"status": 200, "failure": "client_gone"}, "client_gone", 0),
        ({"status": 200, "failure": "truncated"}, "truncated", 1),
        ({"status": 200}, "ok", 0),
    ],
)
def test_every_end_is_told_apart(report: dict[str, Any], outcome: str, failures: int) -> None:
    async def body(site: Site) -> None:
        answer = await site.granted(stream=True)
        if report.get("status") == 200:
            assert site.first_byte(answer.hold) == 204
        await asyncio.sleep(1.0)
        assert site.end(answer.hold, **report) == 204
        await until(lambda: site.records)
        assert site.outcomes() == [outcome]
        assert site.engine.breaker.failures == failures
        assert site.engine.health.up is (report != {"failure": "connect"})

    run(body)


def test_reports_that_are_doubled_late_or_unknown_change_nothing() -> None:
    async def body(site: Site) -> None:
        answer = await site.granted(stream=True)
        assert [site.first_byte(answer.hold) for _ in range(3)] == [204] * 3
        assert [site.end(answer.hold, status=200, usage=USAGE) for _ in range(2)] == [204] * 2
        assert site.first_byte(answer.hold) == 204, "it has not been settled yet"
        await until(lambda: site.records)
        late = site.post(f"/decide/{answer.hold}/end", b'{"status":200}')
        assert (late.status, late.body["error"]["code"]) == (404, "unknown_hold")
        assert site.end("A" * 24, status=200) == 404
        assert len(site.records) == 1

    run(body)


@pytest.mark.parametrize(
    "report",
    [
        b"",
        b"[]",
        b"{",
        b"{}",
        b'{"status":"200"}',
        b'{"status":99}',
        b'{"status":200,"more":1}',
        b'{"status":200,"failure":"connect"}',
        b'{"failure":"truncated"}',
        b'{"failure":"bored"}',
        b'{"status":200,"usage":{"prompt_tokens":-1}}',
        b'{"status":200,"usage":{"prompt_tokens":1e99}}',
        b"[" * 9000,
        b"\xff",
    ],
)
def test_a_report_that_cannot_be_read_changes_nothing(report: bytes) -> None:
    async def body(site: Site) -> None:
        answer = await site.granted()
        bad = site.post(f"/decide/{answer.hold}/end", report)
        assert (bad.status, bad.body["error"]["code"]) == (400, "bad_report")
        assert site.engine.ledger.held > 0
        assert site.post(f"/decide/{answer.hold}/end", b" " * 20_000).status == 413
        assert site.post(f"/decide/{answer.hold}/first-byte", b"x").status == 413
        assert site.end(answer.hold, status=200, usage=USAGE) == 204

    run(body)


def test_the_token_is_demanded_and_goes_no_further() -> None:
    async def body(site: Site) -> None:
        shown = {"proxy-authorization": f"Bearer {TOKEN}"}
        for wrong in ({}, {"proxy-authorization": TOKEN}, {"proxy-authorization": f"Bearer {TOKEN}x"},
                      {"authorization": f"Bearer {TOKEN}"}, {"proxy-authorization": f"Basic {TOKEN}"}):  # fmt: skip
            refused = site.ask(headers=wrong)
            assert (refused.status, refused.headers["proxy-authenticate"]) == (407, "Bearer")
        answer = await site.granted(headers=shown)
        assert site.end(answer.hold, status=200) == 407
        told = site.post(f"/decide/{answer.hold}/end", b'{"status":200}', shown)
        assert told.status == 204
        assert TOKEN.encode() not in bytes(answer.wire.written)

    run(body, token=TOKEN)


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/", {}, 404),
        ("/v1/chat/completions", {}, 404),
        ("/decide/", {}, 404),
        ("/decide/short/end", {}, 404),
        ("/decide/" + "A" * 24 + "/more", {}, 404),
        ("/decide", {}, 400),
        ("/decide", {"x-original-uri": "v1/chat/completions"}, 400),
        ("/decide", {"x-original-uri": "/v1/chat/completions, /v1/completions"}, 400),
        ("/decide", {"x-original-uri": "/decide/" + "A" * 24 + "/end"}, 404),
        ("/decide", {"x-original-uri": "/v1/models"}, 405),
        ("/decide", {"x-original-uri": "/v1/chat/completions", "x-forwarded-for": "1.2.3.4, 5.6.7.8"}, 400),
        ("/decide", {"x-original-uri": "/v1/chat/completions", "x-forwarded-for": "localhost"}, 400),
    ],
)
def test_other_requests_are_refused_by_their_head(path: str, headers: dict[str, str], status: int) -> None:
    async def body(site: Site) -> None:
        assert site.post(path, b"{}", headers).status == status

    run(body)


def test_calls_are_bounded() -> None:
    async def body(site: Site) -> None:
        first, second = await site.granted(10), await site.granted(10)
        full = site.ask(10)
        assert (full.status, full.headers["x-weir-reason"], full.headers["retry-after"]) == (503, "connections", "2")
        assert site.end(first.hold, status=200) == 204
        await until(lambda: site.records)
        third = await site.granted(10)
        for each in (second, third):
            assert site.end(each.hold, status=200) == 204

    run(body, _with(server=ServerPolicy(max_connections=2)))


def test_a_reload_and_a_drain_go_for_these_calls_too() -> None:
    async def body(site: Site) -> None:
        running, kept = await site.granted(1200), await site.granted(10)
        waiting = site.ask(1200)
        await asyncio.sleep(1.0)
        site.data.apply(Configuration(_with(body=BodyPolicy(max=1 << 20))))
        assert site.port.pipeline.current.snapshot is site.gateway.current.snapshot
        drained = asyncio.ensure_future(site.data.drain(10.0))
        site.gateway.dispatch.refuse_waiting()
        await until(lambda: waiting.here)
        assert (waiting.status, waiting.headers["x-weir-reason"]) == (503, "draining")
        assert site.end(running.hold, status=200, usage=USAGE) == 204
        await asyncio.sleep(1.0)
        assert not drained.done()
        late = site.ask()
        await until(lambda: late.here)
        assert late.status == 503
        await drained
        assert site.loop.time() == pytest.approx(11.0, abs=0.1)
        assert site.end(kept.hold, status=200) == 404
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
        asked: list[Answer] = []
        for step, number in steps:
            one = asked[number % len(asked)] if asked else None
            match step:
                case "ask" | "stream":
                    asked.append(site.ask(rng.choice([10, 300, 700]), stream=step == "stream"))
                case "wait" | "long":
                    await asyncio.sleep(rng.uniform(0.0, 2.0 if step == "wait" else 40.0))
                case "reload":
                    site.data.apply(Configuration(PLAIN))
                case "leave" if one is not None:
                    one.leave()
                case _ if one is not None and one.hold:
                    match step:
                        case "first":
                            site.first_byte(one.hold)
                        case "end":
                            site.end(one.hold, status=rng.choice([200, 200, 400, 500]), usage=rng.choice([None, USAGE]))
                        case "gone":
                            site.end(one.hold, failure="client_gone")
                        case "broken":
                            site.end(one.hold, failure=rng.choice(["timeout", "reset"]))
            assert site.engine.ledger.held <= 900
            assert site.engine.ledger.in_flight == len(site.port.held)
        await asyncio.sleep(2 * DEADLINE)
        assert len(site.records) == len(asked)
        assert "bug" not in site.outcomes()

    run(body)
