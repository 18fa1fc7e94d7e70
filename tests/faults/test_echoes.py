"""Engines that repeat a request in their answers, and types and headers of answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import uvloop

from gateway.core.engines.breaker import BreakerState
from gateway.core.policy.policy import Policy, Timeouts
from gateway.relay import forwarding
from tests.faults.scripted import SSE, Answer, ScriptedEngine, answer, ask, chunk, gateway_over, port_of, settled
from tests.faults.test_error_shapes import post

LONG = "x" * 1_200_000  # more than one event may have that repeats nothing
REASON = "Value error, Stream options can only be defined when `stream=True`."
PLAIN = b"HTTP/1.1 %d X\r\ncontent-type: %b\r\n%bcontent-length: %d\r\n\r\n%b"
MERGES = Policy(batching={"embeddings": 0.02})


class Echo(ScriptedEngine):
    """Answers as vLLM does."""

    async def _act(self, name: str, stream: bool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        body = self.requests[-1]
        if name == "invalid":  # pydantic's error has the input, and FastAPI says it twice
            told = f"1 validation error:\n  {{'msg': '{REASON}', 'input': {body.decode()}}}"
            fields = {"message": told * 2, "type": "Bad Request", "param": None, "code": 400}
            writer.write(answer(400, json.dumps({"error": fields}, ensure_ascii=False).encode()))
        elif name == "response":
            whole = {"object": "response", "metadata": json.loads(body)["metadata"]}
            usage = {"input_tokens": 7, "output_tokens": 3}
            events = [
                {"type": "response.created", "response": whole},
                {"type": "response.completed", "response": {**whole, "usage": usage}},
            ]
            first, last = [chunk(b"data: %b\n\n" % json.dumps(event).encode()) for event in events]
            writer.write(SSE + first)
            await asyncio.sleep(json.loads(body)["metadata"].get("reads", 0.0))
            writer.write(last)
            writer.write(b"0\r\n\r\n")
        elif name == "late_400":  # by vLLM, for what it looks at once its answer has begun
            fields = {"message": REASON, "type": "BadRequestError", "param": None, "code": 400}
            writer.write(SSE + chunk(b"data: %b\n\ndata: [DONE]\n\n" % json.dumps({"error": fields}).encode()))
            writer.write(b"0\r\n\r\n")
        elif name == "not_implemented":  # by vLLM 0.32 for a tool_choice that gpt-oss does not have
            fields = {"message": REASON, "type": "NotImplementedError", "param": None, "code": 501}
            writer.write(answer(501, json.dumps({"error": fields}).encode()))
        elif name == "rows":
            rows = [{"index": at, "embedding": [0.5]} for at in range(len(json.loads(body)["input"]))]
            told = {"object": "list", "data": rows, "usage": {"prompt_tokens": 9, "total_tokens": 9}}
            writer.write(answer(200, json.dumps(told).encode()))
        elif name == "bytes":
            rows = [
                {"index": at, "embedding": "float32", "start": 8 * at, "end": 8 * at + 8, "shape": [2]}
                for at in range(len(json.loads(body)["input"]))
            ]
            head = b"metadata: %b\r\n" % json.dumps({"id": "embd-1", "data": rows}).encode()
            writer.write(PLAIN % (200, b"application/octet-stream", head, 8, b"\0" * 8))
        else:  # a status, as a server in front of vLLM says it, or Starlette
            page = b"Internal Server Error"
            writer.write(PLAIN % (int(name), b"text/plain; charset=utf-8", b"", len(page), page))
        await writer.drain()
        return True


def asked(behaviour: str, payload: bytes, policy: Policy | None = None) -> Answer:
    """The answer to a call, whose engine stays in service."""

    async def main() -> Answer:
        async with Echo(behaviour).running() as engine, gateway_over([engine], policy) as gateway:
            for _ in range(6):  # more failures than a breaker lets pass
                answer = await ask(port_of(gateway), payload)
                await settled(gateway)
            if behaviour != "500":
                assert all(each.breaker.state is BreakerState.CLOSED for each in gateway.fleet)
            return answer

    return uvloop.run(main())


@pytest.mark.parametrize("reads", [0.6, 1.5])  # seconds
def test_a_response_that_begins_before_its_prompt_is_read_has_the_time_of_a_first_byte(reads: float) -> None:
    policy = Policy(timeouts=Timeouts(first_byte=1.0, stall=0.2))
    fields = {"messages": None, "max_tokens": None, "input": "x", "stream": True, "metadata": {"reads": reads}}

    async def main() -> None:
        async with Echo("response").running() as engine, gateway_over([engine], policy) as gateway:
            told = await ask(port_of(gateway), post("/v1/responses", **fields))
            await settled(gateway)
            assert (b"response.completed" in told.body) is (reads < 1.0), told.body

    uvloop.run(main())


def test_the_answer_to_a_call_that_shares_no_request_may_have_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarding, "WHOLE_AT_MOST", 1000)
    told = asked("rows", post("/v1/embeddings", messages=None, input=["x"] * 64), MERGES)
    assert (told.status, told.complete) == (200, True)
    assert len(json.loads(told.body)["data"]) == 64


def test_a_request_that_is_refused_within_a_stream_takes_no_engine_out() -> None:
    told = asked("late_400", post("/v1/chat/completions", stream=True, logprobs=True, top_logprobs=21))
    assert (told.status, told.complete) == (200, True)
    assert REASON.encode() in told.body


def test_an_error_that_repeats_a_long_request_is_the_callers_own_and_says_why() -> None:
    content = "\u00e9\n" * 50_000
    told = asked("invalid", post("/v1/chat/completions", messages=[{"role": "user", "content": content}]))
    error = json.loads(told.body)["error"]
    assert (told.status, error["code"]) == (400, "invalid_request_error")
    assert REASON in error["message"]
    assert len(error["message"]) < 5000


def test_a_response_that_repeats_a_long_request_is_no_failure_of_its_engine() -> None:
    told = asked("response", post("/v1/responses", messages=None, input="x", stream=True, metadata={"note": LONG}))
    assert told.status == 200
    assert b"response.completed" in told.body
    assert b"response.failed" not in told.body


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
def test_what_an_engine_has_not_implemented_is_the_callers_to_leave_out(path: str) -> None:
    payload = embedding() if "embed" in path else post(path)
    told = asked("not_implemented", payload, MERGES)
    error = json.loads(told.body)["error"]
    assert (told.status, error["message"], error["type"]) == (501, REASON, "NotImplementedError")
    assert (told.headers["x-should-retry"], "x-weir-reason" in told.headers) == ("false", False)


@pytest.mark.parametrize("status", ["400", "500"])
def test_an_error_is_json_whatever_the_engine_wrote(status: str) -> None:
    told = asked(status, post("/v1/chat/completions"))
    assert (told.status, told.headers["content-type"]) == (int(status), "application/json")
    assert json.loads(told.body)["error"]["message"]


@pytest.mark.parametrize("status", ["404", "405"])
def test_an_estimate_is_json_whatever_the_engine_wrote(status: str) -> None:
    told = asked(status, post("/v1/messages/count_tokens"))
    assert (told.status, told.headers["content-type"]) == (200, "application/json")
    assert json.loads(told.body)["input_tokens"] > 0


def embedding(**more: Any) -> bytes:
    return post("/v1/embeddings", messages=None, input="x", **more)


def test_an_error_of_a_call_that_may_be_merged_is_json_too() -> None:
    told = asked("422", embedding(), MERGES)
    assert (told.status, told.headers["content-type"]) == (422, "application/json")


@pytest.mark.parametrize("inputs", [1, 2048])
def test_vectors_as_bytes_come_with_what_tells_them_apart(inputs: int) -> None:
    told = asked("bytes", post("/v1/embeddings", messages=None, input=["x"] * inputs, encoding_format="bytes"))
    assert (told.status, told.headers["content-type"], len(told.body)) == (200, "application/octet-stream", 8)
    assert len(json.loads(told.headers["metadata"])["data"]) == inputs
