"""Cells of Instructor's package, over OpenAI's and Anthropic's."""

from __future__ import annotations

import asyncio

import anthropic
import instructor
import openai
from cells import HELLO, KEY, MODEL, ROOT, SLOW, URL, Reading, check, failing, run
from instructor.core.exceptions import InstructorRetryException
from pydantic import BaseModel, Field


class Story(BaseModel):
    """Longer than its caller waits."""

    text: str = Field(min_length=4000)


def over(mode: instructor.Mode, key: str = KEY, retries: int = 0) -> instructor.Instructor:
    within = openai.OpenAI(base_url=URL, api_key=key, max_retries=retries, timeout=60.0)
    return instructor.from_openai(within, mode=mode)


ASKED = {"model": MODEL, "messages": HELLO, "response_model": Reading, "max_tokens": 100, "max_retries": 0}


def tools() -> None:
    check(isinstance(over(instructor.Mode.TOOLS).create(**ASKED), Reading))


def structured() -> None:
    check(isinstance(over(instructor.Mode.JSON_SCHEMA).create(**ASKED), Reading))


def stream() -> None:
    *_, last = over(instructor.Mode.JSON_SCHEMA).create_partial(**ASKED)
    check((last.river, last.level) == ("ban", 1), last)


def messages() -> None:
    within = anthropic.Anthropic(base_url=ROOT, api_key=KEY, max_retries=0, timeout=60.0)
    check(isinstance(instructor.from_anthropic(within, mode=instructor.Mode.TOOLS).create(**ASKED), Reading))


def errors() -> None:
    refused = failing(InstructorRetryException, lambda: over(instructor.Mode.JSON_SCHEMA, SLOW).create(**ASKED), 3)
    while refused is not None and not isinstance(refused, openai.RateLimitError):
        refused = refused.__cause__ or refused.__context__
    check(refused is not None, "the package's exception tells nothing of the limit")
    check(int(refused.response.headers["retry-after"]) >= 1, refused)
    for _ in range(3):
        check(over(instructor.Mode.JSON_SCHEMA, SLOW, retries=3).create(**ASKED))


def cancel() -> None:
    async def main() -> None:
        within = openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)
        asked = ASKED | {"response_model": Story, "max_tokens": 4000}
        calling = instructor.from_openai(within, mode=instructor.Mode.JSON_SCHEMA).create(**asked)
        try:
            await asyncio.wait_for(calling, 1.0)
        except TimeoutError:
            return
        check(False, "it was answered before its caller gave up")

    asyncio.run(main())


run(tools, structured, stream, messages, errors, cancel)
