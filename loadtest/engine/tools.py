"""The tool call a model makes when it has to: by name, or because one is `required`. Deterministic.

With `tool_choice` absent, "auto" or "none" the model answers in words.
"""

from __future__ import annotations

import zlib
from typing import Any

from loadtest.engine.checks import ApiError, encode
from loadtest.engine.tokens import BYTES


def call_id(request_id: str, index: int) -> str:
    """The id of the call in choice `index`."""
    return f"call_{zlib.crc32(request_id.encode(), index):08x}"


def called(tools: list[dict[str, Any]] | None, choice: Any) -> tuple[str | None, list[bytes] | None]:
    """The name of the function called and its arguments as words; (None, None): the answer is text.

    Raises ApiError 400 where the choice names no tool that was given.
    """
    if choice in (None, "auto", "none"):
        return None, None
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
    arguments = encode(_example(schema))
    return str(function.get("name")), [arguments[at : at + BYTES] for at in range(0, len(arguments), BYTES)]


def _example(schema: Any) -> Any:
    """The smallest value of a JSON schema's type; ASCII only, so that it can be cut anywhere."""
    if not isinstance(schema, dict):
        return {}
    options = [one for one in schema.get("enum", []) if isinstance(one, int | bool) or str(one).isascii()]
    if options:
        return options[0]
    simple = {"string": "ban", "integer": 1, "number": 1.5, "boolean": True, "array": [], "null": None}
    kind = schema.get("type", "object")
    if isinstance(kind, str) and kind in simple:
        return simple[kind]
    properties = schema.get("properties", {})
    names = schema.get("required") or list(properties)
    return {name: _example(properties.get(name, {"type": "string"})) for name in names if name.isascii()}
