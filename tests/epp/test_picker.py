"""Black-box suite for endpoint pickers of the Gateway API Inference Extension (protocol 1.0.0), as a proxy sees them.

The cases name no picker; `conftest.py` starts one, or takes the address of one that runs.
"""

from __future__ import annotations

import ipaddress
import json

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.epp.conftest import Site
from tests.epp.proxy import (
    BUFFERED,
    DESTINATION,
    DUPLEX,
    STREAMED,
    Picked,
    Stream,
    request_bodies,
    request_headers,
    response_body,
    response_headers,
)

pytestmark = pytest.mark.slow
MODES = pytest.mark.parametrize("mode", [DUPLEX, BUFFERED], ids=["duplex", "buffered"])


def chat(site: Site, text: str = "hello", **fields: object) -> bytes:
    body = {"model": site.model, "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}
    return json.dumps(body).encode()


def whole(tokens: int = 4) -> bytes:
    """An engine's answer."""
    usage = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": 5 + tokens}
    return json.dumps({"id": "c", "object": "chat.completion", "choices": [], "usage": usage}).encode()


def pick(site: Site, **head: object) -> Picked:
    """One request, answered by its endpoint."""
    with site.channel() as channel, Stream(channel) as stream:
        decision = stream.request(chat(site), **head)
        if not decision.status:
            stream.response(200, [whole()])
        return decision


def refusal(decision: Picked) -> str:
    assert not decision.destination, decision
    return str(json.loads(decision.body)["error"]["message"])


# -- the destination --------------------------------------------------------------------------------------------------


@MODES
def test_a_destination_is_in_the_header_and_in_the_metadata(picker: Site, mode: int) -> None:
    decision = pick(picker, mode=mode)
    assert decision.destination == decision.metadata
    assert set(decision.endpoints) <= set(picker.endpoints)
    for endpoint in decision.endpoints:
        host, _, port = endpoint.rpartition(":")
        assert ipaddress.ip_address(host.strip("[]"))
        assert 0 < int(port) < 65536


def test_a_proxy_that_does_not_tell_its_modes_streams(picker: Site) -> None:
    assert set(pick(picker, configured=False).endpoints) <= set(picker.endpoints)


def test_a_destination_of_the_clients_own_is_overwritten(picker: Site) -> None:
    decision = pick(picker, headers=[(DESTINATION, "192.0.2.1:80")])
    assert set(decision.endpoints) <= set(picker.endpoints)


@MODES
def test_a_subset_is_obeyed(picker: Site, mode: int) -> None:
    for endpoint in picker.endpoints * 5:
        assert pick(picker, mode=mode, subset=[endpoint, "192.0.2.1:80"]).endpoints == [endpoint]


@pytest.mark.parametrize("subset", [[], ["192.0.2.1:80"], ["not an endpoint"]])
@MODES
def test_a_subset_without_an_eligible_endpoint_is_503(picker: Site, subset: list[str], mode: int) -> None:
    decision = pick(picker, mode=mode, subset=subset)
    assert decision.status == 503
    assert not decision.destination


@MODES
def test_without_a_ready_endpoint_it_is_503(deserted: Site, mode: int) -> None:
    assert pick(deserted, mode=mode).status == 503


@MODES
def test_a_request_that_is_shed_is_429(limited: Site, mode: int) -> None:
    decisions = [pick(limited, mode=mode) for _ in range(2)]
    assert decisions[1].status == 429
    assert int(decisions[1].headers["retry-after"]) > 0


# -- bodies -----------------------------------------------------------------------------------------------------------


@MODES
def test_a_body_over_64_kib_is_passed_on_whole(picker: Site, mode: int) -> None:
    body = chat(picker, "one two three four " * 5_000)
    assert len(body) > 64 * 1024
    with picker.channel() as channel, Stream(channel) as stream:
        decision = stream.request(body, size=60_000, mode=mode)
        assert decision.destination, decision
        if mode == DUPLEX:
            assert json.loads(decision.body) == json.loads(body)
            assert decision.ended
        else:
            assert not decision.body or json.loads(decision.body) == json.loads(body)
        stream.response(200, [whole()])


@pytest.mark.parametrize("size", [1, 7, 64])
def test_a_body_may_come_in_pieces(picker: Site, size: int) -> None:
    body = chat(picker)
    with picker.channel() as channel, Stream(channel) as stream:
        decision = stream.request(body, size=size)
        assert json.loads(decision.body) == json.loads(body)
        assert decision.ended
        stream.response(200, [whole()])


def test_a_body_may_end_with_trailers(picker: Site) -> None:
    body = chat(picker)
    with picker.channel() as channel, Stream(channel) as stream:
        decision = stream.request(body, trailers=True)
        assert decision.destination
        assert json.loads(decision.body) == json.loads(body)
        assert decision.ended
        stream.response(200, [whole()])


# -- responses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [DUPLEX, STREAMED, BUFFERED], ids=["duplex", "streamed", "buffered"])
def test_a_response_is_passed_on(picker: Site, mode: int) -> None:
    answer = whole()
    chunks = [answer] if mode == BUFFERED else [answer[:9], answer[9:20], answer[20:]]
    with picker.channel() as channel, Stream(channel) as stream:
        assert stream.request(chat(picker), answer_mode=mode).destination
        assert b"".join(stream.response(200, chunks, mode=mode)) == answer


def test_a_streamed_response_is_passed_on_event_by_event(picker: Site) -> None:
    events = [f'data: {{"choices":[{{"index":0,"delta":{{"content":"{word}"}}}}]}}\n\n'.encode() for word in "abc"]
    with picker.channel() as channel, Stream(channel) as stream:
        assert stream.request(chat(picker, stream=True)).destination
        stream.send(response_headers(200, content_type="text/event-stream"))
        assert stream.receive().WhichOneof("response") == "response_headers"
        for event in events:
            stream.send(response_body(event, False))
            assert stream.receive().response_body.response.body_mutation.streamed_response.body == event
        stream.send(response_body(b"data: [DONE]\n\n", True))
        last = stream.receive().response_body.response.body_mutation.streamed_response
        assert (last.body, last.end_of_stream) == (b"data: [DONE]\n\n", True)


def test_an_error_of_the_endpoint_is_passed_on(picker: Site) -> None:
    with picker.channel() as channel, Stream(channel) as stream:
        assert stream.request(chat(picker)).destination
        assert b"".join(stream.response(404, [b'{"error":', b"{}}"])) == b'{"error":{}}'


def test_a_request_without_a_body_is_answered_or_has_a_destination(picker: Site) -> None:
    with picker.channel() as channel, Stream(channel) as stream:
        stream.send(request_headers(method="GET", path="/v1/models", ended=True))
        message = stream.receive()
        kind = message.WhichOneof("response")
        assert kind == "request_headers" or message.immediate_response.status.code == 200


# -- streams that end -------------------------------------------------------------------------------------------------


def test_a_request_whose_client_leaves_while_it_waits_gets_no_place(narrow: Site) -> None:
    with narrow.channel() as channel, Stream(channel) as first:
        assert first.request(chat(narrow)).destination
        with Stream(channel) as left:
            left.send(request_headers(), *request_bodies(chat(narrow), 1 << 20))
        cancelled = Stream(channel)
        cancelled.send(request_headers(), *request_bodies(chat(narrow), 1 << 20))
        cancelled.call.cancel()
        with Stream(channel) as third:
            third.send(request_headers(), *request_bodies(chat(narrow), 1 << 20))
            first.response(200, [whole()])
            assert third.receive().WhichOneof("response") == "request_headers"
            assert third.receive().WhichOneof("response") == "request_body"
            third.response(200, [whole()])


@pytest.mark.parametrize("sent", [0, 1, 2, 3], ids=["nothing", "headers", "a part", "all"])
def test_streams_that_end_early_leave_nothing_behind(narrow: Site, sent: int) -> None:
    body = chat(narrow)
    messages = [request_headers(), *request_bodies(body, len(body) // 2 + 1)]
    with narrow.channel() as channel:
        for number in range(20):
            with Stream(channel) as stream:
                stream.send(*messages[:sent])
                if number % 2:
                    stream.call.cancel()
    assert pick(narrow).destination


def test_an_endpoint_that_dies_in_its_answer_leaves_nothing_behind(narrow: Site) -> None:
    with narrow.channel() as channel:
        for _ in range(5):
            with Stream(channel) as stream:
                assert stream.request(chat(narrow, stream=True)).destination
                stream.send(response_headers(200, content_type="text/event-stream"), response_body(b"data: {", False))
                assert stream.receive().WhichOneof("response") == "response_headers"
    assert pick(narrow).destination


# -- messages out of order --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        [response_headers(200)],
        [*request_bodies(b"{}", 9)],
        [request_headers(), request_headers()],
        [request_headers(), response_headers(200)],
        [request_headers(), response_body(b"", True)],
    ],
    ids=["response first", "body first", "headers twice", "response before the body", "its body before the body"],
)
def test_messages_out_of_order_end_the_stream(picker: Site, messages: list[object]) -> None:
    with picker.channel() as channel:
        with Stream(channel) as stream:
            stream.send(*messages)
            with pytest.raises(grpc.RpcError) as ended:
                stream.receive()
        assert ended.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
    assert pick(picker).destination


# -- health, and several at once --------------------------------------------------------------------------------------


def _health(site: Site, service: str) -> int:
    with site.channel() as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        return int(check(health_pb2.HealthCheckRequest(service=service), timeout=60).status)


@pytest.mark.parametrize("service", ["", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"])
def test_it_tells_its_health(picker: Site, service: str) -> None:
    assert _health(picker, service) == health_pb2.HealthCheckResponse.SERVING


def test_an_unknown_service_is_not_found(picker: Site) -> None:
    with pytest.raises(grpc.RpcError) as unknown:
        _health(picker, "another.Service")
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


def test_two_pickers_of_one_pool_work_at_once(picker: Site, second: Site) -> None:
    with picker.channel() as one, second.channel() as other:
        streams = [Stream(channel) for channel in (one, other) * 8]
        decisions = [stream.request(chat(picker, f"prompt {number}")) for number, stream in enumerate(streams)]
        for stream in streams:
            stream.response(200, [whole()])
            stream.end()
    assert {endpoint for decision in decisions for endpoint in decision.endpoints} <= set(picker.endpoints)
    assert all(decision.destination for decision in decisions)
