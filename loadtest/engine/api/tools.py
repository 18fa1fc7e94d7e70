"""Tool call of a model that has to make one: by name, or because one is `required`. Deterministic.

With `tool_choice` absent, "auto" or "none" the model answers in words.
"""

from __future__ import annotations

import zlib
from typing import Any

from loadtest.engine.api import examples
from loadtest.engine.api.checks import ApiError


def call_id(request_id: str, index: int) -> str:
    """The id of the call in choice `index`."""
    return f"call_{zlib.crc32(request_id.encode(), index):08x}"


def called(
    tools: list[dict[str, Any]] | None, choice: Any, format: dict[str, Any] | None
) -> tuple[str | None, list[bytes] | None]:
    """The name of the function called and its arguments as words; (None, its words): the answer is text, in `format`.

    Raises ApiError 400 where the choice names no tool that was given, or the format has no schema.
    """
    if choice in (None, "auto", "none"):
        return None, examples.structured(format)
    if not tools:
        raise ApiError(400, "When using `tool_choice`, `tools` must be set.", param="tool_choice")
    functions = [tool.get("function", tool) for tool in tools]
    if choice in ("required", "any"):
        function = functions[0]
    else:
        wanted = choice.get("function", choice).get("name") if isinstance(choice, dict) else None
        function = next((one for one in functions if one.get("name") == wanted), None)
        if function is None:
            message = "The tool specified in `tool_choice` does not match any of the specified `tools`"
            raise ApiError(400, message, param="tool_choice")
    schema = function.get("parameters") or function.get("input_schema") or {}
    return str(function.get("name")), examples.said(schema)
