"""This project's picker: what it holds and records, its refusals, the headers of an engine, TLS."""

from __future__ import annotations

import json
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loadtest.processes import Child, Gateway, free_port, get, until
from tests.certificates import certificate
from tests.e2e.children import SimEngine
from tests.epp.conftest import Site, start
from tests.epp.ext_proc import ProcessingRequest
from tests.epp.proxy import (
    BUFFERED,
    DUPLEX,
    NONE,
    STREAMED,
    Stream,
    picked,
    request_bodies,
    request_headers,
    response_body,
)
from tests.epp.proxy import response_headers as answer_headers
from tests.epp.test_picker import chat, whole

pytestmark = pytest.mark.slow
KEY = "sk-engine"
POLICY = """
fleet:
  poll: 100ms
  health: 20s
  engines: [{url: URL, api_key_file: key, name: gpu}]
body: {max: 200KiB, max_media: 200KiB}
limits: {per_tenant: {tokens: 1M/min}}
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A picker of one engine, which wants a key."""
    folder = tmp_path_factory.mktemp("own")
    engine = SimEngine(folder / "engine.log", "--speed", "20", "--api-key", KEY)
    (folder / "key").write_text(KEY)
    (folder / "key").chmod(0o600)
    with engine.child:
        site = start(folder, [], POLICY.replace("URL", engine.url))
        site.endpoints = [engine.url.partition("//")[2]]
        assert site.gateway is not None
        with site.gateway as gateway:
            yield site
            assert "Traceback" not in gateway.child.output(), gateway.child.output()


def gateway_of(site: Site) -> Gateway:
    assert site.gateway is not None
    return site.gateway


def recorded(site: Site, request_id: str) -> dict[str, Any]:
    """The record of one call, once that has ended: other tests' calls may still be recorded meanwhile."""

    def records() -> list[dict[str, Any]]:
        lines = gateway_of(site).child.output().splitlines()
        return [json.loads(line) for line in lines if '"event":"call"' in line and f'"{request_id}"' in line]

    assert until(lambda: len(records()) == 1, 60.0) is not None, records()
    assert until(gateway_of(site).idle, 60.0) is not None
    return records()[0]


def usage_event(prompt: int, completion: int) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"


def test_a_whole_answer_is_settled_by_its_usage(own: Site) -> None:
    request_id = uuid.uuid4().hex
    with own.channel() as channel, Stream(channel) as stream:
        assert stream.request(chat(own), request_id=request_id).endpoints == own.endpoints
        stream.response(200, [whole(4)])
    record = recorded(own, request_id)
    assert record["outcome"] == "ok"
    assert (record["prompt_tokens"], record["completion_tokens"], record["engine"]) == (5, 4, "gpu")


def test_usage_that_the_client_did_not_ask_for_is_read_and_left_out(own: Site) -> None:
    request_id = uuid.uuid4().hex
    event = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    with own.channel() as channel, Stream(channel) as stream:
        decision = stream.request(chat(own, stream=True), request_id=request_id)
        assert json.loads(decision.body)["stream_options"]["include_usage"] is True
        chunks = [event, usage_event(7, 3), b"data: [DONE]\n\n"]
        passed = stream.response(200, chunks, content_type="text/event-stream")
        assert b"".join(passed) == event + b"data: [DONE]\n\n"
    record = recorded(own, request_id)
    assert record["outcome"] == "ok"
    assert (record["prompt_tokens"], record["completion_tokens"]) == (7, 3)


def test_the_engine_gets_its_own_key_and_none_of_the_clients_headers(own: Site) -> None:
    headers = [("authorization", "Bearer sk-client"), ("x-api-key", "s"), ("cookie", "c=1")]
    with own.channel() as channel, Stream(channel) as stream:
        decision = stream.request(chat(own), headers=headers)
        assert decision.headers["authorization"] == f"Bearer {KEY}"
        assert {"x-api-key", "cookie"} <= set(decision.removed)
        assert "authorization" not in decision.removed
        stream.send(answer_headers(200))
        told = picked(iter([stream.receive()])).headers
        assert told["x-weir-class"] == "default"
        assert not {"authorization", "content-type", "content-length"} & set(told)


