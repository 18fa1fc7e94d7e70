"""Structs whose fields come from other objects by the same names, so that none is copied by hand."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)


def made_of(kind: type[T], source: object, /, **more: Any) -> T:
    """Make a Struct: its fields are `more`, the source's attributes of their names, and defaults, in this order.
    Raises TypeError for a field that has none of these."""
    for name in kind.__struct_fields__:
        if name not in more and hasattr(source, name):
            more[name] = getattr(source, name)
    return kind(**more)
