"""From a plain tree of text to a tree of frozen Structs, saying of every mistake where it is and what was expected.

The Struct's annotations are the only description of the format: unknown fields, wrong kinds and values out of bounds
follow from them. All problems of a file are found in one reading, since an operator wants to fix them in one edit.
A scalar is text until a field says what it is, so `on`, `no` and `0x10` mean nothing by themselves.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from gateway.core.units import Unit

_NO = object()  # a scalar that is not what was asked for; None is a value


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One mistake in a file. `path` is dotted (`classes.batch.weight`), empty for the whole file; lines from 1."""

    file: str
    line: int
    path: str
    found: str
    expected: str
    nearest: str | None = None

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: " + (f"{self.path}: " if self.path else "")
        hint = f" (did you mean {self.nearest}?)" if self.nearest else ""
        return f"{where}found {self.found}, expected {self.expected}{hint}"


class Text(msgspec.Struct, frozen=True):
    """Metadata of a str field: the regular expression it must match in full, and how to say so."""

    pattern: str
    what: str


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the plain tree. `fields` maps a key to its line and value. All None: null, or nothing written."""

    line: int
    text: str | None = None
    items: tuple[Value, ...] | None = None
    fields: dict[str, tuple[int, Value]] | None = None
    size: int = 1  # nodes in this subtree

    def describe(self) -> str:
        if self.fields is not None:
            return "a mapping"
        if self.items is not None:
            return "a list"
        return "nothing" if self.text is None else shortened(self.text)


class Reader:
    """Reads one file's tree, gathering `problems`. What it returns is meaningful only while there are none."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[Problem] = []

    def problem(self, line: int, path: str, found: str, expected: str, nearest: str | None = None) -> None:
        self.problems.append(
            Problem(file=self.file, line=line, path=path, found=found, expected=expected, nearest=nearest)
        )

    def read(self, value: Value, kind: Any, path: str) -> Any:
        """`value` as `kind`: a Struct, `tuple[T, ...]`, `Mapping[K, V]`, or a scalar type."""
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self._struct(value, kind, path)
        if get_origin(kind) is tuple:
            if value.items is None:
                return self._unexpected(value, "a list", path)
            item = get_args(kind)[0]
            return tuple(self.read(entry, item, f"{path}[{index}]") for index, entry in enumerate(value.items))
        if get_origin(kind) is Mapping:
            return self._mapping(value, get_args(kind), path)
        if value.fields is None and value.items is None:
            for option in _options(kind):
                scalar = _scalar(value.text, option)
                if scalar is not _NO:
                    return scalar
        words = [word for option in _options(kind) if get_origin(option) is Literal for word in get_args(option)]
        return self._unexpected(value, _expected(kind), path, nearest(value.text or "", words))

    def _unexpected(self, value: Value, expected: str, path: str, hint: str | None = None) -> None:
        self.problem(value.line, path, value.describe(), expected, hint)

    def _struct(self, value: Value, kind: type[msgspec.Struct], path: str) -> Any:
        known = msgspec.structs.fields(kind)
        names = [field.name for field in known]
        if value.text is not None or value.items is not None:
            return self._unexpected(value, f"a mapping with {', '.join(names)}", path)
        fields = value.fields or {}
        for name, (line, _) in fields.items():
            if name not in names:
                found = f"unknown field {shortened(name)}"
                self.problem(line, path, found, f"one of {', '.join(names)}", nearest(name, names))
        hints = get_type_hints(kind, include_extras=True)
        read = {}
        for field in known:
            if field.name in fields:
                read[field.name] = self.read(fields[field.name][1], hints[field.name], dotted(path, field.name))
            elif field.required:
                self.problem(value.line, path, f"no {field.name}", f"{field.name}: {_expected(hints[field.name])}")
        return None if self.problems else kind(**read)

    def _mapping(self, value: Value, kinds: tuple[Any, ...], path: str) -> Any:
        key, item = kinds
        if value.fields is None:
            return self._unexpected(value, "a mapping", path)
        for name, (line, _) in value.fields.items():
            if _scalar(name, key) is _NO:
                self.problem(line, path, f"the name {shortened(name)}", _expected(key))
        return {name: self.read(entry, item, dotted(path, name)) for name, (_, entry) in value.fields.items()}


def plain(value: object, kind: Any) -> Any:
    """The reverse of reading: a tree of dicts, lists, text and None, with numbers in their units."""
    if isinstance(value, msgspec.Struct):
        hints = get_type_hints(value.__class__, include_extras=True)
        return {name: plain(getattr(value, name), hints[name]) for name in value.__struct_fields__}
    if isinstance(value, Mapping):
        return {name: plain(item, get_args(kind)[1]) for name, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item, get_args(kind)[0]) for item in value]
    units = [unit for option in _options(kind) if (unit := _metadata(option, Unit)) is not None]
    if units and isinstance(value, int | float):
        return units[0].show(value)
    return None if value is None else str(value)


def dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def shortened(text: str) -> str:
    """Text from a file as a message may show it: quoted, escaped, of bounded length."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def nearest(name: str, known: Iterable[object]) -> str | None:
    """The known name a person most probably meant, if any is near."""
    return next(iter(difflib.get_close_matches(name[:60], [str(word) for word in known], n=1, cutoff=0.7)), None)


# -- scalars: what a type accepts, and how to say it ------------------------------------------------------------------


def _options(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _metadata(kind: Any, wanted: type[Any]) -> Any:
    return next((meta for meta in getattr(kind, "__metadata__", ()) if isinstance(meta, wanted)), None)


def _scalar(text: str | None, kind: Any) -> Any:
    """The text as one scalar type (Literal, str with Text, number with Unit and msgspec.Meta bounds), else _NO."""
    if text is None or kind is type(None):
        return None if text is None and kind is type(None) else _NO
    if get_origin(kind) is Literal:
        return next((word for word in get_args(kind) if str(word) == text), _NO)
    unit = _metadata(kind, Unit)
    if unit is None:
        pattern = _metadata(kind, Text).pattern
        return text if re.fullmatch(pattern, text) else _NO
    number = unit.parse(text)
    bounds = _metadata(kind, msgspec.Meta)
    if number is None or (bounds is not None and not _within(number, bounds)):
        return _NO
    return number


def _within(number: float, bounds: msgspec.Meta) -> bool:
    return (bounds.ge is None or number >= bounds.ge) and (bounds.le is None or number <= bounds.le)


def _expected(kind: Any) -> str:
    """What a scalar type accepts, in words."""
    if get_origin(kind) is Literal:
        return " or ".join(str(word) for word in get_args(kind))
    options = [option for option in _options(kind) if option is not type(None)]
    if options != [kind]:
        return " or ".join(_expected(option) for option in options)
    unit, bounds = _metadata(kind, Unit), _metadata(kind, msgspec.Meta)
    if unit is None:
        return str(_metadata(kind, Text).what)
    limits = [("at least", bounds.ge), ("at most", bounds.le)] if bounds else []
    return ", ".join([unit.what, *(f"{words} {unit.show(limit)}" for words, limit in limits if limit is not None)])
