"""Smallest example of a JSON schema: the simulated engine's structured answers and arguments of tools.

It reads what OpenAI's clients make of a class: types, `enum`, `const`, `$ref` into `$defs`, `anyOf`, bounds of numbers,
lengths of text and arrays. Other keywords are not read. Values are ASCII, so that they can be cut anywhere.
"""

from __future__ import annotations

from typing import Any

from loadtest.engine.api.checks import ApiError, encode
from loadtest.engine.tokens import BYTES

DEEPEST = 16  # levels; below, a schema that refers to itself is cut off by an empty object
MOST_ITEMS = 64  # of an array whose schema asks for more


def said(schema: Any) -> list[bytes]:
    """The example as the words of an answer, a token each."""
    data = encode(_example(schema, schema, 0))
    return [data[at : at + BYTES] for at in range(0, len(data), BYTES)]


def structured(format: dict[str, Any] | None) -> list[bytes] | None:
    """The words of an answer in OpenAI's `response_format`, or in a response's `text.format`; None: free ones.

    Raises ApiError 400 where a schema is asked for and none is there.
    """
    kind = format.get("type") if format is not None else None
    if format is None or kind == "text":
        return None
    if kind == "json_object":
        return said({"properties": {"answer": {"type": "string"}}})
    held = format.get("json_schema", format) if kind == "json_schema" else None
    schema = held.get("schema") if isinstance(held, dict) else None
    if not isinstance(schema, dict):
        raise ApiError(400, f"response_format of type {kind!r} needs a schema.", param="response_format")
    return said(schema)


def _example(schema: Any, root: Any, depth: int) -> Any:
    if not isinstance(schema, dict) or depth > DEEPEST:
        return {}
    if "const" in schema:
        return schema["const"]
    options = [one for one in schema.get("enum", []) if isinstance(one, int | bool) or str(one).isascii()]
    if options:
        return options[0]
    other = _other(schema, root)
    if other is not None:
        return _example(other, root, depth + 1)
    kind = schema.get("type", "object")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    if kind == "array":
        least = min(MOST_ITEMS, _number(schema, "minItems", 0))
        return [_example(schema.get("items"), root, depth + 1)] * int(least)
    simple = {
        "string": "ban".ljust(min(4096, int(_number(schema, "minLength", 0))), "a"),
        "integer": int(_number(schema, "minimum", 1)),
        "number": float(_number(schema, "minimum", 1.5)),
        "boolean": True,
        "null": None,
    }
    if isinstance(kind, str) and kind in simple:
        return simple[kind]
    properties = schema.get("properties", {})
    names = schema.get("required") or list(properties)
    return {
        name: _example(properties.get(name, {"type": "string"}), root, depth + 1) for name in names if name.isascii()
    }


def _other(schema: dict[str, Any], root: Any) -> Any:
    """The schema that this one names in place of itself, None: none."""
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found = root
        for name in reference[2:].split("/"):
            found = found.get(name) if isinstance(found, dict) else None
        return found
    return next((schema[key][0] for key in ("anyOf", "oneOf", "allOf") if schema.get(key)), None)


def _number(schema: dict[str, Any], key: str, default: float) -> float:
    value = schema.get(key, default)
    return value if isinstance(value, int | float) else default
