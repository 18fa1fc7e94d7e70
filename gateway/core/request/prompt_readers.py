"""Prompt readers: for each kind of JSON route, a function that gathers the prompt from the request's fields.

A reader fills a `Prompt` from a decoded `Body`. It raises `Refused` (400) where a required field is missing. The
fields are those that vLLM renders as prompt; `allowed_fields.py` refuses every other field that could hold one.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import UNSET

from gateway.core.billing_header import billing_line
from gateway.core.request.json_body import Body, bad_request
from gateway.core.request.prompt import Prompt


def _conversation(fields: Body, prompt: Prompt) -> None:
    """The messages, and the other fields that a chat template renders."""
    if fields.tools is not UNSET:
        prompt.raw(fields.tools)
    if fields.chat_template is not None:
        prompt.parts.append(fields.chat_template)
    parts = prompt.parts
    first = len(parts)  # the first message's role; its text comes next
    prompt.messages(fields.messages)
    if parts[first] == "system" and len(parts) > first + 1:
        prompt.billing = billing_line(parts[first + 1])
    if fields.chat_template_kwargs is not UNSET:
        prompt.raw(fields.chat_template_kwargs)


def _chat(fields: Body, prompt: Prompt) -> None:
    if fields.documents is not None:
        prompt.documents(fields.documents, "documents")
    _conversation(fields, prompt)


def _completion(fields: Body, prompt: Prompt) -> None:
    prompt.texts(fields.prompt, "prompt")


def _response(fields: Body, prompt: Prompt) -> None:
    if fields.background:
        raise bad_request(
            "background responses are not supported: this gateway keeps no answers to be fetched", "background"
        )
    if fields.tools is not UNSET:
        prompt.raw(fields.tools)
    prompt.gather(fields.instructions, "instructions")
    if fields.previous_input_messages is not None:
        prompt.documents(fields.previous_input_messages, "previous_input_messages")
    prompt.documents(fields.input, "input")


def _message(fields: Body, prompt: Prompt) -> None:
    prompt.gather(fields.system, "system")
    line = billing_line(prompt.parts[0]) if prompt.parts else ""
    _conversation(fields, prompt)
    prompt.billing = line


def _embedding(fields: Body, prompt: Prompt) -> None:
    if _one_of(fields, ("input", "messages")) == "messages":
        _conversation(fields, prompt)
    else:
        prompt.texts(fields.input, "input")


def _rerank(fields: Body, prompt: Prompt) -> None:
    prompt.gather(fields.instruction, "instruction")
    prompt.documents(fields.query, "query")
    prompt.documents(fields.documents, "documents")


def _score(fields: Body, prompt: Prompt) -> None:
    """vLLM has renamed the two sides of a pair more than once: each side is read under any of its names."""
    prompt.gather(fields.instruction, "instruction")
    for names in (("text_1", "queries", "data_1"), ("text_2", "documents", "items", "data_2")):
        name = _one_of(fields, names)
        prompt.documents(getattr(fields, name), name)


def _tokenize(fields: Body, prompt: Prompt) -> None:
    name = _one_of(fields, ("prompt", "messages", "tokens"))
    if name == "messages":
        _conversation(fields, prompt)
    else:
        prompt.texts(getattr(fields, name), name)


def _one_of(fields: Body, names: tuple[str, ...]) -> str:
    """Name of the only field present. Raises Refused for none or several: the engine would choose which to read."""
    given = [name for name in names if getattr(fields, name) is not None]
    if len(given) != 1:
        raise bad_request(f"exactly one of {', '.join(names)} is required", names[0])
    return given[0]


READERS: dict[str, Callable[[Body, Prompt], None]] = {
    "chat": _chat,
    "completion": _completion,
    "response": _response,
    "message": _message,
    "embedding": _embedding,
    "pooling": _embedding,
    "classify": _embedding,
    "rerank": _rerank,
    "score": _score,
    "tokenize": _tokenize,
}
