"""Fields of a model's JSON files, which anybody may have written: reading is bounded, and a mistake names its field.

A field that is absent, null or 0 is not used: files write all three for the same.
"""

from __future__ import annotations

from typing import Any

import msgspec

MAX_WIDTH = 2**24  # of one dimension: channels, heads x head_dim, words
MAX_TOKENS = 2**31
MAX_LAYERS = 4096
SHOWN = 60  # characters of what was found

Fields = dict[str, Any]


class ModelError(ValueError):
    """A model's file that cannot be read or understood; says which field, what was found and what was expected."""


def json_object(data: bytes, name: str, most: int) -> Fields:
    """The JSON object in `data`, at most `most` bytes. `name`: how messages call it. Raises ModelError."""
    if len(data) > most:
        raise ModelError(f"{name} has {len(data)} bytes, expected at most {most}")
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{name} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{name} holds {shown(value)}, expected an object")
    return value


def shown(value: object) -> str:
    """A value, short enough for a message."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def whole(fields: Fields, names: tuple[str, ...], most: int = MAX_WIDTH) -> int | None:
    """The first of `names` that is used, from 1 to `most`; None: none is. Raises ModelError."""
    for name in names:
        value = fields.get(name)
        if value is None or (value == 0 and value is not False):
            continue
        if type(value) is not int or not 1 <= value <= most:
            raise ModelError(f"{name} is {shown(value)}, expected a whole number from 1 to {most}")
        return value
    return None


def needed(fields: Fields, names: tuple[str, ...], most: int = MAX_WIDTH) -> int:
    """`whole`, or ModelError where none of `names` is used."""
    value = whole(fields, names, most)
    if value is None:
        raise ModelError(f"{names[0]} is missing, and without it the model's memory cannot be estimated")
    return value


def word(fields: Fields, *names: str) -> str | None:
    """The first of `names` that holds text."""
    return next((value for value in map(fields.get, names) if isinstance(value, str)), None)


def within(fields: Fields, name: str) -> Fields:
    """The object under `name`; empty where there is none."""
    value = fields.get(name)
    return value if isinstance(value, dict) else {}
