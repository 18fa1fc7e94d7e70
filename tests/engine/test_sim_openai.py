"""OpenAI's client against the simulated engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from loadtest.engine.faults import Faults

Start = Callable[..., Any]
WITHIN = 30.0  # seconds
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "days", "unit"],
        },
    },
}
HELLO: Any = [{"role": "user", "content": "Say hello to the whole wide world, please."}]


@pytest.fixture
def client(sim: Start) -> Iterator[openai.OpenAI]:
    server = sim(prompt_details=True, max_model_len=2048)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60.0) as it:
        yield it


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="m", messages=HELLO, max_tokens=20)
    again = client.chat.completions.create(model="m", messages=HELLO, max_tokens=20)
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.role) == ("length", "assistant")
    assert choice.message.content == again.choices[0].message.content
    assert answer.usage is not None
    assert again.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (19, 20, 39)
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == 16


def test_chat_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="m", messages=HELLO, max_tokens=20)
    chunks = list(
        client.chat.completions.create(
            model="m", messages=HELLO, max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 20 + ["length"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20


@pytest.mark.slow
def test_the_natural_end_is_counted_and_says_nothing(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="m", messages=HELLO)
    text = answer.choices[0].message.content
    assert text is not None
    assert answer.usage is not None
    assert (answer.choices[0].finish_reason, len(text)) == ("stop", 4 * (answer.usage.completion_tokens - 1))
    forced = client.chat.completions.create(
        model="m", messages=HELLO, max_tokens=answer.usage.completion_tokens + 5, extra_body={"ignore_eos": True}
    )
    assert forced.usage is not None
    assert forced.usage.completion_tokens == answer.usage.completion_tokens + 5
    assert (forced.choices[0].message.content or "").startswith(text)


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(client: openai.OpenAI, stream: bool) -> None:
    texts = ["", "", ""]
    if stream:
        for chunk in client.chat.completions.create(model="m", messages=HELLO, max_tokens=5, n=3, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        answer = client.chat.completions.create(model="m", messages=HELLO, max_tokens=5, n=3)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 15
        texts = [choice.message.content or "" for choice in answer.choices]
    assert len(set(texts)) == 3
    assert {len(text) for text in texts} == {20}


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "weather"}}, "stop")],
)
def test_a_tool_is_called(client: openai.OpenAI, choice: Any, reason: str) -> None:
    wanted = {"city": "ban", "days": 1, "unit": "C"}
    answer = client.chat.completions.create(model="m", messages=HELLO, tools=[TOOL], tool_choice=choice)
    calls: Any = answer.choices[0].message.tool_calls
    assert (answer.choices[0].finish_reason, calls[0].function.name) == (reason, "weather")
    assert json.loads(calls[0].function.arguments) == wanted
    with client.chat.completions.stream(model="m", messages=HELLO, tools=[TOOL], tool_choice=choice) as stream:
        final = stream.get_final_completion()
    streamed: Any = final.choices[0].message.tool_calls
    assert (final.choices[0].finish_reason, streamed[0].id) == (reason, streamed[0].id)
    assert json.loads(streamed[0].function.arguments) == wanted


def test_tools_that_need_not_be_called(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model="m", messages=HELLO, max_tokens=5)
    answer = client.chat.completions.create(model="m", messages=HELLO, max_tokens=5, tools=[TOOL])
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert plain.usage is not None
    assert answer.usage.prompt_tokens > plain.usage.prompt_tokens + 30, "the tools are part of the prompt"


class Person(pydantic.BaseModel):
    class City(pydantic.BaseModel):
        name: str
        zip: int | None

    name: str
    age: int = pydantic.Field(ge=18)
    tags: list[str] = pydantic.Field(min_length=2)
    home: City
    kind: Literal["adult", "child"]


@pytest.mark.parametrize("route", ["chat", "responses"])
def test_a_structured_answer_is_of_its_class(client: openai.OpenAI, route: str) -> None:
    if route == "chat":
        parsed = client.chat.completions.parse(model="m", messages=HELLO, response_format=Person)
        person = parsed.choices[0].message.parsed
    else:
        person = client.responses.parse(model="m", input="Who?", text_format=Person).output_parsed
    assert person is not None
    assert (person.age, person.tags, person.kind, person.home.zip) == (18, ["ban", "ban"], "adult", 1)


def test_a_structured_answer_is_valid_json_in_a_stream_too(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="m", messages=HELLO, response_format=Person) as stream:
        assert stream.get_final_completion().choices[0].message.parsed is not None


def test_json_and_choices_of_vllm_are_kept_to(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="m", messages=HELLO, response_format={"type": "json_object"})
    assert json.loads(answer.choices[0].message.content or "") == {"answer": "ban"}
    with pytest.raises(openai.BadRequestError, match="needs a schema"):
        client.chat.completions.create(model="m", messages=HELLO, response_format={"type": "json_schema"})  # type: ignore[arg-type] # as a client without types might


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="m", prompt="once upon a time", extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.choices[0].finish_reason) == (
        4,
        16,
        "length",
    )
    several = client.completions.create(model="m", prompt=["once upon a time", "and then"], max_tokens=3)
    assert [choice.index for choice in several.choices] == [0, 1]
    assert answer.choices[0].text.startswith(several.choices[0].text)
    ids = client.completions.create(model="m", prompt=[1, 2, 3], max_tokens=1)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3
    streamed = client.completions.create(model="m", prompt="once upon a time", max_tokens=3, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == several.choices[0].text


def test_responses(client: openai.OpenAI) -> None:
    whole = client.responses.create(model="m", input="Say hello.", instructions="Be kind.", max_output_tokens=8)
    assert whole.usage is not None
    assert (whole.status, whole.usage.output_tokens, len(whole.output_text)) == ("incomplete", 8, 32)
    with client.responses.stream(model="m", input="Say hello.", instructions="Be kind.", max_output_tokens=8) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    assert final.usage is not None
    assert (final.usage.input_tokens, final.usage.output_tokens) == (whole.usage.input_tokens, 8)
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[4:12] == ["response.output_text.delta"] * 8
    assert kinds[12:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    numbered = client.responses.create(model="m", input="hi", max_output_tokens=2, stream=True)
    assert [event.sequence_number for event in numbered] == list(range(10))


def test_a_response_is_created_before_its_prompt_is_read(sim: Start) -> None:
    server = sim()
    server.do(lambda it: it.set_faults(Faults(hang=True)))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=WITHIN) as client:
        stream = client.responses.create(model="m", input="hi", max_output_tokens=2, stream=True)
        kinds = [next(stream).type, next(stream).type]
        server.until(lambda it: [each.computed for each in it.engine.unfinished()] == [0])
        server.do(lambda it: it.set_faults(Faults()))
        kinds += [event.type for event in stream]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-1] == "response.completed"


def test_responses_call_tools(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **TOOL["function"], "strict": False}
    answer = client.responses.create(model="m", input="hi", tools=[tool], tool_choice="required")
    call: Any = answer.output[0]
    assert (call.type, call.name, json.loads(call.arguments)["days"]) == ("function_call", "weather", 1)
    events = list(client.responses.create(model="m", input="hi", tools=[tool], tool_choice="required", stream=True))
    last: Any = events[-1]
    assert (last.type, last.response.output[0].arguments) == ("response.completed", call.arguments)


def test_embeddings(client: openai.OpenAI) -> None:
    packed = client.embeddings.create(model="m", input=["one", "two", "one"])
    plain = client.embeddings.create(model="m", input="one", encoding_format="float", dimensions=64)
    assert [row.index for row in packed.data] == [0, 1, 2]
    assert packed.data[0].embedding == packed.data[2].embedding != packed.data[1].embedding
    assert packed.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-6)
    assert packed.usage.prompt_tokens == 3


def test_prompts_are_rendered_as_they_are_read(client: openai.OpenAI) -> None:
    """vllm-router chooses by these token ids: without them most of its prompts miss an engine's cache."""

    def rendered(route: str, **body: Any) -> Any:
        return client.post(f"/{route}/render", body={"model": "m", **body}, cast_to=object)

    answer = client.chat.completions.create(model="m", messages=HELLO, max_tokens=20)
    first = rendered("chat/completions", messages=HELLO)["token_ids"]
    assert answer.usage is not None
    assert len(first) == answer.usage.prompt_tokens
    said = {"role": "assistant", "content": answer.choices[0].message.content}
    assert rendered("chat/completions", messages=[*HELLO, said])["token_ids"][: len(first)] == first
    assert [len(one["token_ids"]) for one in rendered("completions", prompt=["a prompt", [1, 2, 3]])] == [2, 3]
    with pytest.raises(openai.NotFoundError):
        rendered("chat/completions", messages=HELLO, model="gone")


