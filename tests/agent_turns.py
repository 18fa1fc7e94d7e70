"""Turns of a coding agent as Claude Code sends them: a long system prompt, a growing history, and before both a line
that is another one in each call."""

from __future__ import annotations

from typing import Any

import anthropic

LONG = " ".join(f"Rule {number}: read the file before you change it." for number in range(160))


def shares(url: str, model: str, count: int) -> list[float]:
    """The share of each turn's prompt that the engine had cached, as it tells itself."""
    said: list[dict[str, Any]] = []
    found = []
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120.0) as client:
        for turn in range(count):
            said.append({"role": "user", "content": f"Step {turn}: what is in the next file?"})
            line = f"x-anthropic-billing-header: cc_version=2.1.37.fbe; cc_entrypoint=cli; cch={turn * 7919:05x};"
            system: Any = [{"type": "text", "text": line}, {"type": "text", "text": LONG}]
            answer = client.messages.create(model=model, system=system, messages=said, max_tokens=8)
            said.append({"role": "assistant", "content": answer.content[0].text or "Nothing."})
            cached = answer.usage.cache_read_input_tokens or 0
            found.append(cached / (cached + answer.usage.input_tokens))
    return found
