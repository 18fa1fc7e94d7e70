"""Real vLLM behind the gateway: cancellation, release of engine resources, and reported numbers."""

from __future__ import annotations

import asyncio
import re
import socket
from contextlib import ExitStack
from urllib.parse import urlsplit

import openai
import pytest
import uvloop

from loadtest.clients.answer import Answer
from loadtest.processes import Gateway, until
from tests.e2e.children import sockets
from tests.raw_calls import chat, exchange
from tests.vllm.conftest import PATIENCE, Place
from tests.vllm.real_vllm import MODEL, Vllm

pytestmark = pytest.mark.vllm
END = b"\r\n0\r\n\r\n"  # the last chunk
ENDLESS = 3000  # tokens: many seconds of generation on two cores


def connected(gateway: Gateway, request: bytes) -> socket.socket:
    parts = urlsplit(gateway.url)
    client = socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE)
    client.sendall(request)
    return client


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_the_engine_before_it_has_written_all(
    gateway: Gateway, vllm: Vllm, stream: bool
) -> None:
    gone = gateway.total("weir_requests_total", outcome="client_gone")
    _, written = vllm.usage()
    with connected(gateway, chat("localhost", MODEL, "never mind", max_tokens=ENDLESS, stream=stream)) as client:
        if stream:
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
        assert until(lambda: vllm.running() == 1, PATIENCE) is not None
        assert not gateway.idle()
    assert until(lambda: vllm.running() == 0, PATIENCE) is not None
    assert vllm.usage()[1] - written < ENDLESS
    assert until(gateway.idle, PATIENCE) is not None
    assert gateway.total("weir_requests_total", outcome="client_gone") == gone + 1


def test_usage_settles_to_the_engines_own_numbers(gateway: Gateway, vllm: Vllm) -> None:
    engine_before = vllm.usage()
    weir_before = [gateway.total("weir_tokens_total", kind=kind) for kind in ("prompt", "completion")]
    seen = 0
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        for i in range(4):
            messages = [{"role": "user", "content": f"{i} " + "how much is it? " * (10 * i + 1)}]
            whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=7 + i)
            seen += whole.usage.prompt_tokens
            chunks = list(client.chat.completions.create(model=MODEL, messages=messages, max_tokens=9 + i, stream=True))
            assert all(chunk.choices and chunk.usage is None for chunk in chunks), "usage that nobody asked for"
            asked = client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=9 + i, stream=True, stream_options={"include_usage": True}
            )
            (usage,) = [chunk.usage for chunk in asked if chunk.usage]
            seen += 2 * usage.prompt_tokens  # the stream before had the same prompt
            # Several prompts, one choice each: with n > 1 vLLM's counter has the prompt n times, its answer once.
            seen += client.completions.create(model=MODEL, prompt=["one", "two"], max_tokens=5).usage.prompt_tokens
    assert until(gateway.idle, PATIENCE) is not None
    prompt, generated = (now - then for now, then in zip(vllm.usage(), engine_before, strict=True))
    counted = [
        gateway.total("weir_tokens_total", kind=kind) - before
        for kind, before in zip(("prompt", "completion"), weir_before, strict=True)
    ]
    assert counted == [prompt, generated]
    assert prompt == seen


def test_two_hundred_streams_end_and_leave_nothing(gateway: Gateway, vllm: Vllm) -> None:
    parts = urlsplit(gateway.url)
    assert until(gateway.idle, PATIENCE) is not None
    held = sockets(gateway.child.pid)
    ok = gateway.total("weir_requests_total", outcome="ok")
    answers = [Answer() for _ in range(200)]

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for i, answer in enumerate(answers):
                request = chat("localhost", MODEL, f"stream {i}", max_tokens=20)
                group.create_task(exchange(parts.hostname or "", parts.port or 0, request, answer, limit=PATIENCE))

    uvloop.run(main())
    assert [(a.outcome, a.completion_tokens) for a in answers] == [("ok", 20)] * 200, {a.error for a in answers}
    assert until(gateway.idle, PATIENCE) is not None
    assert vllm.running() == 0
    assert gateway.total("weir_requests_total", outcome="ok") == ok + 200
    assert until(lambda: gateway.total("weir_connections") == 0, PATIENCE) is not None
    # Idle engine connections stay a few seconds for reuse; then both ends have let go of everything.
    assert until(lambda: sockets(gateway.child.pid) <= held, PATIENCE) is not None, sockets(gateway.child.pid)


def test_an_engine_whose_core_hangs_is_taken_out_with_the_reason_and_used_again(gateway: Gateway, vllm: Vllm) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(connected(gateway, chat("localhost", MODEL, "never ends", max_tokens=ENDLESS)))
        received = first.recv(65536)
        while b"data: " not in received:
            received += first.recv(65536)
        assert until(lambda: vllm.running() == 1, PATIENCE) is not None, "its gauge says so from now on"
        vllm.hang()
        stack.callback(vllm.resume)
        second = stack.enter_context(connected(gateway, chat("localhost", MODEL, "and then", max_tokens=3)))
        assert until(lambda: gateway.fleet()["engines"][0]["breaker"] == "open", PATIENCE) is not None
        why = gateway.fleet()["engines"][0]["last_error"]
        assert re.fullmatch(r"it has read and written no token for \d+ s, while a call waits for it", why)
        vllm.resume()
        answer = second.recv(65536)
        while not answer.endswith(END) and (more := second.recv(65536)):
            answer += more
        assert b"[DONE]" in answer, "the call that waited had another try"


def test_an_engine_killed_in_a_stream_says_so_and_is_used_again_once_it_is_back(
    gateway: Gateway, vllm: Vllm, place: Place
) -> None:
    with connected(gateway, chat("localhost", MODEL, "last words", max_tokens=ENDLESS)) as client:
        received = client.recv(65536)
        while b"data: " not in received:
            received += client.recv(65536)
        vllm.kill()
        while not received.endswith(END) and (more := client.recv(65536)):
            received += more
    assert received.endswith(END), "the error ends a well-formed answer"
    assert received.count(b'data: {"error"') == 1
    assert b"upstream_error" in received
    assert b"[DONE]" not in received
    assert until(gateway.idle, PATIENCE) is not None
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as asking:
        ask = asking.completions.create
        assert until(lambda: not gateway.fleet()["engines"][0]["up"], PATIENCE) is not None
        with pytest.raises(openai.InternalServerError) as refused:
            ask(model=MODEL, prompt="anyone?", max_tokens=3)
        assert refused.value.status_code == 503
        place.engine()  # the same port, the same gateway
        assert until(lambda: gateway.fleet()["engines"][0]["up"], PATIENCE) is not None
        assert ask(model=MODEL, prompt="you again", max_tokens=3).usage.completion_tokens == 3
