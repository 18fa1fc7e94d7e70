"""Anthropic's client against `/v1/messages` of the simulated engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import pytest

Start = Callable[..., Any]
HELLO: Any = [{"role": "user", "content": "Say hello."}]
TOOL: Any = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
def client(sim: Start) -> Iterator[anthropic.Anthropic]:
    server = sim(prompt_details=True)
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60.0) as it:
        yield it


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content)


def test_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="m", messages=HELLO, max_tokens=8, system="Be kind.")
    assert (message.role, message.stop_reason, len(text_of(message))) == ("assistant", "max_tokens", 32)
    assert (message.usage.input_tokens, message.usage.output_tokens) == (4 + 2 + 4 + 3 + 4, 8)
    again = client.messages.create(model="m", messages=HELLO, max_tokens=8, system="Be kind.")
    assert (again.usage.input_tokens, again.usage.cache_read_input_tokens) == (1, 16)


def test_stream(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model="m", messages=HELLO, max_tokens=500)
    with client.messages.stream(model="m", messages=HELLO, max_tokens=500) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
        final = stream.get_final_message()
    assert text_of(final) == text_of(whole)
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", whole.usage.output_tokens)
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[2:-3] == ["content_block_delta"] * (whole.usage.output_tokens - 1)
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_tool_is_called(client: anthropic.Anthropic, choice: Any) -> None:
    message = client.messages.create(model="m", messages=HELLO, max_tokens=50, tools=[TOOL], tool_choice=choice)
    with client.messages.stream(model="m", messages=HELLO, max_tokens=50, tools=[TOOL], tool_choice=choice) as stream:
        streamed = stream.get_final_message()
    for answer in (message, streamed):
        block: Any = answer.content[0]
        assert (answer.stop_reason, block.type, block.name, block.input) == (
            "tool_use",
            "tool_use",
            "weather",
            {"city": "ban"},
        )


def test_a_structured_answer_is_of_its_schema(client: anthropic.Anthropic) -> None:
    shape: Any = {"format": {"type": "json_schema", "schema": TOOL["input_schema"]}}
    whole = client.messages.create(model="m", messages=HELLO, max_tokens=50, output_config=shape)
    assert text_of(whole) == '{"city":"ban"}'
    with client.messages.stream(model="m", messages=HELLO, max_tokens=50, output_config=shape) as stream:
        assert text_of(stream.get_final_message()) == text_of(whole)


def test_tokens_are_counted_as_a_call_reads_them(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "m", "messages": HELLO, "system": "Be kind.", "tools": [TOOL]}
    counted = client.messages.count_tokens(**asked)
    assert counted.input_tokens == client.messages.create(max_tokens=1, **asked).usage.input_tokens
    with pytest.raises(anthropic.NotFoundError, match="The model `gone` does not exist"):
        client.messages.count_tokens(model="gone", messages=HELLO)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"model": "gone"}, anthropic.NotFoundError, "The model `gone` does not exist."),
        ({"max_tokens": 100_000}, anthropic.BadRequestError, "maximum context length"),
        ({"messages": []}, anthropic.BadRequestError, "must not be empty"),
    ],
)
def test_errors(client: anthropic.Anthropic, change: Any, error: type[anthropic.APIStatusError], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        client.messages.create(**({"model": "m", "messages": HELLO, "max_tokens": 5} | change))
    body: Any = caught.value.body
    assert body["type"] == "error"
