"""YAML in and out, for every file that an operator writes: a plain tree of text that knows its lines, and back.

Reading is bounded (bytes, depth, nodes after aliases) and refuses tags and duplicate keys. It ends where a bound is
passed. Every value is text here. Its meaning comes from the Structs that checked.py reads the tree into.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, TypeVar, cast

import msgspec
import yaml

from gateway.shared.files.checked import InvalidFile, Mark, Reader, Reading, Value, dotted, plain, shortened

MAX_BYTES = 256 * 1024  # about 3,000 engines
MAX_NODES = 20_000  # after aliases: a file that grows by reference is refused before it is built
MAX_DEPTH = 16
TOO_MANY = (f"more than {MAX_NODES} values, aliases counted in full", "a smaller file")
TOO_DEEP = (f"more than {MAX_DEPTH} levels", "a flatter file")
MERGE = "<<"  # YAML 1.1's key for fields that another mapping has
WIDTH = 120  # columns of what is explained

T = TypeVar("T")

_BARE = re.compile(r"-?[A-Za-z0-9][A-Za-z0-9_./%-]*", re.ASCII)
_ESCAPED = {'"': '\\"', "\\": "\\\\"}
_SURROGATE = re.compile(r"[\ud800-\udfff]")  # an escape can make one; no encoder takes it
# What to do about errors of the parser that do not tell it.
_REMEDIES = (
    ("'\\t' that cannot start", "; indent with spaces"),
    ("that cannot start", "; text that begins so needs quotes"),
    ("a block scalar", "; text that begins with > or | needs quotes"),
    ("undefined alias", "; its anchor goes before it, and text that begins with * needs quotes"),
    ("an alias", "; text that begins with * needs quotes"),
)


def read_file(data: bytes, name: str, kind: type[T]) -> Reading[T]:
    """Read a file as a Struct of a kind, as far as possible. `name`: the name of the file in messages. Raises
    InvalidFile if the file is no YAML."""
    reader = Reader(name)
    root = _read_tree(data, reader)
    return Reading(reader.read(root, kind, ""), root, reader)


def _read_tree(data: bytes, reader: Reader) -> Value:
    """The file as a plain tree; duplicate keys are gathered in `reader`. Raises InvalidFile where the reading ended."""
    if len(data) > MAX_BYTES:
        reader.problem(Mark(1), "", f"{len(data)} bytes", f"at most {MAX_BYTES} bytes")
        raise InvalidFile(reader.problems)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        reader.problem(Mark(line), "", f"the byte 0x{data[error.start]:02x}", "UTF-8 text")
        raise InvalidFile(reader.problems) from None
    try:
        root = yaml.compose(text, _Loader)
        return Value(mark=Mark(1)) if root is None else _Tree(reader).value(root, "", 1)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        reader.problem(Mark(line), "", f"the character {chr(error.character)!r}", "printable text")
    except yaml.MarkedYAMLError as error:
        # Every error of the parser carries a mark; what it was in the middle of may have begun lines before.
        mark, began = cast(yaml.Mark, error.problem_mark), error.context_mark
        context = f", {error.context} from line {began.line + 1}" if began else ""
        found = f"a YAML error ({error.problem}{context})"
        expected = "valid YAML" + next((remedy for words, remedy in _REMEDIES if words in found), "")
        if error.note is not None:  # a bound of _Loader
            found, expected = str(error.problem), error.note
        reader.problem(Mark(mark.line + 1, mark.column + 1), "", found, expected)
    raise InvalidFile(reader.problems)


def _at(node: yaml.Node) -> Mark:
    start, end = node.start_mark, node.end_mark
    width = end.column - start.column if end.line == start.line else 0
    return Mark(start.line + 1, start.column + 1, width)


class _Loader(yaml.BaseLoader):
    """Composer of nodes within MAX_NODES and MAX_DEPTH; it gives no text a meaning.

    A node's tag is the one that is written at it, else None. An anchor may be set again, as YAML has it.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._nodes = 0
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # the stubs say nothing of events
        self._nodes += parent is None or index is not None  # a key is no value
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._stop(event, *TOO_DEEP)
        if self._nodes > MAX_NODES:
            self._stop(event, *TOO_MANY)
        alias = isinstance(event, yaml.AliasEvent)
        if not alias:
            self.anchors.pop(event.anchor, None)
        node: Any = super().compose_node(parent, index)
        if not alias:
            node.tag = event.tag
        self._depth -= 1
        return cast(yaml.Node, node)

    def _stop(self, event: Any, found: str, expected: str) -> NoReturn:
        raise yaml.MarkedYAMLError(problem=found, problem_mark=event.start_mark, note=expected)


