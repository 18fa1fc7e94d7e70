"""OpenAI's own Python client, sync and async, through the gateway."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator

import openai
import pytest

from loadtest.processes import Gateway, total, until

pytestmark = pytest.mark.slow  # it starts processes

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the river level?"}]
ENDLESS = {"ignore_eos": True}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "level_of",
            "description": "The level of a river, in centimetres.",
            "parameters": {"type": "object", "properties": {"river": {"type": "string"}}, "required": ["river"]},
        },
    }
]


@pytest.fixture
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60.0) as ready:
        yield ready


def asynchronous(gateway: Gateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60.0)


def running(gateway: Gateway) -> float:
    """Requests that the engines say they work on."""
    urls = [engine["url"] for engine in gateway.fleet()["engines"]]
    return sum(total(f"{url}/metrics", "vllm:num_requests_running") for url in urls)


def test_models(client: openai.OpenAI, model: str) -> None:
    (listed,) = client.models.list().data  # two engines, one model
    assert listed.id == model
    assert listed.model_extra is not None
    assert listed.model_extra["max_model_len"] > 0
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_chat(client: openai.OpenAI, model: str) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=MESSAGES, max_tokens=12, extra_headers={"x-request-id": "my-own-id"}
    )
    assert raw.headers["x-request-id"] == "my-own-id"
    assert raw.headers["x-weir-engine"]
    assert raw.headers["x-weir-class"] == "default"
    assert int(raw.headers["x-weir-queue-ms"]) >= 0
    assert "server" not in raw.headers
    answer = raw.parse()
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 12
    assert answer.choices[0].finish_reason == "length"
    made = client.chat.completions.with_raw_response.create(model=model, messages=MESSAGES, max_tokens=1)
    assert 0 < len(made.headers["x-request-id"]) <= 128


def test_chat_streamed_is_the_same_text(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=12, temperature=0, seed=1)
    chunks = list(
        client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=12, temperature=0, seed=1, stream=True
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.choices and not chunk.usage for chunk in chunks), "usage that nobody asked for"


def test_usage_in_a_stream_for_who_asks(client: openai.OpenAI, model: str) -> None:
    chunks = list(
        client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 5
    assert [chunk for chunk in chunks if chunk.usage] == chunks[-1:]


def test_completions(client: openai.OpenAI, model: str) -> None:
    whole = client.completions.create(model=model, prompt="Once upon", max_tokens=6, temperature=0)
    assert whole.usage.completion_tokens == 6
    pieces = list(client.completions.create(model=model, prompt="Once upon", max_tokens=6, temperature=0, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text


def test_embeddings(client: openai.OpenAI, model: str) -> None:
    answer = client.embeddings.create(model=model, input=["one", "two"])  # base64 on the wire, the client's default
    assert [len(item.embedding) for item in answer.data] == [len(answer.data[0].embedding)] * 2
    assert answer.usage.prompt_tokens > 0
    raw = client.embeddings.create(model=model, input="one", encoding_format="base64").data[0].embedding
    assert len(base64.b64decode(str(raw))) == 4 * len(answer.data[0].embedding)
    floats = client.embeddings.create(model=model, input="one", encoding_format="float").data[0].embedding
    assert floats == pytest.approx(answer.data[0].embedding)


def test_responses(client: openai.OpenAI, model: str) -> None:
    whole = client.responses.create(model=model, input="Why?", max_output_tokens=6, temperature=0)
    assert whole.usage.output_tokens == 6
    with client.responses.create(model=model, input="Why?", max_output_tokens=6, temperature=0, stream=True) as events:
        kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert "response.output_text.delta" in kinds


def test_tools_are_passed_through(client: openai.OpenAI, model: str) -> None:
    choice = {"type": "function", "function": {"name": "level_of"}}
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, tools=TOOLS, tool_choice=choice, max_tokens=40
    )
    (called,) = answer.choices[0].message.tool_calls
    assert called.function.name == "level_of"
    result = {"role": "tool", "tool_call_id": called.id, "content": "131"}
    turns = [*MESSAGES, answer.choices[0].message.model_dump(exclude_none=True), result]
    last = client.chat.completions.create(model=model, messages=turns, tools=TOOLS, tool_choice="none", max_tokens=5)
    assert last.choices[0].message.content


def test_a_stream_that_is_closed_early_frees_the_engine(client: openai.OpenAI, gateway: Gateway, model: str) -> None:
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=4000, stream=True, extra_body=ENDLESS
    )
    next(iter(stream))
    assert not gateway.idle()
    stream.close()
    assert until(gateway.idle, 10.0) is not None
    assert until(lambda: running(gateway) == 0, 10.0) is not None


def test_errors_are_the_right_classes(client: openai.OpenAI, gateway: Gateway, model: str) -> None:
    create = client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as unknown:
        create(model="no-such-model", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    assert "no-such-model" in unknown.value.message
    for bad, param in (({"max_tokens": -1}, "max_tokens"), ({"messages": "hello"}, "messages"), ({"n": 10**6}, "n")):
        with pytest.raises(openai.BadRequestError) as wrong:
            create(**{"model": model, "messages": MESSAGES, **bad})
        assert wrong.value.param == param
        assert wrong.value.type == "invalid_request_error"
        assert wrong.value.response.headers["x-should-retry"] == "false"
    with pytest.raises(openai.NotFoundError):
        client.post("/no/such/route", cast_to=object, body={})
    with pytest.raises(openai.APIStatusError) as large:
        create(model=model, messages=[{"role": "user", "content": "x" * (17 << 20)}])
    assert large.value.status_code == 413
    assert until(gateway.idle, 10.0) is not None


def test_no_engine_is_a_503_with_advice(deserted: Gateway, model: str) -> None:
    with openai.OpenAI(base_url=f"{deserted.url}/v1", api_key="none", max_retries=0, timeout=60.0) as client:
        assert client.models.list().data == []
        with pytest.raises(openai.InternalServerError) as refused:
            client.chat.completions.create(model=model, messages=MESSAGES)
    assert refused.value.status_code == 503
    assert refused.value.code == "server_is_overloaded"
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60


def test_async(gateway: Gateway, model: str) -> None:
    async def streamed(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=8, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def main() -> None:
        async with asynchronous(gateway) as client:
            assert [found.id async for found in client.models.list()] == [model]
            whole = await client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=8, temperature=0)
            assert (
                await asyncio.gather(*(streamed(client) for _ in range(20))) == [whole.choices[0].message.content] * 20
            )
            assert (await client.completions.create(model=model, prompt="Once", max_tokens=3)).choices[0].text
            assert (await client.embeddings.create(model=model, input="one")).data[0].embedding
            with pytest.raises(openai.NotFoundError):
                await client.completions.create(model="no-such-model", prompt="Once")
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(model=model, prompt="Once", max_tokens=-1)

    asyncio.run(main())
    assert until(gateway.idle, 10.0) is not None


def test_async_cancelled_tasks_free_the_engines(gateway: Gateway, model: str) -> None:
    async def endless(client: openai.AsyncOpenAI, begun: asyncio.Event, stream: bool) -> None:
        answer = await client.chat.completions.create(
            model=model, messages=MESSAGES, max_tokens=4000, stream=stream, extra_body=ENDLESS
        )
        async for _ in answer:
            begun.set()

    async def main() -> None:
        async with asynchronous(gateway) as client:
            begun = [asyncio.Event() for _ in range(6)]
            tasks = [asyncio.create_task(endless(client, event, stream=True)) for event in begun]
            tasks.append(asyncio.create_task(endless(client, asyncio.Event(), stream=False)))
            await asyncio.gather(*(event.wait() for event in begun))
            assert not gateway.idle()
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(end) for end in ends] == [asyncio.CancelledError] * 7

    gone = gateway.total("weir_requests_total", outcome="client_gone")
    asyncio.run(main())
    assert until(gateway.idle, 10.0) is not None
    assert until(lambda: running(gateway) == 0, 10.0) is not None
    assert gateway.total("weir_requests_total", outcome="client_gone") >= gone + 6
