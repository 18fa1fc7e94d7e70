"""OpenAI's and Anthropic's own clients through the gateway to a real vLLM: each route briefly."""

from __future__ import annotations

import asyncio

import anthropic
import openai
import pytest

from loadtest.processes import Gateway
from tests.vllm.conftest import PATIENCE
from tests.vllm.real_vllm import CONTEXT, MODEL

pytestmark = pytest.mark.vllm
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say something."}]


def test_openai_sync(gateway: Gateway) -> None:
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        (model,) = client.models.list().data
        assert (model.id, model.model_extra["max_model_len"]) == (MODEL, CONTEXT)
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=MESSAGES, max_tokens=6, seed=1, temperature=0, extra_headers={"x-request-id": "mine"}
        )
        assert raw.headers["x-request-id"] == "mine"
        assert raw.headers["x-weir-engine"]
        whole = raw.parse()
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage.completion_tokens == 6
        chunks = list(
            client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=6, temperature=0, stream=True)
        )
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
        assert chunks[-1].choices[0].finish_reason == "length"
        text = client.completions.create(model=MODEL, prompt="Once", max_tokens=4, temperature=0).choices[0].text
        pieces = client.completions.create(model=MODEL, prompt="Once", max_tokens=4, temperature=0, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == text
        response = client.responses.create(model=MODEL, input="Say something.", max_output_tokens=8)
        assert response.usage.output_tokens == 8
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=6, temperature=-1)


def test_openai_async(gateway: Gateway) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
            assert [model.id async for model in client.models.list()] == [MODEL]
            whole, stream = await asyncio.gather(
                client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=6, temperature=0),
                client.chat.completions.create(
                    model=MODEL, messages=MESSAGES, max_tokens=6, temperature=0, stream=True
                ),
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(pieces) == whole.choices[0].message.content
            assert (await client.completions.create(model=MODEL, prompt="Once", max_tokens=4)).usage.total_tokens > 4

    asyncio.run(main())


def test_anthropic(gateway: Gateway) -> None:
    with anthropic.Anthropic(base_url=gateway.url, api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": "Say something."}]
        greedy = {"temperature": 0}
        whole = client.messages.create(model=MODEL, messages=messages, max_tokens=6, extra_body=greedy)
        assert whole.usage.output_tokens == 6
        with client.messages.stream(model=MODEL, messages=messages, max_tokens=6, extra_body=greedy) as stream:
            assert "".join(stream.text_stream) == whole.content[0].text
            assert stream.get_final_message().usage.output_tokens == 6
