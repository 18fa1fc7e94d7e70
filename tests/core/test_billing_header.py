"""Claude Code's line that changes with every call: never hashed, and taken off the prompt."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from gateway.core.billing_header import LONGEST, billing_line, without_billing_line
from gateway.core.request.call import Call, CallSettings
from gateway.core.request.parser import parse
from gateway.core.request.routes import ROUTES

BRIEF: Any = {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}
HISTORY = "The level of the river. " * 100


def line(turn: int) -> str:
    return f"x-anthropic-billing-header: cc_version=2.1.{turn}; cc_entrypoint=cli; cch={turn:05x};"


def call(path: str, body: Any) -> Call:
    return parse(
        ROUTES[path.encode()],
        {b"content-type": b"application/json"},
        json.dumps({"model": "m", "max_tokens": 5, **body}).encode(),
        settings=CallSettings(),
        request_id="r",
        tenant="t",
        now=0.0,
    )


def turns(path: str, form: str, count: int) -> list[Call]:
    """The calls of a conversation that grows, each with another line."""
    made, said = [], []
    for turn in range(count):
        said.append({"role": "user", "content": f"{turn}: {HISTORY}"})
        given = {
            "list": [{"type": "text", "text": line(turn)}, BRIEF],
            "text": f"{line(turn)}\nYou are an agent.",
        }[form]
        before: list[Any] = [] if path == "/v1/messages" else [{"role": "system", "content": given}]
        more = {"system": given} if path == "/v1/messages" else {}
        made.append(call(path, {"messages": [*before, *said], **more}))
        said.append({"role": "assistant", "content": HISTORY})
    return made


@pytest.mark.parametrize("form", ["list", "text"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_the_history_behind_it_has_the_hashes_of_the_call_before(path: str, form: str) -> None:
    calls = turns(path, form, 10)
    for earlier, later in pairwise(calls):
        assert len(earlier.prefix) >= 4
        assert later.prefix[: len(earlier.prefix)] == earlier.prefix
        assert len(later.prefix) > len(earlier.prefix)


def test_its_tokens_are_counted_all_the_same() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    given = call("/v1/messages", {**body, "system": line(1)})
    assert given.ascii_bytes == len(f"{line(1)}\0user\0hi")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ""),
        ("You are an agent.", ""),
        (f" {line(1)}", ""),
        (line(1), line(1)),
        (f"{line(1)}\nYou", f"{line(1)}\n"),
        (line(1).ljust(LONGEST), line(1).ljust(LONGEST)),
        (line(1).ljust(LONGEST + 1), ""),
        (line(1).ljust(LONGEST - 1) + "\nYou", line(1).ljust(LONGEST - 1) + "\n"),
        (line(1).ljust(LONGEST) + "\nYou", ""),
    ],
)
def test_the_line_has_an_end(text: str, found: str) -> None:
    assert billing_line(text) == found


@pytest.mark.parametrize(
    ("system", "left"),
    [
        ([{"type": "text", "text": line(1)}, BRIEF], [BRIEF]),
        ([BRIEF | {"text": f"{line(1)}\nYou"}], [BRIEF | {"text": "You"}]),
        ([{"type": "text", "text": line(1)}], []),
        ([line(1), "You"], ["You"]),
        (f"{line(1)}\nYou", "You"),
        (line(1), []),
    ],
)
def test_engines_do_not_get_it(system: Any, left: Any) -> None:
    body = {"messages": [{"role": "user", "content": line(2)}], "system": system, "seed": 1}
    sent = json.loads(call("/v1/messages", body).body)
    assert sent == {"model": "m", "max_tokens": 5, **body, "system": left}


def test_a_message_with_nothing_else_goes_with_it() -> None:
    hello = {"role": "user", "content": "hi"}
    for content, kept in ((line(1), []), (f"{line(1)}\nYou", [{"role": "system", "content": "You"}])):
        body = {"messages": [{"role": "system", "content": content}, hello]}
        assert json.loads(call("/v1/chat/completions", body).body)["messages"] == [*kept, hello]


@pytest.mark.parametrize(
    "system",
    [None, [], "", "You", [None, line(1)], [{"other": line(1)}], {"other": line(1)}, [[]]],
)
def test_any_other_prompt_stays_as_it_is(system: Any) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "system": system}
    sent = json.loads(call("/v1/messages", body).body)
    assert (sent["system"] or None) == (system or None)


def test_a_first_message_without_content_stays_as_it_is() -> None:
    body = {"model": "m", "messages": [{"role": "system"}, {"role": line(1), "content": "hi"}]}
    assert json.loads(call("/v1/chat/completions", body).body)["messages"] == body["messages"]
    data = json.dumps(body).encode()
    assert json.loads(without_billing_line(data, "chat")) == body