@pytest.mark.parametrize(
    ("named", "more", "class_name"),
    [("batch", [], "batch"), ("gold", [], "default"), ("batch", [("x-weir-class", "interactive")], "interactive")],
)
def test_an_objective_that_is_a_class_is_the_calls(
    own: Site, named: str, more: list[tuple[str, str]], class_name: str
) -> None:
    with own.channel() as channel, Stream(channel) as stream:
        decision = stream.request(chat(own), headers=[("x-gateway-inference-objective", named), *more])
        assert "x-gateway-inference-objective" in decision.removed
        stream.send(answer_headers(200))
        assert picked(iter([stream.receive()])).headers["x-weir-class"] == class_name


@pytest.mark.parametrize("how", ["announced", "in pieces"])
def test_a_body_over_the_limit_is_413(own: Site, how: str) -> None:
    body = chat(own, "x" * 300_000)
    headers = [("content-length", str(len(body)))] if how == "announced" else []
    with own.channel() as channel, Stream(channel) as stream:
        stream.send(request_headers(headers=headers))
        if how != "announced":
            stream.send(*request_bodies(body, 60_000))
        decision = picked(iter([stream.receive()]))
    assert decision.status == 413
    assert json.loads(decision.body)["error"]["code"] == "request_too_large"


@pytest.mark.parametrize(
    ("body", "path", "status"),
    [
        (b"{", "/v1/chat/completions", 400),
        (b"{}", "/v1/nothing", 404),
        (b'{"model":"m","prompt":"a"}', "/v1/completions", 404),
    ],
)
def test_a_refused_request_gets_the_same_body_as_elsewhere(own: Site, body: bytes, path: str, status: int) -> None:
    with own.channel() as channel, Stream(channel) as stream:
        stream.send(request_headers(path=path), *request_bodies(body, 99))
        decision = picked(iter([stream.receive()]))
    assert decision.status == status
    assert json.loads(decision.body)["error"]["message"]
    assert decision.headers["content-type"] == "application/json"


@pytest.mark.parametrize("mode", [STREAMED, NONE])
def test_a_proxy_that_does_not_pass_whole_bodies_is_told_its_setting(own: Site, mode: int) -> None:
    with own.channel() as channel, Stream(channel) as stream:
        stream.send(request_headers(mode=mode))
        decision = picked(iter([stream.receive()]))
    assert decision.status == 500
    assert "request_body_mode" in json.loads(decision.body)["error"]["message"]


@pytest.mark.parametrize(
    ("details", "status", "outcome"),
    [
        ("upstream_reset_before_response_started{remote_connection_failure|Connection_refused}", 503, "upstream"),
        ("via_upstream", 500, "upstream"),
        ("via_upstream", 404, "engine_refused"),
        ("via_upstream", 302, "upstream"),
    ],
)
def test_an_engines_failure_is_recorded(own: Site, details: str, status: int, outcome: str) -> None:
    request_id = uuid.uuid4().hex
    with own.channel() as channel, Stream(channel) as stream:
        assert stream.request(chat(own), request_id=request_id).destination
        stream.send(answer_headers(status, details=details, ended=True))
        stream.receive()
    assert recorded(own, request_id)["outcome"] == outcome


