"""Token ids of prompts, as vLLM's renderers tell them: vllm-router chooses an engine by these.

Nothing is read into the cache, and no fault is drawn.
"""

from __future__ import annotations

from typing import Any

from loadtest.engine import tokens
from loadtest.engine.api.checks import Limits, check_model, decode, encode
from loadtest.engine.api.openai import CHAT, COMPLETION, prompts_of


def chat(body: bytes, limits: Limits) -> bytes:
    """`/v1/chat/completions/render`. Raises ApiError."""
    asked = decode(CHAT, body)
    model = check_model(limits, asked.model)
    return encode(_request(model, tokens.chat(asked.messages, tools=asked.tools)))


def completions(body: bytes, limits: Limits) -> bytes:
    """`/v1/completions/render`. Raises ApiError."""
    asked = decode(COMPLETION, body)
    model = check_model(limits, asked.model)
    return encode([_request(model, data) for data in prompts_of(asked.prompt)])


def _request(model: str, data: bytes) -> dict[str, Any]:
    ids = [int.from_bytes(data[at : at + tokens.BYTES], "little") for at in range(0, len(data), tokens.BYTES)]
    return {"request_id": "", "token_ids": ids, "features": None, "sampling_params": {}, "model": model}
