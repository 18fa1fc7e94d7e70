"""Faults of engines, clients and the fleet: the caller's answer to each, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import resource
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import msgspec
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from gateway.core.admission.queues import Ticket
from gateway.core.engines.hold import Hold
from gateway.core.policy.policy import BodyPolicy, EngineEntry, FleetPolicy, Policy, Routing, Timeouts
from gateway.core.request.record import Record
from gateway.decider.grant import LocalGrant
from gateway.relay.answer import Relay
from gateway.relay.wire.connection import ClientConnection
from gateway.relay.wire.request_reader import RequestReader
from gateway.relay.wire.server import Request, Responder
from gateway.serve.run import Gateway
from gateway.upstream.answer_reader import AnswerReader
from gateway.upstream.client import Reply
from gateway.upstream.connection import EngineConnection
from tests.faults.scripted import (
    Answer,
    ScriptedEngine,
    ask,
    fds_at_rest,
    gateway_over,
    open_fds,
    port_of,
    request,
    settled,
)

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

PATIENT = Policy(timeouts=Timeouts(first_byte=60.0, stall=60.0), routing=Routing(hold_unserved=60.0))
# Where engines are waited for that never answer; the others beside them have these seconds too.
QUICK = Policy(timeouts=Timeouts(first_byte=3.0, stall=3.0), routing=Routing(hold_unserved=2.0))


def outcomes(gateway: Gateway) -> dict[str, int]:
    return gateway.metrics.outcomes()


def error(answer: Answer) -> dict[str, str]:
    found: dict[str, dict[str, str]] = json.loads(answer.body)
    assert set(found) == {"error"}
    assert set(found["error"]) == {"message", "type", "param", "code"}
    return found["error"]


def scenario(
    engines: list[str],
    body: Callable[[Gateway, list[ScriptedEngine]], Awaitable[None]],
    policy: Policy = PATIENT,
    write_stall: float = 60.0,
) -> None:
    """Run `body` over scripted engines of these behaviours, then assert that nothing is left."""

    async def main() -> None:
        fds = await fds_at_rest()
        scripted = [ScriptedEngine(behaviour) for behaviour in engines]
        async with AsyncExitStack() as stack:
            for engine in scripted:
                await stack.enter_async_context(engine.running())
            gateway = await stack.enter_async_context(gateway_over(scripted, policy, write_stall=write_stall))
            await body(gateway, scripted)
            await settled(gateway)
        async with asyncio.timeout(60):
            while any(engine.open for engine in scripted) or open_fds() > fds:
                await asyncio.sleep(0.001)

    uvloop.run(main())


@pytest.mark.parametrize(
    ("stream", "behaviour"),
    [
        (False, "good"),
        (True, "good"),
        (True, "late_end"),
        (True, "die_after_done"),  # the client has the whole answer
        (True, "garbage_after_done"),
    ],
)
def test_a_good_engine(stream: bool, behaviour: str) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        began = gateway.clock()
        answer = await ask(port_of(gateway), request(stream))
        took = gateway.clock() - began
        assert (answer.status, answer.complete) == (200, True)
        assert answer.headers["x-weir-engine"] == "engine-1"
        assert answer.headers["x-weir-class"] == "default"
        assert 0 <= int(answer.headers["x-weir-queue-ms"]) <= 1000 * took, "milliseconds, and a part of the call"
        assert answer.headers["x-request-id"]
        if stream:
            assert b"[DONE]" in answer.body
            assert b"usage" not in answer.body, "asked for by us, hidden from the client"
            assert json.loads(engines[0].requests[0])["stream_options"] == {"include_usage": True}
        await settled(gateway)
        assert outcomes(gateway) == {"ok": 1}

    scenario([behaviour], body)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_ends_with_the_connection_is_whole_or_cut(stream: bool) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        answer = await ask(port_of(gateway), request(stream))
        assert (answer.status, answer.complete) == (200, True)
        engines[0].behaviour = "cut_until_close"
        answer = await ask(port_of(gateway), request(stream))
        assert answer.status == 200
        assert b"in the middle of the answer" in answer.body if stream else not answer.complete
        await settled(gateway)
        assert outcomes(gateway) == {"ok": 1, "truncated": 1}

    scenario(["until_close"], body)


@pytest.mark.parametrize(("behaviour", "doubted"), [("404", True), ("400", False), ("good", False)])
def test_an_engine_that_answers_404_is_asked_for_its_models_again(behaviour: str, doubted: bool) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        await ask(port_of(gateway), request(False))
        await settled(gateway)
        assert [engine.health.doubted for engine in gateway.fleet] == [doubted]

    scenario([behaviour], body)


def test_usage_stays_for_a_client_that_asked() -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        answer = await ask(port_of(gateway), request(True, stream_options={"include_usage": True}))
        assert b'"usage":{"prompt_tokens":7' in answer.body

    scenario(["good"], body)


@pytest.mark.parametrize(
    "bad",
    [
        "die_before_headers",
        "die_after_headers",
        "garbage",
        "503",
        "502",
        "429",
        "401",
        "307",
        "hang",
        "text/html",
        "application/json",
        "empty",
        "no_content",
        "gzip",
    ],
)
def test_a_failure_before_the_first_byte_is_retried_elsewhere_unseen(bad: str) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        for _ in range(3):
            answer = await ask(port_of(gateway), request(True))
            assert (answer.status, answer.complete) == (200, True)
            assert b"[DONE]" in answer.body
        await settled(gateway)
        assert outcomes(gateway) == {"ok": 3}

    scenario([bad, "good"], body, QUICK if bad == "hang" else PATIENT)


@pytest.mark.parametrize(
    ("bad", "stream"),
    [
        pytest.param(name, stream, marks=[pytest.mark.slow] if name == "hang" else [])
        for name in ("die_before_headers", "garbage", "503", "502", "401", "307", "hang", "text/html", "empty", "gzip")
        for stream in (False, True)
    ],
)
def test_when_every_engine_fails_the_caller_gets_one_clear_502_and_attempts_are_bounded(bad: str, stream: bool) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        answer = await ask(port_of(gateway), request(stream))
        assert (answer.status, answer.complete) == (502, True)
        assert error(answer)["code"] == "upstream_error"
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.headers["x-weir-reason"] == "upstream"
        assert sum(len(engine.requests) for engine in engines) == 3, "the first attempt and two retries"

    scenario([bad, bad], body, QUICK)


@pytest.mark.parametrize("bad", ["die_mid_body", "stall", "no_done", "no_newline"])
def test_a_stream_that_breaks_ends_with_an_error_event_and_no_done(bad: str) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        answer = await ask(port_of(gateway), request(True))
        assert (answer.status, answer.complete) == (200, True)
        assert b"[DONE]" not in answer.body
        events = [line for line in answer.body.split(b"\n") if line.startswith(b"data: ")]
        assert json.loads(events[-1][6:])["error"]["code"] == "upstream_error"
        for event in events:
            json.loads(event[6:])  # no half event reaches a client
        assert sum(len(engine.requests) for engine in engines) == 1, "no retry after the first byte"
        await settled(gateway)
        assert outcomes(gateway) == {"truncated": 1}

    scenario([bad, bad], body, QUICK if bad == "stall" else PATIENT)


def test_a_plain_answer_that_breaks_is_seen_as_broken() -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        answer = await ask(port_of(gateway), request())
        assert not answer.complete
        await settled(gateway)
        assert outcomes(gateway) == {"truncated": 1}

    scenario(["die_mid_body"], body)


@pytest.mark.parametrize("status", ["400", "404", "422"])
def test_an_engines_own_error_passes_through_once(status: str) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        answer = await ask(port_of(gateway), request(True))
        assert answer.status == int(status)
        assert error(answer)["message"] == "scripted"
        assert sum(len(engine.requests) for engine in engines) == 1

    scenario([status, status], body)


def to_messages(**more: object) -> bytes:
    return request(**more).replace(b"/v1/chat/completions", b"/v1/messages")  # type: ignore[arg-type] # a test's own


@pytest.mark.parametrize(
    ("behaviour", "asked", "status", "type"),
    [
        ("400", to_messages(), 400, "invalid_request_error"),
        ("404", to_messages(), 404, "not_found_error"),
        ("429", to_messages(), 429, "rate_limit_error"),
        ("500", to_messages(), 500, "api_error"),
        ("good", to_messages(model="nope"), 404, "not_found_error"),
        ("good", to_messages(max_tokens="x"), 400, "invalid_request_error"),
        ("good", to_messages().replace(b"POST", b"PUT"), 405, "invalid_request_error"),
        ("good", to_messages().replace(b"/v1/messages", b"/v1/messages/batches"), 404, "not_found_error"),
        ("good", to_messages().replace(b"-length: ", b"-encoding: gzip\r\ncontent-length: "), 0, ""),
    ],
)
def test_anthropics_clients_get_its_errors_by_whomever(behaviour: str, asked: bytes, status: int, type: str) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        answer = await ask(port_of(gateway), asked)
        found = json.loads(answer.body)
        assert (set(found), found["type"], set(found["error"])) == ({"type", "error"}, "error", {"type", "message"})
        if status:
            assert (answer.status, found["error"]["type"]) == (status, type)

    scenario([behaviour], body)


def test_anthropics_streams_break_with_its_error_event() -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        answer = await ask(port_of(gateway), to_messages(stream=True))
        _, _, event = answer.body.partition(b"event: error\ndata: ")
        found = json.loads(event.split(b"\n")[0])
        assert (found["type"], found["error"]["type"]) == ("error", "api_error")

    scenario(["die_mid_body"], body)


@pytest.mark.parametrize(("status", "estimated"), [("404", True), ("405", True), ("400", False)])
def test_tokens_that_no_engine_counts_are_estimated_and_the_header_says_so(status: str, estimated: bool) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        records: list[Record] = []
        gateway.pipeline.endings.observe = records.append
        asked = request().replace(b"/v1/chat/completions", b"/v1/messages/count_tokens")
        answer = await ask(port_of(gateway), asked)
        assert answer.status == (200 if estimated else 400)
        assert answer.headers.get("x-weir-estimated") == ("true" if estimated else None)
        await settled(gateway)
        (record,) = records
        assert record.prompt_tokens == 0, "nothing was read into a cache"
        if estimated:
            assert json.loads(answer.body) == {"input_tokens": record.estimated_prompt_tokens}
        assert engines[0].heads[0].startswith(b"POST /v1/messages/count_tokens ")

    scenario([status], body)


def test_an_engines_failure_is_in_its_own_words_for_the_log_alone() -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        records: list[Record] = []
        gateway.pipeline.endings.observe = records.append
        answer = await ask(port_of(gateway), request())
        assert (answer.status, error(answer)["code"]) == (500, "upstream_error")
        assert b"scripted" not in answer.body
        await settled(gateway)
        assert [record.reason for record in records] == ["scripted"]

    scenario(["500"], body)


@pytest.mark.parametrize("behaviour", ["refused", "die_before_headers", "garbage", "503", "500", "500_cut", "good"])
@pytest.mark.parametrize("stream", [False, True])
def test_no_answer_holds_an_engines_address(behaviour: str, stream: bool) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        records: list[Record] = []
        gateway.pipeline.endings.observe = records.append
        port = engines[0].url.rpartition(":")[2]
        if behaviour == "refused":
            engines[0].stop()
        answer = await ask(port_of(gateway), request(stream))
        head = "".join(f"{name}: {value}\n" for name, value in answer.headers.items())
        for said in (head, answer.body.decode()):
            assert port not in said
            assert "127.0.0.1" not in said
        await settled(gateway)
        (record,) = records
        if answer.status == 502:
            assert port in record.reason or behaviour == "500_cut", "it is for the log"
        assert record.engine == f"127.0.0.1:{port}"

    scenario([behaviour if behaviour != "refused" else "good"], body, QUICK)


def test_the_policy_names_engines() -> None:
    async def main() -> None:
        engine = ScriptedEngine("good")
        async with engine.running():
            policy = Policy(fleet=FleetPolicy(engines=(EngineEntry(url=engine.url, name="left"),)))
            async with gateway_over([], policy) as gateway:
                assert (await ask(port_of(gateway), request())).headers["x-weir-engine"] == "left"
                await settled(gateway)

    uvloop.run(main())


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (f"00-{TRACE}-00f067aa0ba902b7-01", TRACE),
        (f"00-{TRACE}-0000000000000000-01", None),
        ('"><script>', None),
        (None, None),
    ],
)
@pytest.mark.parametrize("model", ["m", "nobody-has-it"])
def test_a_trace_is_in_the_log_the_answer_and_the_engines_request(
    given: str | None, expected: str | None, model: str
) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        records: list[Record] = []
        gateway.pipeline.endings.observe = records.append
        line = b"" if given is None else f"\r\ntraceparent: {given}\r\ntracestate: a=b".encode()
        asked = request(model=model).replace(b"host: localhost", b"host: localhost" + line)
        answer = await ask(port_of(gateway), asked)
        assert answer.headers.get("x-trace-id") == expected
        await settled(gateway)
        assert [record.trace_id for record in records] == [expected or UNSET]
        assert [b"traceparent" in head for head in engines[0].heads] == [expected is not None] * (model == "m")

    scenario(["good"], body)


def test_an_engine_that_dies_in_its_own_error_is_a_502() -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        answer = await ask(port_of(gateway), request())
        assert (answer.status, error(answer)["code"]) == (502, "upstream_error")

    scenario(["500_cut"], body)


def test_unknown_model_no_engine_and_bad_input() -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        port = port_of(gateway)
        answer = await ask(port, request(model="nobody"))
        assert (answer.status, error(answer)["code"]) == (404, "model_not_found")
        assert answer.headers["x-should-retry"] == "false"
        answer = await ask(port, request(max_tokens=-1))
        assert (answer.status, error(answer)["param"]) == (400, "max_tokens")
        answer = await ask(port, request().replace(b"/v1/chat/completions", b"/sleep?level=1"))
        assert answer.status == 404
        answer = await ask(port, b"GET /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
        assert not engines[0].requests, "nothing of this reached an engine"
        for engine in gateway.fleet:
            engine.down()
        answer = await ask(port, request())
        assert (answer.status, error(answer)["code"]) == (503, "server_is_overloaded")
        assert answer.headers["x-weir-reason"] == "no_engine"

    scenario(["good"], body, QUICK)


def test_calls_wait_for_an_engine_that_restarts() -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        (engine,) = gateway.fleet
        engine.down()
        calls = [asyncio.create_task(ask(port_of(gateway), request(number % 2 == 1))) for number in range(6)]
        async with asyncio.timeout(60):
            while gateway.dispatch.estimates.waiting("m") < 6:
                await asyncio.sleep(0.001)
        calls[0].cancel()
        engine.health.up = True
        gateway.engines.changed(engine)
        answers = await asyncio.gather(*calls[1:])
        assert [(answer.status, answer.complete) for answer in answers] == [(200, True)] * 5

    scenario(["good"], body)


def test_only_an_engine_that_goes_by_priorities_is_told_them_and_no_client_may() -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        told = []
        for priorities in (False, True):
            (engine,) = gateway.fleet
            engine.priorities = priorities
            for name in (b"interactive", b"batch"):
                asked = request().replace(b"content-type", b"x-weir-class: " + name + b"\r\ncontent-type", 1)
                assert (await ask(port_of(gateway), asked)).status == 200
                told.append(json.loads(engines[0].requests[-1]).get("priority"))
        assert told == [None, None, None, 3]
        refused = await ask(port_of(gateway), request(priority=0))
        assert (refused.status, error(refused)["param"]) == (400, "priority")

    scenario(["good"], body)


def test_a_refused_connection_takes_the_engine_out_at_once() -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        engines[0].stop()
        answers = [await ask(port_of(gateway), request()) for _ in range(6)]
        assert [answer.status for answer in answers] == [200] * 6
        up = {engine.id: engine.health.up for engine in gateway.fleet}
        dead = engines[0].url.removeprefix("http://")
        if not up[dead]:
            assert sum(up.values()) == 1

    scenario(["good", "good"], body)


@pytest.mark.parametrize("behaviour", ["hang", "stall", "endless"])
def test_a_client_that_leaves_takes_its_request_off_the_engine(behaviour: str) -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gateway))
        writer.write(request(True))
        if behaviour == "hang":
            async with asyncio.timeout(60):
                while not engines[0].requests:
                    await asyncio.sleep(0.001)
        else:
            await reader.read(1)
        engines[0].closed.clear()
        writer.write(b"bytes that must not hide the end")
        writer.transport.abort()
        async with asyncio.timeout(60):
            await engines[0].closed.wait()
        await settled(gateway)
        assert outcomes(gateway) == {"client_gone": 1}

    scenario([behaviour], body)


def test_a_client_that_reads_nothing_is_cut_off_and_the_engine_freed() -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        _reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gateway), limit=1024)
        writer.transport.pause_reading()  # type: ignore[attr-defined] # a transport of asyncio's is both ways
        writer.write(request(True))
        async with asyncio.timeout(60):
            await engines[0].closed.wait()
        await settled(gateway)
        assert outcomes(gateway) == {"slow_client": 1}
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 64 * 1024, f"{grown} KiB: what the client did not read was kept"
        writer.transport.abort()

    scenario(["endless"], body, write_stall=0.3)


def test_a_call_in_the_queue_of_a_full_engine_is_cancelled_with_its_client() -> None:
    async def body(gateway: Gateway, engines: list[ScriptedEngine]) -> None:
        engine = next(iter(gateway.fleet))
        engine.ledger.slots = 1
        first = asyncio.create_task(ask(port_of(gateway), request()))
        async with asyncio.timeout(60):
            while not engine.ledger.in_flight:
                await asyncio.sleep(0.001)
            _, writer = await asyncio.open_connection("127.0.0.1", port_of(gateway))
            writer.write(request())
            while not any(gateway.dispatch.queues.values()):
                await asyncio.sleep(0.001)
        writer.transport.abort()
        first.cancel()
        await asyncio.wait((first,))
        await settled(gateway)
        assert outcomes(gateway) == {"client_gone": 2}

    scenario(["hang"], body)


# What lives as long as one call or one connection, and holds memory while it does.
HOLDERS = (
    *(ClientConnection, RequestReader, EngineConnection, AnswerReader, Responder, Request, Reply, Relay),
    *(Ticket, Hold, LocalGrant),
)
BEHAVIOURS = [
    *("good", "good", "good", "die_before_headers", "die_after_headers", "die_mid_body", "garbage", "no_done"),
    *("no_newline", "stall", "hang", "400", "500", "500_cut", "503", "late_end"),
]


async def client(port: int, kind: str, rng: random.Random) -> int:
    """One client of the mix; the status it saw, 0 if it left."""
    stream = rng.random() < 0.6
    unread = "x" * rng.choice((0, 0, 10_000, 300_000))  # a body that is counted, and one too many of a few
    payload = request(stream, model="nobody" if kind == "unknown" else "m", unread=unread)
    if kind in ("ask", "unknown"):
        return (await ask(port, payload)).status
    _reader, writer = await asyncio.open_connection("127.0.0.1", port)
    if kind == "cut":
        writer.write(payload[: rng.randrange(1, len(payload))])
    elif kind == "garbage":
        writer.write(rng.randbytes(200) + b"\r\n\r\n")
    else:
        writer.write(payload)
    await asyncio.sleep(rng.uniform(0, 0.05))
    writer.transport.abort()
    return 0


@settings(max_examples=2)
@given(seed=st.integers(0, 2**32))
def test_after_a_random_mix_of_everything_nothing_is_left(seed: int) -> None:
    a_random_mix(seed)


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_after_many_random_mixes_nothing_is_left(seed: int) -> None:
    a_random_mix(seed)


def holders() -> Counter[str]:
    gc.collect()
    return Counter(type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, HOLDERS))


def a_random_mix(seed: int) -> None:
    rng = random.Random(seed)
    before = holders()  # other tests' parameters are some

    async def main() -> None:
        fds = await fds_at_rest()
        engines = [ScriptedEngine(BEHAVIOURS, random.Random(rng.random())) for _ in range(3)]
        timeouts = Timeouts(first_byte=0.1, stall=0.1)
        policy = msgspec.structs.replace(QUICK, timeouts=timeouts, body=BodyPolicy(memory=1_000_000))
        async with AsyncExitStack() as stack:
            for engine in engines:
                await stack.enter_async_context(engine.running())
            quick = {"body_timeout": 2.0, "headers_timeout": 0.2}
            gateway = await stack.enter_async_context(gateway_over(engines, policy, seed, **quick))
            port, tasks = port_of(gateway), []
            for _ in range(120):
                kind = rng.choices(["ask", "leave", "cut", "garbage", "unknown"], [10, 4, 1, 1, 1])[0]
                tasks.append(asyncio.create_task(client(port, kind, rng)))
                if rng.random() < 0.3:
                    await asyncio.sleep(rng.uniform(0, 0.01))
                for engine in gateway.fleet:
                    if not engine.health.up or rng.random() < 0.02:
                        engine.check(rng.random() < 0.9, gateway.clock())
                gateway.dispatch.pump()
            statuses = await asyncio.gather(*tasks)
            await settled(gateway)
            assert set(statuses) <= {0, 200, 400, 404, 500, 502, 503}
            assert "bug" not in outcomes(gateway)
            async with asyncio.timeout(60):
                while gateway.server.connections:
                    await asyncio.sleep(0.001)
        async with asyncio.timeout(60):
            while any(engine.open for engine in engines) or open_fds() > fds:
                await asyncio.sleep(0.001)
        assert len(asyncio.all_tasks()) == 1

    uvloop.run(main())
    left = holders() - before
    assert not left, "objects of ended calls that something still holds"