def test_models(client: openai.OpenAI) -> None:
    models = client.models.list()
    assert [(model.id, getattr(model, "max_model_len", None)) for model in models] == [("m", 2048)]


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"model": "gone"}, openai.NotFoundError, "The model `gone` does not exist."),
        ({"max_tokens": 3000}, openai.BadRequestError, "for a total of 3019 tokens"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens must be at least 1, got 0."),
        ({"n": 0}, openai.BadRequestError, "n must be from 1"),
        ({"messages": []}, openai.BadRequestError, "messages must not be empty"),
        (
            {"messages": [{"role": "user", "content": "long " * 2000}]},
            openai.BadRequestError,
            "even without any output",
        ),
        ({"max_tokens": "ten"}, openai.BadRequestError, "validation error"),
        ({"extra_body": {"priority": 1}}, openai.BadRequestError, "Priority scheduling is not enabled"),
        ({"tool_choice": "required"}, openai.BadRequestError, "`tools` must be set"),
    ],
)
def test_errors(client: openai.OpenAI, change: Any, error: type[openai.APIStatusError], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        client.chat.completions.create(**({"model": "m", "messages": HELLO} | change))
    body: Any = caught.value.body
    assert (body["code"], set(body)) == (caught.value.status_code, {"message", "type", "param", "code"})


def test_headers(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="m", messages=HELLO, max_tokens=1, extra_headers={"X-Request-Id": "mine"}
    )
    assert (raw.headers["x-request-id"], raw.parse().id) == ("mine", "chatcmpl-mine")
