"""Kinds of values that a file's fields may hold, read from annotations; reader, printer and schema share them.

A kind is a union of options. An option is a mapping (a Struct, or `Mapping[K, V]`), a list (`tuple[T, ...]`), nothing
(`None`), JSON (`Any`) or a scalar. A scalar has a form: how its text becomes a value, and how to say so. Forms are the
metadata of a type (`Text`, `Unit`), a Struct that has `parse`, or follow from `Literal` and `bool`. A Struct with a
`shorthand` may be written as that field's value alone.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from gateway.shared.files.units import Unit


class Text(msgspec.Struct, frozen=True):
    """Form of a str: the regular expression it must match in full, and how to say so. `valid`: a further condition.
    `secret`: what does not match may be something that nobody should see. `mend`: what was probably meant by text that
    does not match."""

    pattern: str
    what: str
    secret: bool = False
    mend: Callable[[str], str | None] | None = None
    valid: Callable[[str], bool] | None = None

    def meant(self, text: str) -> Iterator[str]:
        """Texts of this form that a person probably meant by another."""
        mended = None if self.mend is None else self.mend(text)
        if mended is not None:
            yield mended

    def parse(self, text: str) -> str | None:
        """The text, if the pattern matches all of it; else None."""
        good = re.fullmatch(self.pattern, text) and (self.valid is None or self.valid(text))
        return text if good else None


class Words(msgspec.Struct, frozen=True):
    """Form of a few values, each with a word of its own."""

    values: Mapping[str, Any]

    @property
    def what(self) -> str:
        """The words, for a message."""
        return " or ".join(self.values)

    def parse(self, text: str) -> Any:
        """The value of a word; None where the text is none of them."""
        return self.values.get(text)


def fields_of(struct: Any) -> dict[str, msgspec.structs.FieldInfo]:
    """The fields of a Struct by their names in the file."""
    return {field.encode_name: field for field in msgspec.structs.fields(struct)}


class Structs:
    """The fields of Structs. Resolving annotations is slow, so each Struct is read once."""

    def __init__(self) -> None:
        self._known: dict[Any, dict[str, msgspec.structs.FieldInfo]] = {}

    def fields(self, struct: Any) -> dict[str, msgspec.structs.FieldInfo]:
        """See fields_of."""
        return self._known.get(struct) or self._known.setdefault(struct, fields_of(struct))


def shorthand_of(struct: Any) -> Any:
    """The kind of the field that may stand for a whole Struct; None: there is no such field."""
    return fields_of(struct)[struct.shorthand].type if hasattr(struct, "shorthand") else None


def options_of(kind: Any) -> tuple[Any, ...]:
    """The options of a union; a kind that is no union is its only option."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def is_struct(kind: Any) -> bool:
    """A Struct that is a mapping in the file; one with `parse` is a scalar."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct) and not hasattr(kind, "parse")


def form_of(kind: Any) -> Any:
    """The form of a scalar kind: it has `what` and `parse`. None: the kind is no scalar."""
    if kind is bool:
        return Words({"true": True, "false": False})
    if get_origin(kind) is Literal:
        return Words({str(word): word for word in get_args(kind)})
    if hasattr(kind, "parse"):
        return kind
    return next((meta for meta in getattr(kind, "__metadata__", ()) if isinstance(meta, Text | Unit)), None)


def bounds_of(kind: Any) -> tuple[float | None, float | None]:
    """Bounds of a number, the least and the greatest value; None: no such bound."""
    bounds = next(
        (meta for meta in getattr(kind, "__metadata__", ()) if isinstance(meta, msgspec.Meta)), msgspec.Meta()
    )
    return bounds.ge, bounds.le


def scalar(text: str, kind: Any) -> Any:
    """The text as one scalar kind within its bounds; None where it is not that."""
    form = form_of(kind)
    value = None if form is None else form.parse(text)
    if value is None:
        return None
    least, most = bounds_of(kind)
    return value if (least is None or value >= least) and (most is None or value <= most) else None


def meant(text: str, kind: Any) -> str | None:
    """Text of this kind that a person probably meant by `text`, which is not of this kind; None without a guess."""
    for option in options_of(kind):
        short = shorthand_of(option) if is_struct(option) else None
        found = None if short is None else meant(text, short)
        if found is not None:
            return found
        mend = getattr(form_of(option), "meant", None)
        for candidate in () if mend is None else mend(text):
            if scalar(candidate, option) is not None:
                return str(candidate)
    return None


def expected(kind: Any) -> str:
    """Describe what a kind accepts."""
    options = [option for option in options_of(kind) if option is not types.NoneType]
    return " or ".join(_expected(option) for option in sorted(options, key=is_struct))


def _expected(kind: Any) -> str:
    form = form_of(kind)
    if form is not None:
        limits = zip(("at least", "at most"), bounds_of(kind), strict=True)
        shown = [f"{word} {form.show(bound).removeprefix(form.before)}" for word, bound in limits if bound is not None]
        return ", ".join([form.what, *shown])
    if get_origin(kind) is tuple:
        return "a list"
    if get_origin(kind) is Mapping:
        return "a mapping"
    short, mapping = shorthand_of(kind), f"a mapping with {', '.join(fields_of(kind))}"
    return mapping if short is None else f"{expected(short)} or {mapping}"