class _Tree:
    """Builds Values of YAML nodes. A node that aliases name is built, and counted, for each of them."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._nodes = 0

    def value(self, node: yaml.Node, path: str, depth: int) -> Value:
        self._nodes += 1
        self._untagged(node, path)
        if depth > MAX_DEPTH:
            self._stop(node, path, *TOO_DEEP)
        if self._nodes > MAX_NODES:
            self._stop(node, path, *TOO_MANY)
        if isinstance(node, yaml.ScalarNode):
            null = node.style is None and node.value in {"", "~", "null"}
            text = None if null else self._text(node, path)
            return Value(mark=_at(node), text=text, quoted=node.style is not None)
        if isinstance(node, yaml.SequenceNode):
            items = [self.value(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(node.value)]
            return Value(mark=_at(node), items=tuple(items))
        return Value(mark=_at(node), fields=self._fields(node, path, depth))

    def _stop(self, node: yaml.Node, path: str, found: str, expected: str) -> NoReturn:
        self._reader.problem(_at(node), path, found, expected)
        raise InvalidFile(self._reader.problems)

    def _untagged(self, node: yaml.Node, path: str) -> None:
        if node.tag is not None:
            self._stop(node, path, f"the tag {shortened(node.tag)}", "no tags: a field's name says what it is")

    def _text(self, node: yaml.ScalarNode, path: str) -> str:
        half = _SURROGATE.search(node.value)
        if half:
            self._stop(node, path, f"the character {half[0]!r}", "printable text")
        return str(node.value)

    def _fields(self, node: yaml.Node, path: str, depth: int) -> dict[str, tuple[Mark, Value]]:
        fields: dict[str, tuple[Mark, Value]] = {}
        merged: list[Value] = []
        for key, of_key in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._stop(key, path, "a key that is not a word", "a field's name")
            self._untagged(key, path)
            here, mark = dotted(path, self._text(key, path)), _at(key)
            value = self.value(of_key, here, depth + 1)
            if key.value == MERGE and key.style is None:
                merged += self._merged(mark, value, here)
            elif key.value in fields:
                found = f"{shortened(key.value)} a second time (first on line {fields[key.value][0].line})"
                self._reader.problem(mark, here, found, "each field once")
            else:
                fields[key.value] = (mark, value)
        for value in merged:  # the mapping's own fields win, then those of the first that it merges
            for name, field in (value.fields or {}).items():
                fields.setdefault(name, field)
        return fields

    def _merged(self, mark: Mark, value: Value, path: str) -> tuple[Value, ...]:
        """The mappings of a merge key, which has one or a list of them."""
        values = (value,) if value.items is None else value.items
        if any(each.fields is None for each in values):
            self._reader.problem(mark, path, "a merge of what is no mapping", "an alias of a mapping, or a list")
            return ()
        return values


# -- a plain tree to YAML ---------------------------------------------------------------------------------------------


def written(value: Any, kind: Any, *, beside: Any = None) -> str:
    """A value of a kind as YAML, lines of at most WIDTH where that can be; it reads to an equal value. Every default is
    written out, unless `beside` has the defaults: then only what differs from it."""
    tree = plain(value, kind, _json)
    if beside is not None:
        tree = _without(tree, plain(beside, kind, _json))
    return "\n".join(_block(tree, "")) + "\n"


def _without(tree: Any, other: Any) -> Any:
    """The fields of a tree that another does not have alike."""
    if not isinstance(tree, dict) or not isinstance(other, dict):
        return tree
    return {name: _without(each, other.get(name)) for name, each in tree.items() if each != other.get(name, ...)}


def _block(tree: Mapping[str, Any], pad: str) -> Iterator[str]:
    for name, value in tree.items():
        line = f"{pad}{flow(name)}: {flow(value)}"
        if value and isinstance(value, dict) and (not pad or len(line) > WIDTH):
            yield f"{pad}{flow(name)}:"
            yield from _block(value, pad + "  ")
        elif isinstance(value, list) and len(line) > WIDTH:
            yield f"{pad}{flow(name)}:"
            for item in value:
                yield from _item(item, pad)
        else:
            yield line


def _item(item: Any, pad: str) -> Iterator[str]:
    """Yield the lines of one list item; a mapping that is too long for a line has one for each field."""
    line = f"{pad}  - {flow(item)}"
    if len(line) > WIDTH and isinstance(item, dict):
        first, *rest = _block(item, pad + "    ")
        yield from (f"{pad}  - {first.lstrip()}", *rest)
    else:
        yield line


class _Quoted(msgspec.Struct, frozen=True):
    """Text that is text, whatever it looks like."""

    text: str


def _json(value: Any) -> Any:
    """JSON as `flow` writes it: its text in quotes, its numbers, true and false without."""
    if isinstance(value, dict):
        return {name: _json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_json(item) for item in value]
    if isinstance(value, str):
        return _Quoted(value)
    return None if value is None else msgspec.json.encode(value).decode()


def flow(tree: Any) -> str:
    """Return a plain tree as YAML on one line."""
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{flow(name)}: {flow(value)}" for name, value in tree.items()) + "}"
    if isinstance(tree, list):
        return "[" + ", ".join(map(flow, tree)) + "]"
    if tree is None:
        return "null"
    if isinstance(tree, str) and _BARE.fullmatch(tree) and tree != "null":
        return tree
    text = tree.text if isinstance(tree, _Quoted) else tree
    return '"' + "".join(_ESCAPED.get(c) or (c if c.isprintable() else f"\\U{ord(c):08x}") for c in text) + '"'
