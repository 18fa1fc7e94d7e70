"""Anthropic's own Python client through the gateway, on /v1/messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import anthropic
import pytest

from loadtest.processes import Gateway, until
from tests.agent_turns import shares
from tests.e2e.children import SimEngine

pytestmark = pytest.mark.slow  # processes, sockets and seconds: `make check` has enough of them

MESSAGES = [{"role": "user", "content": "Why is the river level?"}]
GREEDY = {"temperature": 0}
ENDLESS = {"ignore_eos": True}


@pytest.fixture
def client(gateway: Gateway) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0, timeout=60.0) as ready:
        yield ready


def test_messages_streamed_and_not(client: anthropic.Anthropic, gateway: Gateway, model: str) -> None:
    raw = client.messages.with_raw_response.create(
        model=model, messages=MESSAGES, max_tokens=7, system="Be brief.", extra_body=GREEDY
    )
    assert raw.headers["x-request-id"]
    assert raw.headers["x-weir-engine"]
    whole = raw.parse()
    assert whole.usage.output_tokens == 7
    assert whole.stop_reason == "max_tokens"
    with client.messages.stream(
        model=model, messages=MESSAGES, max_tokens=7, system="Be brief.", extra_body=GREEDY
    ) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        last = stream.get_final_message()
    assert (last.usage.output_tokens, last.stop_reason) == (7, "max_tokens")
    assert until(gateway.idle, 10.0) is not None
    read = gateway.total("weir_tokens_total", kind="prompt", route="/v1/messages")
    assert read == 2 * whole.usage.input_tokens
    assert gateway.total("weir_tokens_total", kind="completion", route="/v1/messages") == 14


def test_a_stream_that_is_left_frees_the_engine(client: anthropic.Anthropic, gateway: Gateway, model: str) -> None:
    with client.messages.stream(model=model, messages=MESSAGES, max_tokens=4000, extra_body=ENDLESS) as stream:
        next(iter(stream))
        assert not gateway.idle()
    assert until(gateway.idle, 10.0) is not None


def test_errors_are_the_right_classes(client: anthropic.Anthropic, deserted: Gateway, model: str) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="no-such-model", messages=MESSAGES, max_tokens=5)
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model=model, messages=MESSAGES, max_tokens=-5)
    with (
        anthropic.Anthropic(base_url=deserted.url, api_key="none", max_retries=0, timeout=60.0) as lost,
        pytest.raises(anthropic.APIStatusError) as refused,
    ):
        lost.messages.create(model=model, messages=MESSAGES, max_tokens=5)
    assert refused.value.status_code == 503


def test_the_line_of_claude_code_that_changes_keeps_no_history_from_the_cache(tmp_path: Path) -> None:
    engine = SimEngine(tmp_path / "engine", "--enable-prompt-tokens-details")  # unlike vLLM 0.32, it reads that line
    log = tmp_path / "calls"
    with engine.child, Gateway(tmp_path / "log", "--engine", engine.url, "--log", str(log)) as gateway:
        told = shares(gateway.url, "sim", 10)
        assert until(lambda: log.exists() and len(log.read_text().splitlines()) == 10, 30.0) is not None
    records = [json.loads(line) for line in log.read_text().splitlines()]
    expected = [record["affinity_tokens"] / record["estimated_prompt_tokens"] for record in records]
    assert (told[0], expected[0]) == (0.0, 0.0)
    assert min(expected[1:]) >= 0.85, expected  # whole blocks of 512 bytes
    assert min(told[1:]) >= 0.9, told


def test_async(gateway: Gateway, model: str) -> None:
    async def main() -> None:
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0) as client:
            whole = await client.messages.create(model=model, messages=MESSAGES, max_tokens=5, extra_body=GREEDY)
            async with client.messages.stream(
                model=model, messages=MESSAGES, max_tokens=5, extra_body=GREEDY
            ) as stream:
                assert "".join([text async for text in stream.text_stream]) == whole.content[0].text

    asyncio.run(main())