@pytest.mark.parametrize(
    ("sent", "outcome"),
    [
        ([], "client_gone"),
        ([answer_headers(200, content_type="text/event-stream"), response_body(b"data: {}\n\n", False)], "client_gone"),
        # OpenAI's client closes here, before the chunk that ends the body.
        ([answer_headers(200, content_type="text/event-stream"), response_body(b"data: [DONE]\n\n", False)], "ok"),
        ([answer_headers(200, content_type="text/event-stream"), response_body(b"data: {}\n\n", True)], "truncated"),
        ([answer_headers(200), response_body(b'{"choices":[', True)], "truncated"),
        ([answer_headers(200, content_type="text/plain"), response_body(b'{"choices":[', True)], "ok"),
    ],
    ids=[
        "before the answer",
        "in a stream",
        "after its last event",
        "a stream without its end",
        "half an object",
        "no JSON",
    ],
)
def test_an_answer_that_ends_early_is_recorded(own: Site, sent: list[Any], outcome: str) -> None:
    request_id = uuid.uuid4().hex
    with own.channel() as channel, Stream(channel) as stream:
        assert stream.request(chat(own, stream=True), request_id=request_id).destination
        stream.send(*sent)
        for _ in sent:
            stream.receive()
    assert recorded(own, request_id)["outcome"] == outcome


@pytest.mark.parametrize("status", ["", "2OO", "-20", "20000000000000000000"])
def test_an_answer_without_a_status_ends_the_stream(own: Site, status: str) -> None:
    request_id = uuid.uuid4().hex
    with own.channel() as channel, Stream(channel) as stream:
        assert stream.request(chat(own), request_id=request_id).destination
        head = answer_headers(200)
        for each in head.response_headers.headers.headers:
            if each.key == ":status":
                each.raw_value = status.encode()
        stream.send(head)
        with pytest.raises(grpc.RpcError) as ended:
            stream.receive()
        assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert recorded(own, request_id)["outcome"] == "client_gone"


@pytest.mark.parametrize("over", [0, 1])
@pytest.mark.parametrize("mode", [DUPLEX, BUFFERED])
def test_a_body_of_just_the_limit_is_taken(own: Site, mode: int, over: int) -> None:
    body = chat(own)
    body += b" " * (200 * 1024 - len(body) + over)
    with own.channel() as channel, Stream(channel) as stream:
        stream.send(request_headers(mode=mode))
        if mode == BUFFERED:
            stream.receive()
        stream.send(*request_bodies(body, 60_000 if mode == DUPLEX else len(body)))
        decision = picked(iter([stream.receive()]))
        assert (decision.status, bool(decision.destination)) == ((413, False) if over else (0, True))


