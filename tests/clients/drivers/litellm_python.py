"""Cells of LiteLLM's package."""

from __future__ import annotations

import asyncio
import json

import litellm
from cells import ENDLESS, HELLO, KEY, LEVEL, MODEL, ROOT, SLOW, URL, Reading, check, failing, run

HERE = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY}
HERE_TOO = {"model": f"anthropic/{MODEL}", "api_base": ROOT, "api_key": KEY}
ONCE = {"max_retries": 0, "num_retries": 0}


def chat() -> None:
    answer = litellm.completion(**HERE, messages=HELLO, max_tokens=8)
    check(answer.choices[0].message.content)
    check(answer.usage.completion_tokens == 8, answer.usage)


def stream() -> None:
    whole = litellm.completion(**HERE, messages=HELLO, max_tokens=8, temperature=0)
    chunks = litellm.completion(**HERE, messages=HELLO, max_tokens=8, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    check(text == whole.choices[0].message.content, text)


def tools() -> None:
    tool = {"type": "function", "function": LEVEL}
    answer = litellm.completion(**HERE, messages=HELLO, tools=[tool], tool_choice="required", max_tokens=60)
    (called,) = answer.choices[0].message.tool_calls
    check(called.function.name == "level_of")
    check("river" in json.loads(called.function.arguments))


def structured() -> None:
    answer = litellm.completion(**HERE, messages=HELLO, response_format=Reading, max_tokens=100)
    check(Reading.model_validate_json(answer.choices[0].message.content))


def embeddings() -> None:
    answer = litellm.embedding(**HERE, input=["one", "two"])
    check(len(answer.data) == 2)
    check(answer.data[0]["embedding"])


def responses() -> None:
    check(litellm.responses(**HERE, input="Why?", max_output_tokens=6).output[0].content[0].text)


def messages() -> None:
    answer = litellm.completion(**HERE_TOO, messages=HELLO, max_tokens=8)
    check(answer.usage.completion_tokens == 8, answer)
    own = asyncio.run(litellm.anthropic_messages(**HERE_TOO, messages=HELLO, max_tokens=8))
    check(own["usage"]["output_tokens"] == 8, own)


def errors() -> None:
    nowhere = HERE | {"model": "openai/no-such-model"}
    unknown = failing(litellm.NotFoundError, lambda: litellm.completion(**nowhere, messages=HELLO, **ONCE))
    check("no-such-model" in unknown.message, unknown)
    slow = HERE | {"api_key": SLOW, "messages": HELLO, "max_tokens": 1}
    refused = failing(litellm.RateLimitError, lambda: litellm.completion(**slow, **ONCE), times=3)
    check(refused.status_code == 429, refused)
    check(int(refused.litellm_response_headers["retry-after"]) >= 1, refused.litellm_response_headers)
    for _ in range(3):
        check(litellm.completion(**slow, max_retries=3).choices)


def cancel() -> None:
    async def main() -> None:
        chunks = await litellm.acompletion(**HERE, messages=HELLO, max_tokens=4000, stream=True, extra_body=ENDLESS)
        async for _ in chunks:
            break
        await chunks.aclose()

    asyncio.run(main())


run(chat, stream, tools, structured, embeddings, responses, messages, errors, cancel)
