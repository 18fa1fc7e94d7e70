"""Checked reading: a plain tree of text becomes a tree of frozen Structs, and every mistake tells its place.

The Struct's annotations are the only description of the format. Unknown fields, wrong kinds and values out of bounds
follow from them. One reading finds all problems of a file, since an operator wants to mend them in one edit. A field
that cannot be read is UNREAD in the tree of Structs; a rule over several fields ends silently where it touches one. A
scalar is text until a field gives it a meaning, so `on`, `no` and `0x10` mean nothing by themselves.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, NoReturn, TypeVar, get_args, get_origin

import msgspec

from gateway.shared.files.kinds import Structs, Text, Words, expected, form_of, is_struct, meant, options_of, scalar
from gateway.shared.files.units import Unit

Path = tuple[str | int, ...]  # fields by name, entries of lists by number
LISTED = 40  # names in one message
_NO = object()  # not what was asked for; None is a value
T = TypeVar("T")


class Unread(Exception):
    """A rule needed a value that could not be read."""


class _Unread:
    """Placeholder for a value that could not be read. Any use of it raises Unread."""

    __slots__ = ()

    def _raise(self, *_: Any) -> NoReturn:
        raise Unread

    __getattr__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __iter__ = __len__ = _raise
    __contains__ = __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _raise
    __truediv__ = __rtruediv__ = __int__ = __float__ = __index__ = __str__ = __repr__ = __format__ = _raise
    __hash__ = _raise


UNREAD: Any = _Unread()


def readable(*parts: Iterable[T]) -> Iterator[T]:
    """Yield the items of each part, up to the first that needs a value that could not be read."""
    for part in parts:
        try:
            yield from part
        except Unread:
            continue


def needed(*values: object) -> None:
    """Raises Unread where one of the values could not be read; for functions that would not."""
    if any(value is UNREAD for value in values):
        raise Unread


class Mark(msgspec.Struct, frozen=True):
    """Position in a file. `line` and `column` count from 1, 0: not known; `width` in columns."""

    line: int = 0
    column: int = 0
    width: int = 0


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Mistake in a file, or advice on the file (`warning`). `path` is dotted (`classes.batch.weight`), empty for the
    whole file. `found`: the whole sentence where nothing else was `expected`. `secret`: the text at that position may
    be a secret, and must not be shown."""

    file: str
    at: Mark = Mark()
    path: str = ""
    found: str
    expected: str = ""
    nearest: str | None = None
    secret: bool = False
    warning: bool = False

    @property
    def message(self) -> str:
        """The mistake, without where it is."""
        hint = f" (did you mean {self.nearest}?)" if self.nearest else ""
        return f"found {self.found}, expected {self.expected}{hint}" if self.expected else self.found

    def __str__(self) -> str:
        place = f"{self.file}:{self.at.line}: " if self.at.line else f"{self.file}: "
        return place + (f"{self.path}: " if self.path else "") + self.message