@pytest.mark.parametrize("after", range(8))
def test_a_proxy_may_end_the_stream_after_each_message(own: Site, after: int) -> None:
    """Half-close after so many messages of a whole exchange: nothing stays held."""
    body = chat(own, stream=True)
    event = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    steps = [
        request_headers(),
        *request_bodies(body, len(body) // 2 + 1),
        answer_headers(200, content_type="text/event-stream"),
        response_body(event, False),
        response_body(usage_event(7, 3), False),
        response_body(b"data: [DONE]\n\n", True),
    ]
    with own.channel() as channel, Stream(channel) as stream:
        for number, message in enumerate(steps[:after]):
            stream.send(message)
            if number == 2:
                assert picked(stream._until_decided(DUPLEX, False)).destination
        stream.end()
        for _ in stream.call:
            pass
        assert stream.call.code() is grpc.StatusCode.OK
    assert until(gateway_of(own).idle, 60.0) is not None


MESSAGES = {
    "request_headers": request_headers(),
    "request_body": next(iter(request_bodies(b"{}", 9))),
    "response_headers": answer_headers(200),
    "response_body": response_body(b"{}", True),
    "nothing": ProcessingRequest(),
}


# What is due after each message; whatever else comes then is out of order.
DUE = {
    "": "request_headers",
    "request_headers": "request_body",
    "granted": "response_headers",
    "response_headers": "response_body",
}


@pytest.mark.parametrize(
    ("before", "message"), [(before, message) for before, due in DUE.items() for message in MESSAGES if message != due]
)
def test_a_message_out_of_order_ends_the_stream(own: Site, before: str, message: str) -> None:
    with own.channel() as channel, Stream(channel) as stream:
        if before == "request_headers":
            stream.send(MESSAGES[before])
        elif before:
            assert stream.request(chat(own)).destination
        if before == "response_headers":
            stream.send(MESSAGES[before])
            stream.receive()
        stream.send(MESSAGES[message])
        with pytest.raises(grpc.RpcError) as ended:
            stream.receive()
        assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert until(gateway_of(own).idle, 60.0) is not None


def test_models_are_listed_by_the_picker(own: Site) -> None:
    with own.channel() as channel, Stream(channel) as stream:
        stream.send(request_headers(method="GET", path="/v1/models", ended=True))
        decision = picked(iter([stream.receive()]))
    assert decision.status == 200
    assert [each["id"] for each in json.loads(decision.body)["data"]] == ["sim"]


def test_an_answer_in_one_buffer_loses_only_the_usage_that_nobody_asked_for(own: Site) -> None:
    event = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    answer = event + usage_event(7, 3) + b"data: [DONE]\n\n"
    with own.channel() as channel, Stream(channel) as stream:
        assert stream.request(chat(own, stream=True), answer_mode=BUFFERED).destination
        passed = stream.response(200, [answer], mode=BUFFERED, content_type="text/event-stream")
    assert passed == [event + b"data: [DONE]\n\n"]


def states(site: Site) -> list[str]:
    return [call["state"] for call in json.loads(get(f"{gateway_of(site).control}/calls")[1])["calls"]]


def test_calls_are_shown_while_they_run(own: Site) -> None:
    with own.channel() as channel, Stream(channel) as stream:
        assert stream.request(chat(own)).destination
        assert until(lambda: states(own) == ["running"], 60.0) is not None, states(
            own
        )  # and earlier tests' calls are over
        stream.response(200, [whole()])


def test_a_gateway_of_several_processes_has_one_picker_also_after_its_death(own: Site, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(0o600)
    site = start(tmp_path, [], POLICY.replace("URL", f"http://{own.endpoints[0]}"), "--workers", "2")

    def picks() -> bool:
        with site.channel() as channel, Stream(channel) as stream:
            try:
                return stream.request(chat(site)).endpoints == own.endpoints
            except (grpc.RpcError, StopIteration):
                return False

    with gateway_of(site) as gateway:
        assert until(picks, 60.0) is not None
        shown = json.loads(get(f"{gateway.control}/processes")[1])["processes"]
        (decider,) = [each["pid"] for each in shown if each["role"] == "decider"]
        os.kill(decider, signal.SIGKILL)
        assert until(picks, 60.0) is not None
        assert until(gateway.idle, 60.0) is not None
        assert "Traceback" not in gateway.child.output(), gateway.child.output()


def test_with_tls_only_a_proxy_with_a_certificate_is_served(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    port = free_port()
    tls = ("--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(cert))
    ports = ("--listen", "127.0.0.1:0", "--control", "127.0.0.1:0", "--epp", f"127.0.0.1:{port}")
    argv = [sys.executable, "-m", "gateway.cli", "serve", *ports, *tls, "--engine", "http://127.0.0.1:9"]
    check = health_pb2.HealthCheckRequest(service="liveness")
    with Child("gateway", argv, tmp_path / "log") as child:
        child.line(r"^data port (https://\S+)", 60.0)
        for shown, served in (((key.read_bytes(), cert.read_bytes()), True), ((None, None), False)):
            credentials = grpc.ssl_channel_credentials(cert.read_bytes(), *shown)
            with grpc.secure_channel(f"localhost:{port}", credentials) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                if served:
                    assert stub.Check(check, timeout=60).status == health_pb2.HealthCheckResponse.SERVING
                    continue
                with pytest.raises(grpc.RpcError) as refused:
                    stub.Check(check, timeout=60)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
