"""Cells of OpenAI's package for Python."""

from __future__ import annotations

import json
import time

import openai
from cells import ENDLESS, HELLO, KEY, LEVEL, MODEL, SLOW, URL, Reading, check, failing, run

client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=60.0)
create = client.chat.completions.create


def chat() -> None:
    answer = create(model=MODEL, messages=HELLO, max_tokens=8)
    check(answer.choices[0].message.content)
    check(answer.usage.completion_tokens == 8, answer.usage)


def stream() -> None:
    whole = create(model=MODEL, messages=HELLO, max_tokens=8, temperature=0)
    chunks = list(
        create(
            model=MODEL,
            messages=HELLO,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    check(text == whole.choices[0].message.content, text)
    check(chunks[-1].usage.completion_tokens == 8, chunks[-1])


def tools() -> None:
    tool = {"type": "function", "function": LEVEL}
    answer = create(model=MODEL, messages=HELLO, tools=[tool], tool_choice="required", max_tokens=60)
    (called,) = answer.choices[0].message.tool_calls
    check(called.function.name == "level_of")
    result = {"role": "tool", "tool_call_id": called.id, "content": "131"}
    turns = [*HELLO, answer.choices[0].message.model_dump(exclude_none=True), result]
    check(create(model=MODEL, messages=turns, tools=[tool], max_tokens=5).choices[0].message.content)


def structured() -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Reading, max_tokens=100)
    check(isinstance(answer.choices[0].message.parsed, Reading), answer)


def embeddings() -> None:
    answer = client.embeddings.create(model=MODEL, input=["one", "two"])
    check(len(answer.data) == 2)
    check(answer.data[0].embedding)


def responses() -> None:
    whole = client.responses.create(model=MODEL, input="Why?", max_output_tokens=6, temperature=0)
    check(whole.output_text)
    with client.responses.stream(model=MODEL, input="Why?", max_output_tokens=6, temperature=0) as events:
        kinds = [event.type for event in events]
    check(kinds[0] == "response.created", kinds)
    check(kinds[-1] == "response.completed", kinds)


def batches() -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 4}
    lines = [
        json.dumps({"custom_id": each, "method": "POST", "url": "/v1/chat/completions", "body": body}) for each in "ab"
    ]
    file = client.files.create(file=("calls.jsonl", "\n".join(lines).encode()), purpose="batch")
    check(file.id in [each.id for each in client.files.list()])
    window = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = client.batches.create(input_file_id=file.id, **window)
    ends = time.monotonic() + 20.0
    while batch.status != "completed" and time.monotonic() < ends:
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    check(batch.status == "completed", batch)
    found = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    check(sorted(each["custom_id"] for each in found) == ["a", "b"], found)  # in any order, as OpenAI has it
    check(client.files.delete(file.id).deleted)


def errors() -> None:
    unknown = failing(openai.NotFoundError, lambda: create(model="no-such-model", messages=HELLO))
    check("no-such-model" in unknown.message, unknown)

    def ask(retries: int) -> object:
        slow = client.with_options(api_key=SLOW, max_retries=retries)
        return slow.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1).choices[0]

    refused = failing(openai.RateLimitError, lambda: ask(0), times=3)
    check(int(refused.response.headers["retry-after"]) >= 1, refused)
    for _ in range(3):
        ask(3)


def cancel() -> None:
    answer = create(model=MODEL, messages=HELLO, max_tokens=4000, stream=True, extra_body=ENDLESS)
    next(iter(answer))
    answer.close()


run(chat, stream, tools, structured, embeddings, responses, batches, errors, cancel)
