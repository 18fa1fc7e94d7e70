"""From a plain tree of text to a tree of frozen Structs, saying of every mistake where it is and what was expected.

The Struct's annotations are the only description of the format: unknown fields, wrong kinds and values out of bounds
follow from them. All problems of a file are found in one reading, since an operator wants to fix them in one edit.
A scalar is text until a field says what it is, so `on`, `no` and `0x10` mean nothing by themselves.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, get_args, get_origin

import msgspec

from gateway.core.kinds import Structs, Text, Words, expected, form_of, is_struct, options_of, scalar
from gateway.core.units import Unit

Path = tuple[str | int, ...]  # fields by name, entries of lists by number
LISTED = 40  # names in one message
_NO = object()  # not what was asked for; None is a value


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One mistake in a file. `path` is dotted (`classes.batch.weight`), empty for the whole file. `line` counts
    from 1; 0: not known."""

    file: str
    line: int
    path: str
    found: str
    expected: str
    nearest: str | None = None

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}: " if self.line else f"{self.file}: "
        where = place + (f"{self.path}: " if self.path else "")
        hint = f" (did you mean {self.nearest}?)" if self.nearest else ""
        return f"{where}found {self.found}, expected {self.expected}{hint}"


class InvalidFile(Exception):
    """A file that cannot be used: every problem found in it, in the order of its lines."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = sorted(problems, key=lambda problem: problem.line)
        super().__init__("\n".join(map(str, self.problems)))


class Fault(msgspec.Struct, frozen=True):
    """One thing wrong with a tree of Structs that no single field can tell: where, and what would be right."""

    path: Path
    found: str
    expected: str
    nearest: str | None = None


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the plain tree. `fields` maps a key to its line and value. All None: null, or nothing written."""

    line: int
    text: str | None = None
    quoted: bool = False
    items: tuple[Value, ...] | None = None
    fields: dict[str, tuple[int, Value]] | None = None
    size: int = 1  # nodes in this subtree

    @property
    def empty(self) -> bool:
        return self.text is None and self.items is None and self.fields is None

    def describe(self) -> str:
        if self.fields is not None:
            return "a mapping"
        if self.items is not None:
            return "a list"
        return "nothing" if self.text is None else shortened(self.text)

    def line_of(self, path: Path) -> int | None:
        """The line where `path` begins, or of as much of it as is written; None: nothing of it, so it is a default."""
        line, value = None, self
        for step in path:
            if isinstance(step, str) and step in (value.fields or {}):
                line, value = (value.fields or {})[step]
            elif isinstance(step, int) and step < len(value.items or ()):
                value = (value.items or ())[step]
                line = value.line
            else:
                break
        return line


