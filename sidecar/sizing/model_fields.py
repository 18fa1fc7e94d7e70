"""Fields of a model's JSON files, which anybody may have written: reading is bounded, and a mistake names its field.

A field that is absent, null or 0 is not used: files write all three for the same.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

MAX_WIDTH = 2**24  # of one dimension: channels, heads x head_dim, words
MAX_TOKENS = 2**31
MAX_LAYERS = 4096
SHOWN = 60  # characters of what was found

Fields = dict[str, Any]


class ModelError(ValueError):
    """A model's file that cannot be read or understood; says which field, what was found and what was expected."""


class Malformed(ModelError):
    """A file that no engine could use as it is: cut off, or with a value that cannot be. Nothing is started with it."""


def json_object(data: bytes, name: str, most: int) -> Fields:
    """The JSON object in `data`, at most `most` bytes. `name`: how messages call it. Raises Malformed."""
    if len(data) > most:
        raise Malformed(f"{name} has more than {most} bytes")
    try:
        # transformers writes NaN and Infinity, which are no JSON: `"time_step_limit": [0.0, Infinity]` of Mamba 2.
        python = b"Infinity" in data or b"NaN" in data
        value = json.loads(data) if python else msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{name} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise Malformed(f"{name} holds {shown(value)}, expected an object")
    return value


def shown(value: object) -> str:
    """A value, short enough for a message."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def whole(fields: Fields, names: tuple[str, ...], most: int = MAX_WIDTH) -> int | None:
    """The first of `names` that is used, from 1 to `most`; None: none is. Raises ModelError for what may mean something
    to vLLM (-1, a list with an entry for each layer), Malformed for what cannot."""
    for name in names:
        value = fields.get(name)
        if value is None or (value == 0 and value is not False):
            continue
        if type(value) is not int or not 1 <= value <= most:
            kind = Malformed if isinstance(value, str) or (type(value) is int and value != -1) else ModelError
            raise kind(f"{name} is {shown(value)}, expected a whole number from 1 to {most}")
        return value
    return None


def needed(fields: Fields, names: tuple[str, ...], most: int = MAX_WIDTH) -> int:
    """`whole`, or ModelError where none of `names` is used. Raises Malformed for -1, too."""
    try:
        value = whole(fields, names, most)
    except ModelError as error:
        if any(isinstance(fields.get(name), list) for name in names):
            raise
        raise Malformed(str(error)) from None
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
