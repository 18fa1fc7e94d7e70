"""The simulation watches by events: it reads and replaces nothing that is private to another object."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.lab import dst

FILES = sorted(Path(dst.__file__).parent.rglob("*.py"))


def trespasses(source: str) -> Iterator[str]:
    """Private attributes of other objects, and attributes set where a class does not define them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            if not (isinstance(node.value, ast.Name) and node.value.id == "self"):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"vars", "setattr", "object.__setattr__"}:
            yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value).startswith("gateway"):
                    yield f"line {node.lineno}: {ast.unparse(target)} is set from outside"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nothing_private_is_touched(file: Path) -> None:
    assert list(trespasses(file.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "left = dispatch._turns",
        "self._dispatch._arm()",
        "vars(queues)['pop'] = self.pop",
        "setattr(queues, 'pop', self.pop)",
        "gateway.log = self",
        "gateway.attempts.retries = budget",
    ],
)
def test_a_trespass_is_found(source: str) -> None:
    assert list(trespasses(source))
