"""Calls to providers: which calls may leave the house at all, and their request bodies as a provider's API takes them.

A provider gets the fields of `FIELDS` and no others: not vLLM's extras, which it may refuse, and not those that make a
call cost more than its tokens (`service_tier`, `web_search_options`, tools that run at the provider).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
from msgspec import Raw

from gateway.core.request.call import Call
from gateway.core.request.json_body import BY_GATEWAY

_SAMPLING = ("model", "max_tokens", "temperature", "top_p", "stop", "stream", "n", "seed", "user")
_PENALTIES = ("presence_penalty", "frequency_penalty", "logit_bias", "logprobs")
FIELDS: dict[str, frozenset[str]] = {
    "/v1/chat/completions": frozenset((
        *_SAMPLING, *_PENALTIES, "messages", "max_completion_tokens", "top_logprobs", "response_format", "tools",
        "tool_choice", "parallel_tool_calls", "functions", "function_call", "reasoning_effort", "verbosity",
    )),
    "/v1/completions": frozenset((*_SAMPLING, *_PENALTIES, "prompt", "echo", "suffix")),
    "/v1/messages": frozenset((
        "model", "messages", "max_tokens", "system", "temperature", "top_k", "top_p", "stop_sequences", "stream",
        "tools", "tool_choice", "thinking", "metadata",
    )),
}  # fmt: skip
_ANTHROPIC = b"anthropic-version: 2023-06-01\r\n"
_NULL = Raw(b"null")
_USAGE = Raw(b'{"include_usage":true}')
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MOST_NAMED = 16  # dropped fields in the answer's header


class _Tool(msgspec.Struct):
    type: str = "custom"


class _Tools(msgspec.Struct):
    tools: list[_Tool] | None = None


_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_tools = msgspec.json.Decoder(_Tools).decode


def may_leave(call: Call) -> bool:
    """Whether a provider can be asked for such a call: text, on a route of OpenAI's or Anthropic's API, whose cost its
    tokens bound. So no tool may be one that runs at the provider."""
    if call.route.path not in FIELDS or call.media:
        return False
    try:
        tools = _tools(call.body).tools or ()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return all(tool.type in ("function", "custom") for tool in tools)


def provider_body(call: Call, body: bytes, model: str) -> tuple[bytes, list[str]]:
    """Return the body for a provider that knows the model as `model`, and the names of the fields that are dropped."""
    path, fields = call.route.path, _fields(body)
    kept = {name: value for name, value in fields.items() if name in FIELDS[path]}
    dropped = [name for name in fields if name not in kept and name not in BY_GATEWAY and name != "stream_options"]
    if kept.get("max_completion_tokens", _NULL) != _NULL:
        kept.pop("max_tokens", None)  # it does not count beside the other, and a provider may take it for the limit
    kept["model"] = Raw(msgspec.json.encode(model))
    if call.stream and call.route.usage_option:
        kept["stream_options"] = _USAGE
    return msgspec.json.encode(kept), dropped


def provider_lines(call: Call) -> bytes:
    """Return the head of a request to a provider: nothing of the caller's own but the id that it was given."""
    lines = b"content-type: application/json\r\nuser-agent: weir\r\nx-request-id: %b\r\n" % call.request_id.encode()
    return lines + _ANTHROPIC if call.route.kind == "message" else lines


def dropped_line(names: Iterable[str]) -> bytes:
    """Return the answer's line that names dropped fields. Names that no header can hold are left out."""
    shown = [name for name in names if _NAME.fullmatch(name)][:MOST_NAMED]
    return b"x-weir-dropped: %b\r\n" % ", ".join(shown).encode() if shown else b""
