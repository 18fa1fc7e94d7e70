"""Shared parts of tests of operators' files: a faulty file's problems, and the Structs that describe a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, get_args, get_origin

import msgspec
import pytest

from gateway.shared.files.checked import InvalidFile
from gateway.shared.files.kinds import is_struct, options_of


def problems_of(decode: Callable[[bytes, str], object], data: str | bytes, name: str) -> list[str]:
    """What `decode` finds wrong with a file of this name: one line for each problem."""
    with pytest.raises(InvalidFile) as caught:
        decode(data.encode() if isinstance(data, str) else data, name)
    problems = list(map(str, caught.value.problems))
    assert str(caught.value) == "\n".join(problems)
    return problems


def structs_of(kind: Any) -> set[type[msgspec.Struct]]:
    """Every Struct that is a mapping somewhere in a kind."""
    found = set()
    for option in options_of(kind):
        if is_struct(option):
            found |= {option}.union(*(structs_of(field.type) for field in msgspec.structs.fields(option)))
        elif get_origin(option) in (tuple, Mapping):
            found = found.union(*(structs_of(item) for item in get_args(option)))
    return found
