"""Cells of LangChain's package for OpenAI's API."""

from __future__ import annotations

import openai
from cells import ENDLESS, KEY, LEVEL, MODEL, SLOW, URL, Reading, check, failing, run
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

HELLO = "Why is the river level?"


def model(**options: object) -> ChatOpenAI:
    given = {"base_url": URL, "api_key": KEY, "model": MODEL, "max_retries": 0, "max_tokens": 8, "temperature": 0}
    return ChatOpenAI(**given | options)


def chat() -> None:
    answer = model().invoke(HELLO)
    check(answer.content)
    check(answer.usage_metadata["output_tokens"] == 8, answer)


def stream() -> None:
    whole = model().invoke(HELLO)
    chunks = list(model(stream_usage=True).stream(HELLO))
    check("".join(chunk.content for chunk in chunks) == whole.content, chunks)
    check(sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) == 8, chunks)


def tools() -> None:
    bound = model(max_tokens=60).bind_tools([{"type": "function", "function": LEVEL}], tool_choice="level_of")
    (called,) = bound.invoke(HELLO).tool_calls
    check((called["name"], list(called["args"])) == ("level_of", ["river"]), called)


def structured() -> None:
    check(isinstance(model(max_tokens=100).with_structured_output(Reading).invoke(HELLO), Reading))


def embeddings() -> None:
    # Its own count of tokens needs a file of OpenAI's, and sends ids of another tokenizer than the engine's.
    texts = OpenAIEmbeddings(base_url=URL, api_key=KEY, model=MODEL, check_embedding_ctx_length=False)
    check(len(texts.embed_documents(["one", "two"])) == 2)


def responses() -> None:
    check(model(use_responses_api=True).invoke(HELLO).content)


def errors() -> None:
    unknown = failing(openai.NotFoundError, lambda: model(model="no-such-model").invoke(HELLO))
    check("no-such-model" in unknown.message, unknown)
    refused = failing(openai.RateLimitError, lambda: model(api_key=SLOW, max_tokens=1).invoke(HELLO), times=3)
    check(int(refused.response.headers["retry-after"]) >= 1, refused)
    for _ in range(3):
        check(model(api_key=SLOW, max_tokens=1, max_retries=3).invoke(HELLO))


def cancel() -> None:
    chunks = model(max_tokens=4000, extra_body=ENDLESS).stream(HELLO)
    next(chunks)
    chunks.close()


run(chat, stream, tools, structured, embeddings, responses, errors, cancel)
