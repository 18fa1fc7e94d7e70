"""Cells of LlamaIndex's packages for servers that speak OpenAI's API."""

from __future__ import annotations

import asyncio

import openai
from cells import ENDLESS, KEY, MODEL, SLOW, URL, Reading, check, failing, run
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

HELLO = [ChatMessage(role="user", content="Why is the river level?")]


def model(**options: object) -> OpenAILike:
    given = {"api_base": URL, "api_key": KEY, "model": MODEL, "max_retries": 0, "max_tokens": 8, "temperature": 0}
    return OpenAILike(**given | {"is_chat_model": True, "is_function_calling_model": True} | options)


def chat() -> None:
    check(model().chat(HELLO).message.content)


def stream() -> None:
    whole = model().chat(HELLO)
    pieces = [piece.delta or "" for piece in model().stream_chat(HELLO)]
    check("".join(pieces) == whole.message.content, pieces)


def tools() -> None:
    def level_of(river: str) -> int:
        """The level of a river, in centimetres."""
        return 131

    tool = FunctionTool.from_defaults(level_of)
    answering = model(max_tokens=60)
    answer = answering.chat_with_tools([tool], chat_history=HELLO, tool_required=True)
    (called,) = answering.get_tool_calls_from_response(answer)
    check((called.tool_name, list(called.tool_kwargs)) == ("level_of", ["river"]), called)


def structured() -> None:
    answer = model(max_tokens=100, should_use_structured_outputs=True).as_structured_llm(Reading).chat(HELLO)
    check(isinstance(answer.raw, Reading), answer)


def embeddings() -> None:
    texts = OpenAILikeEmbedding(api_base=URL, api_key=KEY, model_name=MODEL, max_retries=0)
    check(len(texts.get_text_embedding_batch(["one", "two"])) == 2)


def errors() -> None:
    unknown = failing(openai.NotFoundError, lambda: model(model="no-such-model").chat(HELLO))
    check("no-such-model" in unknown.message, unknown)
    refused = failing(openai.RateLimitError, lambda: model(api_key=SLOW, max_tokens=1).chat(HELLO), times=3)
    check(int(refused.response.headers["retry-after"]) >= 1, refused)
    for _ in range(3):
        check(model(api_key=SLOW, max_tokens=1, max_retries=3).chat(HELLO))


def cancel() -> None:
    async def main() -> None:
        endless = model(max_tokens=4000, additional_kwargs={"extra_body": ENDLESS})
        pieces = await endless.astream_chat(HELLO)
        await anext(aiter(pieces))
        await pieces.aclose()

    asyncio.run(main())


run(chat, stream, tools, structured, embeddings, errors, cancel)
