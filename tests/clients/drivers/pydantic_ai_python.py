"""Cells of Pydantic AI's package, with its models for OpenAI's API."""

from __future__ import annotations

import asyncio

import openai
from cells import ENDLESS, KEY, MODEL, SLOW, URL, Reading, check, failing, run
from pydantic_ai import Agent, Embedder, NativeOutput, ToolOutput
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

HELLO = "Why is the river level?"
BRIEF = {"max_tokens": 8, "temperature": 0.0}


def provider(key: str = KEY, retries: int = 0) -> OpenAIProvider:
    within = openai.AsyncOpenAI(base_url=URL, api_key=key, max_retries=retries, timeout=60.0)
    return OpenAIProvider(openai_client=within)


def agent(key: str = KEY, retries: int = 0, name: str = MODEL, **options: object) -> Agent:
    return Agent(OpenAIChatModel(name, provider=provider(key, retries)), **options)


def chat() -> None:
    check(agent().run_sync(HELLO, model_settings=BRIEF).output)


def stream() -> None:
    async def main() -> None:
        whole = await agent().run(HELLO, model_settings=BRIEF)
        async with agent().run_stream(HELLO, model_settings=BRIEF) as answer:
            text = "".join([piece async for piece in answer.stream_text(delta=True)])
            check(answer.usage.output_tokens == 8, answer.usage)
        check(text == whole.output, text)

    asyncio.run(main())


def tools() -> None:
    answer = agent(output_type=ToolOutput(Reading)).run_sync(HELLO, model_settings={"max_tokens": 100})
    check(isinstance(answer.output, Reading), answer)


def structured() -> None:
    answer = agent(output_type=NativeOutput(Reading)).run_sync(HELLO, model_settings={"max_tokens": 100})
    check(isinstance(answer.output, Reading), answer)


def embeddings() -> None:
    texts = Embedder(OpenAIEmbeddingModel(MODEL, provider=provider()))
    check(len(texts.embed_documents_sync(["one", "two"]).embeddings) == 2)


def responses() -> None:
    check(Agent(OpenAIResponsesModel(MODEL, provider=provider())).run_sync(HELLO, model_settings=BRIEF).output)


def errors() -> None:
    unknown = failing(ModelHTTPError, lambda: agent(name="no-such-model").run_sync(HELLO))
    check(unknown.status_code == 404, unknown)
    refused = failing(ModelHTTPError, lambda: agent(SLOW).run_sync(HELLO, model_settings=BRIEF), times=3)
    check(refused.status_code == 429, refused)
    check(int(refused.__cause__.response.headers["retry-after"]) >= 1, refused)
    for _ in range(3):
        check(agent(SLOW, retries=3).run_sync(HELLO, model_settings=BRIEF).output)


def cancel() -> None:
    async def main() -> None:
        endless = {"max_tokens": 4000, "extra_body": ENDLESS}
        begun = asyncio.Event()

        async def read() -> None:
            async with agent().run_stream(HELLO, model_settings=endless) as answer:
                async for _ in answer.stream_text(delta=True, debounce_by=None):
                    begun.set()

        task = asyncio.create_task(read())
        await asyncio.wait_for(begun.wait(), 20.0)
        task.cancel()
        await asyncio.wait([task])
        check(task.cancelled(), task)

    asyncio.run(main())


run(chat, stream, tools, structured, embeddings, responses, errors, cancel)
