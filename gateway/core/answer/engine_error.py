"""Error answers of engines, translated into OpenAI's error object."""

from __future__ import annotations

import re
from types import MappingProxyType

import msgspec

from gateway.core.request.outcome import STATUS, Outcome, error_body
from gateway.shared.vllm.answers import error_of

LOGGED_AT_MOST = 2000  # characters of an engine's message about its own failure
BEGINNING = 2000  # characters of a message that is cut off
TOO_LONG = "context_length_exceeded"  # OpenAI's code, by which agents know to shorten their history
NO_SUCH_ROUTE = (404, 405)  # what servers answer on a path that they do not have
NO_ROUTE = ("Not Found", "Method Not Allowed", None)  # FastAPI's words there; a model that is not there has others
_EMBEDS = "It takes an embedding model, such as vLLM serves with --runner pooling"
_HEARS = "It takes a model that hears, such as Whisper"
_OFFERS = MappingProxyType({
    "/v1/embeddings": _EMBEDS,
    "/pooling": _EMBEDS,
    "/v1/audio/transcriptions": _HEARS,
    "/v1/audio/translations": _HEARS,
})  # fmt: skip
_cut_message = re.compile(rf'"message"\s*:\s*("(?:[^"\\]|\\u[0-9a-fA-F]{{4}}|\\[^u]){{1,{BEGINNING}}})').search
_text = msgspec.json.Decoder(str).decode
# vLLM 0.8 to 0.32: "maximum context length is", "maximum model length of", "the model's context length is only".
_too_long = re.compile("(?:maximum|model's) (?:context|model) length", re.IGNORECASE).search


def is_refusal(status: int) -> bool:
    """Whether an engine's error is about the request. 501 is vLLM's for options that it does not have."""
    return status < 500 or status == 501


def engine_error(status: int, body: bytes, path: str, model: str) -> tuple[bytes, str]:
    """The body for the caller, OpenAI's error object, and a message for the log (empty: none).

    `body` is the engine's error answer in any of vLLM's forms, or the beginning of a long one. Its message about a bad
    request is for the caller. Its message about its own failure (5xx) may hold paths, addresses and code, so it
    goes to the log alone. An engine without the route at `path` only says "Not Found": the caller is told that `model`
    does not offer it.
    """
    refuses = is_refusal(status)
    outcome = Outcome.RATE_LIMITED if status == 429 else Outcome.BAD_REQUEST if refuses else Outcome.UPSTREAM
    advice = STATUS[outcome]
    error = error_of(body)
    if not refuses:
        message = f"The engine failed with status {status}. The gateway's log has its message, under this request's id."
        return error_body(message, advice.type, advice.code), (error.message or "")[:LOGGED_AT_MOST]
    if error.message in NO_ROUTE and status in NO_SUCH_ROUTE:
        message = (
            f"The model {model!r} does not offer {path}: its engine has no such route, which vLLM offers by the kind "
            f"of model and by its version. {_OFFERS.get(path, 'Choose another model; GET /v1/models lists them')}."
        )
        return error_body(message, advice.type, "unsupported_route", "model"), ""
    message = error.message or _beginning(body) or f"The engine answered {status} without saying why."
    code = error.code if isinstance(error.code, str) else TOO_LONG if _too_long(message) else advice.code
    return error_body(message, error.type or advice.type, code, error.param), ""


def _beginning(body: bytes) -> str:
    """Beginning of the message in a body that is cut off; empty: none is found."""
    found = _cut_message(body[: 8 * BEGINNING].decode(errors="ignore"))
    try:
        return "" if found is None else _text(found[1] + '"') + "..."
    except msgspec.DecodeError:
        return ""  # cut between the two halves of a character
