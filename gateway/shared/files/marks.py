"""Marks on kinds of fields, such as that a text is the name of something which another part of the file defines.

A mark is metadata of a kind. One rule over all values with a mark serves every field of that kind, also new ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, get_args, get_origin

from gateway.shared.files.checked import UNREAD, Path
from gateway.shared.files.kinds import Structs, is_struct, options_of

M = TypeVar("M")


def marked(tree: Any, mark: type[M], structs: Structs | None = None) -> Iterator[tuple[Path, Any, M]]:
    """Yield each value in a tree of Structs whose kind has a mark of this class: its path, the value and the mark.
    Values that could not be read are left out. `structs`: those of whoever read the tree."""
    yield from _marked(tree, None, mark, (), Structs() if structs is None else structs)


def _marked(value: Any, kind: Any, mark: type[M], path: Path, structs: Structs) -> Iterator[tuple[Path, Any, M]]:
    if value is UNREAD:
        return
    if is_struct(type(value)):
        for name, field in structs.fields(type(value)).items():
            yield from _marked(getattr(value, field.name), field.type, mark, (*path, name), structs)
        return
    for option in options_of(kind):
        origin, inner = get_origin(option), get_args(option)
        if origin is Mapping and isinstance(value, Mapping):
            for key, item in value.items():
                yield from _marked(key, inner[0], mark, (*path, key), structs)
                yield from _marked(item, inner[1], mark, (*path, key), structs)
        elif origin is tuple and isinstance(value, tuple):
            for index, item in enumerate(value):
                yield from _marked(item, inner[0], mark, (*path, index), structs)
        elif isinstance(value, str):
            yield from ((path, value, each) for each in getattr(option, "__metadata__", ()) if isinstance(each, mark))