class InvalidFile(Exception):
    """A file that cannot be used: every problem found in it, in the order of its lines."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = sorted(problems, key=lambda problem: (problem.at.line, problem.at.column))
        super().__init__("\n".join(map(str, self.problems)))


class Fault(msgspec.Struct, frozen=True):
    """Fault of a tree of Structs that no single field shows: its path, and what would be right."""

    path: Path
    found: str
    expected: str
    nearest: str | None = None


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the plain tree. `fields` maps a key to its place and value. All None: null, or nothing written."""

    mark: Mark
    text: str | None = None
    quoted: bool = False
    items: tuple[Value, ...] | None = None
    fields: dict[str, tuple[Mark, Value]] | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing is written there."""
        return self.text is None and self.items is None and self.fields is None

    def describe(self) -> str:
        """The value in words, for a message."""
        if self.fields is not None:
            return "a mapping"
        if self.items is not None:
            return "a list"
        return "nothing" if self.text is None else shortened(self.text)

    def mark_of(self, path: Path) -> Mark | None:
        """Position where `path` begins, or as much of it as is written; None if nothing of it is written (a
        default)."""
        mark, value = None, self
        for step in path:
            if isinstance(step, str) and step in (value.fields or {}):
                mark, value = (value.fields or {})[step]
            elif isinstance(step, int) and step < len(value.items or ()):
                value = (value.items or ())[step]
                mark = value.mark
            else:
                break
        return mark


class Reader:
    """Reader of one file's tree, gathering `problems`. A value that could not be read is UNREAD in the result."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[Problem] = []
        self.structs = Structs()

    def problem(
        self, at: Mark, path: str, found: str, expected: str, nearest: str | None = None, *, secret: bool = False
    ) -> None:
        """Note a mistake at a place: the text that was found and the text that was expected."""
        self.problems.append(
            Problem(file=self.file, at=at, path=path, found=found, expected=expected, nearest=nearest, secret=secret)
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
        text = value.text or ""
        secret = value.text is not None and any(isinstance(form, Text) and form.secret for form in forms)
        found = f"{len(text)} characters that are not" if secret else value.describe()
        wanted = expected(kind) + ("; variables are not replaced by their values" if text.startswith("$") else "")
        self.problem(value.mark, path, found, wanted, nearest(text, words) or meant(text, kind), secret=secret)
        return UNREAD

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
        short = getattr(kind, "shorthand", None) if is_struct(kind) else None
        options = (kind,) if short is None else options_of(self.structs.fields(kind)[short].type)
        read = next((read for option in options if (read := scalar(text, option)) is not None), None)
        if read is None:
            return _NO
        return read if short is None else kind(**{short: read})

    def _struct(self, value: Value, kind: Any, path: str) -> Any:
        known = self.structs.fields(kind)
        fields = value.fields or {}
        misspelled = set()  # what is probably there, under another name: it is not at its default
        for name, (mark, _) in fields.items():
            if name not in known:
                near = nearest(name, known)
                misspelled.add(near)
                self.problem(mark, path, f"unknown field {shortened(name)}", f"one of {listed(known)}", near)
        read = {}
        for name, field in known.items():
            if name in fields:
                read[field.name] = self.read(fields[name][1], field.type, dotted(path, name))
            elif name in misspelled:
                read[field.name] = UNREAD
            elif field.required:
                self.problem(value.mark, path, f"no {name}", f"{name}: {expected(field.type)}")
                read[field.name] = UNREAD
        return kind(**read)

    def _mapping(self, fields: dict[str, tuple[Mark, Value]], key: Any, item: Any, path: str) -> Any:
        for name, (mark, _) in fields.items():
            if scalar(name, key) is None:
                self.problem(mark, path, f"the name {shortened(name)}", expected(key))
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


class Reading(Generic[T]):
    """Result of reading a file: its `value`, which may hold UNREAD parts, its tree, and its problems."""

    def __init__(self, value: T, root: Value, reader: Reader) -> None:
        self.value = value
        self.root = root
        self.structs = reader.structs
        self._reader = reader

    @property
    def problems(self) -> list[Problem]:
        """All mistakes found so far, in the order of reading."""
        return self._reader.problems

    def judge(self, faults: Iterable[Fault]) -> None:
        """Add what rules over several fields find: each where as much of its path as is written begins."""
        for fault in readable(faults):
            mark = self.root.mark_of(fault.path) or self.root.mark
            self._reader.problem(mark, spelled(fault.path), fault.found, fault.expected, fault.nearest)

    def good(self) -> T:
        """The value. Raises InvalidFile where there is any problem."""
        if self.problems:
            raise InvalidFile(self.problems)
        return self.value


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
    """Text of one scalar field's value, as a file has it."""
    return str(plain(getattr(struct, name), Structs().fields(type(struct))[name].type))


def spelled(path: Path) -> str:
    """A path as messages say it: `shaping[0].except`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


def dotted(path: str, name: str) -> str:
    """The path of a field below another; the path is empty at the top."""
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
