"""Shipped policies: no faults, no warnings, and working commands in their first lines."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from gateway.cli import parser_for
from gateway.core.policy.advice import advise
from gateway.core.policy.file import decode, explain, read_policy

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "policies").glob("*.yaml"))
NAMES = [
    "batch-night",
    "default",
    "demo",
    "embeddings",
    "interactive-first",
    "multi-tenant",
    "one-engine",
    "one-machine",
    "starter",
]

each = pytest.mark.parametrize("file", SHIPPED, ids=[file.stem for file in SHIPPED])


def test_what_is_shipped() -> None:
    assert [file.stem for file in SHIPPED] == NAMES


@each
def test_it_is_good_and_nothing_in_it_is_unwise(file: Path) -> None:
    reading = read_policy(file.read_bytes(), file.name)
    policy = reading.good()
    assert list(advise(policy)) == []
    assert decode(explain(policy).encode()) == policy


@each
def test_its_first_lines_say_what_it_is_for_and_how_to_try_it(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    head = file.read_text().split("\nversion: 1")[0]
    assert len(head.splitlines()) >= 5
    commands = re.findall(r"\b(gateway (?:serve|check|key) [^`\n]+)", head)
    assert any(f"gateway serve --policy policies/{file.name} --engine sim" in command for command in commands)
    for command in commands:
        words = shlex.split(re.split(r"\s{2,}#|\s{3,}", command)[0])[1:]
        if "FILE" in words:
            continue
        given = parser_for(words).parse_args(words)
        if words[0] == "check":
            assert given.module.command(given) == 0
            assert capsys.readouterr().out.startswith("version: 1\n")


@each
def test_its_lines_are_short_enough_to_read(file: Path) -> None:
    assert max(map(len, file.read_text().splitlines())) <= 120
