"""Tokenizer stand-in: counts, and answers that are the same everywhere."""

from __future__ import annotations

import statistics
import subprocess
import sys

import pytest

from loadtest.engine import tokens


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", 0), ("a", 1), ("four", 1), ("hello there", 3), ("中文", 3), ("中文字", 5), ("é", 1), ("🙂", 3)],
)
def test_count(text: str, expected: int) -> None:
    assert tokens.count(tokens.units(text)) == expected


def test_a_message_costs_its_header_and_the_answer_one_more() -> None:
    assert tokens.count(tokens.chat([{"role": "user", "content": "four"}])) == 4 + 1 + 4
    parts = [{"type": "text", "text": "four"}, {"type": "image_url", "image_url": {"url": "data:..."}}]
    assert tokens.count(tokens.chat([{"role": "user", "content": parts}])) == 4 + 1 + tokens.MEDIA_TOKENS + 4


def test_the_next_turn_goes_on_where_the_answer_ended() -> None:
    asked = [{"role": "user", "content": "what is it? " * 10}]
    data = tokens.chat(asked)
    said = b"".join(tokens.words(data, 0, 40))
    turn = tokens.chat([*asked, {"role": "assistant", "content": said.decode()}, {"role": "user", "content": "more"}])
    before, after = tokens.block_hashes(data + said, "m"), tokens.block_hashes(turn, "m")
    assert len(before) > 3
    assert after[: len(before)] == before


def test_hashes_are_chained_and_salted() -> None:
    one, two = (
        tokens.block_hashes(b"a" * 128 + b"b" * 64, "m"),
        tokens.block_hashes(b"c" * 64 + b"a" * 64 + b"b" * 64, "m"),
    )
    assert len(one) == 3
    assert not set(one) & set(two)
    assert not set(one) & set(tokens.block_hashes(b"a" * 128 + b"b" * 64, "n"))


@pytest.mark.parametrize(
    ("most", "least", "ignore", "expected"),
    [
        (10_000, 0, False, (21, "stop")),
        (5, 0, False, (5, "length")),
        (500, 0, True, (500, "length")),
        (500, 30, False, (31, "stop")),
    ],
)
def test_output_length(most: int, least: int, ignore: bool, expected: tuple[int, str]) -> None:
    data = next(data for data in (b"%04d" % number for number in range(10_000)) if tokens.natural_length(data, 0) == 21)
    assert tokens.output_length(data, 0, most, least=least, ignore_end=ignore) == expected


def test_natural_lengths_are_those_of_conversations() -> None:
    lengths = [tokens.natural_length(b"%08d" % number, 0) for number in range(4000)]
    assert 110 < statistics.median(lengths) < 150
    assert 1 <= min(lengths) < 20
    assert 1000 < max(lengths) <= tokens.MOST_OUTPUT


def test_words_are_plain_tokens() -> None:
    assert len(tokens.WORDS) == len(set(tokens.WORDS)) == 256
    assert {len(word) for word in tokens.WORDS} == {tokens.BYTES}
    assert tokens.words(b"x", 0, 50) != tokens.words(b"x", 1, 50)


def test_another_process_says_the_same() -> None:
    code = "from loadtest.engine import tokens; print(tokens.words(b'x', 0, 20), tokens.natural_length(b'x', 0))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.strip() == f"{tokens.words(b'x', 0, 20)} {tokens.natural_length(b'x', 0)}"
