"""Fuzzing of every parser: the kept inputs, a thousand or so mutations of them, and long ones."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gateway.core.request.tenants import keys_from
from tests.fuzz.engine import CORPUS, Found, Fuzzer, Lines, check, corpus
from tests.fuzz.targets import TARGETS, Target

STEPS, LONG = 1000, 50  # `make fuzz` goes on for longer
FEWER = {"policy": 10}  # YAML is read in Python: a tenth as many


def test_every_target_has_inputs_and_every_input_a_target() -> None:
    assert {folder.name for folder in CORPUS.iterdir()} == set(TARGETS)
    for name, target in TARGETS.items():
        kept = corpus(name)
        outcomes = set()
        for data in kept:
            try:
                target.read([data])
                outcomes.add("taken")
            except target.errors:
                outcomes.add("refused")
        assert "taken" in outcomes, name


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_whatever_comes_is_read_or_refused_in_time(name: str) -> None:
    fuzzer = Fuzzer(name, seed=1)
    for _ in range(STEPS // FEWER.get(name, 1)):
        fuzzer.step()
    for _ in range(LONG // FEWER.get(name, 1)):
        fuzzer.grow()


def test_the_search_is_guided() -> None:
    fuzzer = Fuzzer("stream", seed=1)
    kept, lines = len(fuzzer.pool), fuzzer.lines
    for _ in range(300):
        fuzzer.step()
    assert len(fuzzer.pool) > kept
    assert fuzzer.lines > lines


# -- the fuzzer itself ------------------------------------------------------------------------------------------------


def _target(read: Any, **more: Any) -> Target:
    return Target(read=read, errors=(KeyError,), words=(b"x",), **more)


def _raise(error: Exception) -> None:
    raise error


def test_another_exception_than_its_own_is_found() -> None:
    check(_target(lambda pieces: _raise(KeyError())), b"x", random.Random(1))
    with pytest.raises(Found, match="ValueError"):
        check(_target(lambda pieces: _raise(ValueError())), b"x", random.Random(1))


def test_a_parser_that_minds_cuts_is_found() -> None:
    with pytest.raises(Found, match="otherwise in pieces"):
        check(_target(len, cut=True), b"xyz", random.Random(1))


def test_more_work_than_in_proportion_is_found() -> None:
    def quadratic(pieces: Any) -> None:
        data = b"".join(pieces)
        for end in range(0, len(data), 8):
            keys_from(b"# x\n" * (end // 4), "k")

    target = _target(quadratic, per_byte=10.0)
    check(target, b"#" * 10, random.Random(1))
    with pytest.raises(Found, match="lines of Python for 4000 bytes"):
        check(target, b"#" * 4000, random.Random(1))


def test_lines_are_counted_and_known() -> None:
    with Lines(1e6) as lines:
        TARGETS["keys"].read([b"# nothing"])
    assert lines.count >= len(lines.seen) > 5