class Reader:
    """Reads one file's tree, gathering `problems`. What it returns is meaningful only while there are none."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[Problem] = []
        self._structs = Structs()

    def problem(self, line: int, path: str, found: str, expected: str, nearest: str | None = None) -> None:
        self.problems.append(
            Problem(file=self.file, line=line, path=path, found=found, expected=expected, nearest=nearest)
        )

    def read(self, value: Value, kind: Any, path: str) -> Any:
        """`value` as `kind`, which is what kinds.py says kinds are."""
        if kind is Any:
            return json_of(value)
        options = options_of(kind)
        if value.empty and types.NoneType in options:
            return None
        for option in options:
            read = self._option(value, option, path)
            if read is not _NO:
                return read
        forms = [form_of(option) for option in options]
        words = [word for form in forms if isinstance(form, Words) for word in form.values]
        secret = value.text is not None and any(isinstance(form, Text) and form.secret for form in forms)
        found = f"{len(value.text or '')} characters that are not" if secret else value.describe()
        self.problem(value.line, path, found, expected(kind), nearest(value.text or "", words))
        return None

    def _option(self, value: Value, kind: Any, path: str) -> Any:
        """`value` as one option, its own problems told; _NO where it is of another kind."""
        if value.text is not None:
            return self._text(value.text, kind)
        if is_struct(kind):
            return _NO if value.items is not None else self._struct(value, kind, path)
        origin, kinds = get_origin(kind), get_args(kind)
        if origin is tuple and value.items is not None:
            return tuple(self.read(item, kinds[0], f"{path}[{index}]") for index, item in enumerate(value.items))
        if origin is Mapping and value.fields is not None:
            return self._mapping(value.fields, kinds[0], kinds[1], path)
        return _NO

    def _text(self, text: str, kind: Any) -> Any:
        if is_struct(kind) and hasattr(kind, "shorthand"):
            options = options_of(self._structs.fields(kind)[kind.shorthand].type)
            read = next((read for option in options if (read := scalar(text, option)) is not None), None)
            return _NO if read is None else kind(**{kind.shorthand: read})
        read = scalar(text, kind)
        return _NO if read is None else read

    def _struct(self, value: Value, kind: Any, path: str) -> Any:
        known = self._structs.fields(kind)
        fields = value.fields or {}
        for name, (line, _) in fields.items():
            if name not in known:
                found = f"unknown field {shortened(name)}"
                self.problem(line, path, found, f"one of {listed(known)}", nearest(name, known))
        read = {}
        for name, field in known.items():
            if name in fields:
                read[field.name] = self.read(fields[name][1], field.type, dotted(path, name))
            elif field.required:
                self.problem(value.line, path, f"no {name}", f"{name}: {expected(field.type)}")
        return None if self.problems else kind(**read)

    def _mapping(self, fields: dict[str, tuple[int, Value]], key: Any, item: Any, path: str) -> Any:
        for name, (line, _) in fields.items():
            if scalar(name, key) is None:
                self.problem(line, path, f"the name {shortened(name)}", expected(key))
        return {name: self.read(entry, item, dotted(path, name)) for name, (_, entry) in fields.items()}


def json_of(value: Value) -> Any:
    """A value as JSON has it: what is written without quotes and is a JSON number, true or false, is that. Numbers that
    nobody can send, beyond 64 bits, stay text."""
    if value.fields is not None:
        return {name: json_of(item) for name, (_, item) in value.fields.items()}
    if value.items is not None:
        return [json_of(item) for item in value.items]
    if value.text is None or value.quoted:
        return value.text
    try:
        read = msgspec.json.decode(value.text)
    except msgspec.DecodeError:
        return value.text
    return value.text if isinstance(read, int) and not -(2**63) <= read < 2**64 else read


def refuse(file: str, root: Value, faults: Iterable[Fault]) -> None:
    """Raises InvalidFile where there is any fault, each told on the line where as much of its path as is written
    begins. `file` is how messages call the file, `root` its tree."""
    reader = Reader(file)
    for fault in faults:
        line = root.line_of(fault.path) or root.line
        reader.problem(line, spelled(fault.path), fault.found, fault.expected, fault.nearest)
    if reader.problems:
        raise InvalidFile(reader.problems)


def plain(value: Any, kind: Any, json: Callable[[Any], Any] = lambda value: value) -> Any:
    """The reverse of reading: dicts, lists, None and text, with numbers in their units. JSON is what `json` makes of
    it."""
    return _plain(value, kind, json, Structs())


def _plain(value: Any, kind: Any, json: Callable[[Any], Any], structs: Structs) -> Any:
    if kind is Any:
        return json(value)
    if value is None:
        return None
    if is_struct(type(value)):
        fields = structs.fields(type(value)).items()
        return {name: _plain(getattr(value, field.name), field.type, json, structs) for name, field in fields}
    if isinstance(value, Mapping):
        return {name: _plain(entry, get_args(kind)[1], json, structs) for name, entry in value.items()}
    if isinstance(value, tuple):
        item = next(get_args(option)[0] for option in options_of(kind) if get_origin(option) is tuple)
        return [_plain(entry, item, json, structs) for entry in value]
    if isinstance(value, bool):
        return "true" if value else "false"
    unit = next((form for form in map(form_of, options_of(kind)) if isinstance(form, Unit)), None)
    return unit.show(value) if unit is not None and isinstance(value, int | float) else str(value)


def shown(struct: msgspec.Struct, name: str) -> str:
    """One scalar field's value as a file has it."""
    kind = next(field.type for field in msgspec.structs.fields(struct) if field.encode_name == name)
    return str(plain(getattr(struct, name), kind))


def spelled(path: Path) -> str:
    """A path as messages say it: `shaping[0].except`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


def dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def shortened(text: str) -> str:
    """Text from a file as a message may show it: quoted, escaped, of bounded length."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def listed(names: Iterable[str]) -> str:
    """Names as a message may show them: as many as LISTED."""
    every = list(names)
    more = f" and {len(every) - LISTED} more" if len(every) > LISTED else ""
    return ", ".join(every[:LISTED]) + more


def nearest(name: str, known: Iterable[object]) -> str | None:
    """The known name a person most probably meant, if any is near."""
    return next(iter(difflib.get_close_matches(name[:60], [str(word) for word in known], n=1, cutoff=0.7)), None)
