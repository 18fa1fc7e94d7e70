"""Errors of every kind on /v1/messages, as Anthropic's clients read them, and engines without a route."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import uvloop

from gateway.core.policy.policy import BodyPolicy, Policy, Routing, Timeouts
from gateway.core.policy.traffic import Limit, Limits, RateLimit
from gateway.core.policy.types import Rate
from tests.faults.scripted import Answer, ScriptedEngine, ask, gateway_over, port_of, settled

POLICY = Policy(
    timeouts=Timeouts(first_byte=60.0, stall=60.0),
    routing=Routing(hold_unserved=0.0),
    body=BodyPolicy(max=2000),
)
STALLED = msgspec.structs.replace(POLICY, timeouts=Timeouts(first_byte=60.0, stall=0.3))
LIMITED = msgspec.structs.replace(POLICY, limits=Limits(per_tenant=Limit(requests=RateLimit(rate=Rate(1, 60.0)))))


def post(path: str = "/v1/messages", *, method: str = "POST", headers: str = "", **more: Any) -> bytes:
    fields = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], **more}
    body = json.dumps(fields).encode() if method == "POST" else b""
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{headers}"
    head += f"content-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


def asked(behaviour: str, payload: bytes, policy: Policy = POLICY, *, times: int = 1, up: bool = True) -> Answer:
    """The last of so many answers."""

    async def main() -> Answer:
        async with ScriptedEngine(behaviour).running() as engine, gateway_over([engine], policy) as gateway:
            if not up:
                for each in gateway.fleet:
                    each.check(False, gateway.clock())
                    each.health.up = False
            for _ in range(times):
                answer = await ask(port_of(gateway), payload)
            await settled(gateway)
            return answer

    return uvloop.run(main())


@pytest.mark.parametrize(
    ("behaviour", "payload", "status", "type"),
    [
        ("good", post(model="nope"), 404, "not_found_error"),
        ("good", post("/v1/messages/x"), 404, "not_found_error"),
        ("good", post("/v1/messages/batches"), 404, "not_found_error"),
        ("good", post("/v1/v1/messages"), 404, "not_found_error"),
        ("good", post("/messages"), 404, "not_found_error"),
        ("good", post(method="GET"), 405, "invalid_request_error"),
        ("good", post(max_tokens=-1), 400, "invalid_request_error"),
        ("good", post(system="x" * 3000), 413, "request_too_large"),
        ("good", post(headers="content-length: 1\r\n"), 400, "invalid_request_error"),
        ("good", post(headers="a: b\r\n" * 200), 431, "invalid_request_error"),
        ("good", post(headers="content-type: text/plain\r\n"), 400, "invalid_request_error"),
        ("400", post(), 400, "invalid_request_error"),
        ("404", post(), 404, "not_found_error"),
        ("429", post(), 429, "rate_limit_error"),
        ("500", post(), 500, "api_error"),
        ("503", post(), 502, "api_error"),
        ("401", post(), 502, "api_error"),
        ("407", post(), 502, "api_error"),
        ("307", post(), 502, "api_error"),
        ("garbage", post(), 502, "api_error"),
        ("hang", post(headers="x-weir-deadline-ms: 50\r\n"), 504, "timeout_error"),
    ],
)
def test_every_error_of_messages_has_anthropics_shape(behaviour: str, payload: bytes, status: int, type: str) -> None:
    assert_shaped(asked(behaviour, payload), status, type)


def test_limits_and_engines_that_are_away_too() -> None:
    assert_shaped(asked("good", post(), LIMITED, times=2), 429, "rate_limit_error")
    assert_shaped(asked("good", post(), up=False), 503, "overloaded_error")


@pytest.mark.parametrize(
    ("behaviour", "limit"),
    [
        ("500", Limit(requests=RateLimit(rate=Rate(1, 60.0)))),
        ("500", Limit(tokens=RateLimit(rate=Rate(100, 60.0)))),
        ("429", Limit(tokens=RateLimit(rate=Rate(100, 60.0)))),
    ],
)
@pytest.mark.parametrize("merged", [False, True])
def test_what_an_engine_has_failed_is_charged_to_nobody(behaviour: str, limit: Limit, merged: bool) -> None:
    policy = msgspec.structs.replace(
        POLICY, limits=Limits(per_tenant=limit), batching={"embeddings": 0.02} if merged else {}
    )
    answer = asked(behaviour, post("/v1/embeddings", messages=None, input="x" * 250), policy, times=4)
    assert (answer.status, answer.headers.get("x-weir-reason")) == (int(behaviour), None), "not its own limit"


@pytest.mark.parametrize("behaviour", ["die_mid_body", "stall", "no_done"])
def test_a_stream_of_messages_that_breaks_has_it_too(behaviour: str) -> None:
    answer = asked(behaviour, post(stream=True), STALLED if behaviour == "stall" else POLICY)
    *_, last = answer.body.split(b"event: error\ndata: ")
    told = json.loads(last.split(b"\n\n")[0])
    assert (told["type"], told["error"]["type"]) == ("error", "api_error")


def assert_shaped(answer: Answer, status: int, type: str) -> None:
    told = json.loads(answer.body)
    assert (answer.status, set(told), told["type"], told["error"]["type"]) == (status, {"type", "error"}, "error", type)
    assert told["error"]["message"]


@pytest.mark.parametrize(
    ("path", "more", "says"),
    [
        ("/v1/embeddings", {"input": "x"}, "does not offer /v1/embeddings: its engine has no such route, which"),
        ("/v1/embeddings", {"input": ["x", "y"]}, "It takes an embedding model"),
        ("/v1/score", {"text_1": "x", "text_2": "y"}, "Choose another model; GET /v1/models lists them."),
        ("/v1/completions/render", {"prompt": "x"}, "does not offer /v1/completions/render"),
    ],
)
def test_a_model_without_a_route_is_named_with_what_the_route_takes(path: str, more: dict[str, Any], says: str) -> None:
    answer = asked("no_route", post(path, messages=None, **more))
    error = json.loads(answer.body)["error"]
    assert (answer.status, error["code"], error["param"]) == (404, "unsupported_route", "model")
    assert "The model 'm' does not offer" in error["message"]
    assert says in error["message"]


def test_a_render_of_a_stream_is_answered_whole() -> None:
    answer = asked("good", post("/v1/chat/completions/render", stream=True))
    assert (answer.status, answer.complete) == (200, True)
    assert b"choices" in answer.body


@pytest.mark.parametrize("body", [b"", b"{}", b"x" * 1000])
def test_a_ping_may_have_a_body(body: bytes) -> None:
    answer = asked(
        "good", b"POST /ping HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )
    assert answer.status == 200


def test_a_body_that_nobody_answers_for_is_small() -> None:
    answer = asked("good", b"POST /ping HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2000\r\n\r\n" + b"x" * 2000)
    assert answer.status == 413
