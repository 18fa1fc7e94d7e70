"""Check of an answer: whole, once, its caller's own, and with usage as it was wanted."""

from __future__ import annotations

from typing import Any

import msgspec

from loadtest.engine import tokens
from loadtest.lab.dst.case import Call

FEATURES = (b'"role":"assistant"', b'"finish_reason":"', b"data: [DONE]")  # of a stream, each there once


def prompt_tokens(body: bytes) -> int:
    """Count tokens of prompt as the simulated engines do in a request's body, whatever its route."""
    asked: dict[str, Any] = msgspec.json.decode(body)
    if "messages" in asked:
        return tokens.count(tokens.chat(asked["messages"]))
    texts: str | list[str] = asked["documents" if "documents" in asked else "input"]
    before = tokens.units(asked.get("query", ""))
    return sum([tokens.count(before + tokens.units(text)) for text in ([texts] if isinstance(texts, str) else texts)])


def wrong_with(call: Call, body: bytes, answer: bytes) -> str:
    """Fault of the answer to a request, framing included if it has any; empty: none."""
    if call.stream:
        counts = [answer.count(feature) for feature in FEATURES]
        if counts != [1, 1, 1]:
            return f"it has {counts} of {FEATURES}"
        at = answer.find(b'"usage":')
        if (at >= 0) != call.usage:
            return f"it tells its usage: {at >= 0}; asked to: {call.usage}"
        usage = msgspec.json.decode(answer[at + 8 : answer.index(b"}}", at) + 2]) if at >= 0 else None
    else:
        whole = msgspec.json.decode(answer)
        usage = whole["usage"]
        wanted = {"chat": "choices", "embeddings": "data", "rerank": "results"}[call.kind]
        rows = sorted(row["index"] for row in whole[wanted])
        count = 1 if call.kind == "chat" else call.items
        # The simulated engine ranks all; the gateway cuts a merged ranking to its top, as a real engine would.
        if len(rows) not in (count, call.top) or len(set(rows)) < len(rows) or rows[-1] >= call.items:
            return f"it has the rows {rows}"
    if usage is None or call.kind != "chat":  # of a merged call each is told its share
        return ""
    told, output, own = usage["prompt_tokens"], usage["completion_tokens"], prompt_tokens(body)
    if told != own or not 0 < output <= call.asked:
        return f"it tells of {told} and {output} tokens, its prompt has {own} and it asked for {call.asked}"
    return ""
