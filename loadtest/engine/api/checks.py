"""Checks of a request before it runs: its JSON, its model, the context length. And vLLM's error object."""

from __future__ import annotations

from typing import Any

import msgspec

INVALID = "BadRequestError"
BROKEN = "InternalServerError"
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
encode = msgspec.json.Encoder().encode


class ApiError(Exception):
    """An answer that is an error: vLLM's `{"error": {"message", "type", "param", "code"}}`, code being the status."""

    def __init__(self, status: int, message: str, *, type: str = INVALID, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.status}
        return encode({"error": error})


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the server for a request, and its answers about them."""

    models: tuple[str, ...]
    max_model_len: int
    priorities: bool  # whether the scheduler looks at `priority`
    prompt_details: bool  # whether usage says how much of the prompt was cached


def decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """The parsed body. Raises ApiError 400 for what is not JSON, or not of the right shape."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        param = path.rstrip("`").lstrip(".") or None
        raise ApiError(400, f"1 validation error:\n  {text}", type="Bad Request", param=param) from None
    except msgspec.DecodeError as error:
        raise ApiError(400, f"JSON decode error: {error}", type="Bad Request", param="body") from None


def check_model(limits: Limits, model: str | None) -> str:
    """The served name of `model` (absent: the first). Raises ApiError 404."""
    if not model:
        return limits.models[0]
    if model not in limits.models:
        raise ApiError(404, f"The model `{model}` does not exist.", type="NotFoundError", param="model")
    return model


def check_priority(limits: Limits, priority: int) -> None:
    """Raise ApiError 400 for a scheduler's priority where the scheduler looks at none."""
    if priority and not limits.priorities:
        raise ApiError(400, f"Got priority {priority} but Priority scheduling is not enabled.")


def output_room(limits: Limits, prompt: int, asked: int | None, param: str) -> int:
    """Tokens that may be written after `prompt`; `asked` None: all that fit. Raises ApiError 400 beyond the context."""
    most = limits.max_model_len
    if prompt >= most:
        message = (
            f"This model's maximum context length is {most} tokens. However, your prompt contains {prompt} input "
            "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input "
            "prompt."
        )
        raise ApiError(400, message, param="input_tokens")
    if asked is None:
        return most - prompt
    if asked < 1:
        raise ApiError(400, f"{param} must be at least 1, got {asked}.", param=param)
    if prompt + asked > most:
        message = (
            f"This model's maximum context length is {most} tokens. However, you requested {asked} output tokens and "
            f"your prompt contains {prompt} input tokens, for a total of {prompt + asked} tokens. Please reduce the "
            "length of the input prompt or the number of requested output tokens."
        )
        raise ApiError(400, message, param=param)
    return asked
