"""Token usage of answers that are not streamed: the answer's own, at any place, and never an echo of the request."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from gateway.core.answer import json_usage
from gateway.core.answer.json_usage import BLOCK, MAX_USAGE, PASSES, JSONUsage

USAGE = {"prompt_tokens": 12, "completion_tokens": 7, "total_tokens": 19}
CHAT = {"choices": [{"message": {"content": 'a "usage": {"prompt_tokens": 99}'}}], "usage": USAGE, "more": [{}]}
LONG = "x" * BLOCK
ECHO = {"tools": [{"properties": {"usage": {"prompt_tokens": 0, "completion_tokens": 0}}}]}
NONE = (None, None, None)


def numbers(reader: JSONUsage) -> tuple[int | None, int | None, int | None]:
    return reader.prompt_tokens, reader.completion_tokens, reader.cached_tokens


def read(*parts: bytes) -> tuple[int | None, int | None, int | None]:
    reader = JSONUsage()
    for part in parts:
        assert reader.feed(part) is part
    assert reader.finish() == b""
    assert not reader._held
    return numbers(reader)


def whole(data: bytes) -> tuple[int | None, int | None, int | None]:
    reader = JSONUsage()
    reader.whole(data)
    return numbers(reader)


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (USAGE, (12, 7, None)),
        ({"prompt_tokens": 12, "total_tokens": 12}, (12, None, None)),
        ({"total_tokens": 12}, (12, None, None)),
        ({"total_tokens": 12, "completion_tokens": 2}, (10, 2, None)),
        ({**USAGE, "prompt_tokens_details": {"cached_tokens": 4}}, (12, 7, 4)),
        ({**USAGE, "prompt_tokens_details": None, "completion_tokens_details": {"x": {}}}, (12, 7, None)),
        ({"input_tokens": 12, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 4}}, (12, 7, 4)),
        ({"output_tokens": 7, "cache_read_input_tokens": 5}, (None, 7, None)),
        ({"input_tokens": 5, "output_tokens": 2, "cache_read_input_tokens": 30, "cache_creation_input_tokens": 4},
         (39, 2, 30)),
        ({"type": "duration", "seconds": 5}, NONE),
        ({"prompt_tokens": -5}, NONE),
        ({"prompt_tokens": 2**41}, NONE),
        ({"prompt_tokens": "12"}, NONE),
        ({}, NONE),
        (None, NONE),
        ("usage", NONE),
    ],
)  # fmt: skip
def test_usage_of_an_answer(usage: Any, expected: tuple[int | None, int | None, int | None]) -> None:
    data = json.dumps({**CHAT, "usage": usage}).encode()
    assert whole(data) == expected
    assert read(*pieces(data, 1)) == expected
    for long in ({"id": LONG, **CHAT, "usage": usage}, {**CHAT, "usage": usage, "text": LONG}):
        data = json.dumps(long).encode()
        assert whole(data) == expected
        assert read(*pieces(data, 1000)) == expected


def test_an_echo_is_never_the_usage_of_the_answer() -> None:
    """vLLM repeats the client's tools and schema before and behind its own usage."""
    for filler in ("", LONG):
        for answer in (
            {"text": ECHO, "filler": filler, "usage": USAGE, "input_messages": ECHO, "more": filler},
            {"usage": USAGE, "input_messages": [filler, ECHO, filler]},
            {"tools": [ECHO, filler, '"usage":{"prompt_tokens":1}', ECHO], "usage": USAGE},
            {"a": '\\"usage":{', filler: "usage", "usage": USAGE},
        ):
            data = json.dumps(answer).encode()
            assert whole(data) == (12, 7, None)
            assert read(data) == (12, 7, None)
            assert read(*pieces(data, 100)) == (12, 7, None)
        alone = json.dumps({"tools": ECHO, "filler": filler, "usage": None, "more": filler}).encode()
        assert read(alone) == NONE


def test_it_is_found_wherever_the_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_usage, "BLOCK", 1)
    answer = {"a\\": 'x"\\', "e": ECHO, "u": ["usage"], "usag": [[{}]], "usage": {**USAGE, "x": "}\\"}, "z": "\\\\"}
    for data in (json.dumps(answer).encode(), json.dumps(answer, indent=1).replace(":", " :").encode()):
        assert read(*pieces(data, 1)) == (12, 7, None)
        for cut in range(len(data)):
            assert read(data[:cut], data[cut:]) == (12, 7, None)


def made(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(6 if depth else 3)
    if kind < 3:
        return rng.choice(["usage", 'u"s\\', "}{", 1.5, None, "", 7])
    if kind == 3:
        return [made(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(["usage", "a", 'b"', "c\\", "usag"]): made(rng, depth - 1) for _ in range(rng.randrange(4))}


def test_blocks_of_any_size_agree_with_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(7)
    for _ in range(400):
        answer = {str(number): made(rng, 5) for number in range(rng.randrange(4))}
        answer["usage"] = USAGE
        answer |= {"z" + str(number): made(rng, 5) for number in range(rng.randrange(3))}
        data = json.dumps(answer).encode()
        monkeypatch.setattr(json_usage, "BLOCK", rng.choice([1, 3, 17, 60, 200]))
        assert read(*pieces(data, rng.choice([1, 2, 11, 50]))) == whole(data) == (12, 7, None)


@pytest.mark.parametrize(
    "data",
    [
        b'{"usage":{"x":' + b"[" * 1500 + b"]" * 1500 + b"}}",
        b'{"usage":{"prompt_tokens":12',
        b'{"usage":{"prompt_tokens":12}, \xff',
        b"\xff\xfe not JSON",
        b'[{"usage":{"prompt_tokens":12}}]',
        b'["usage",{"prompt_tokens":12}]',
        b'"usage"',
        b"}]",
        b"",
    ],
)
def test_what_cannot_be_read_has_told_nothing(data: bytes) -> None:
    assert read(data) == NONE
    assert read(*pieces(data + b" " * BLOCK, 999)) == NONE or data.startswith(b'{"usage"')


@pytest.mark.parametrize("size", [0, BLOCK])
@pytest.mark.parametrize("data", [b'{"a":[1,2],"b":"x}"}', b'{"usage":{"prompt_tokens":1},"b":[[1]]}'])
def test_an_answer_is_cut_at_any_byte_but_its_last(data: bytes, size: int) -> None:
    data = b'{"x":"' + b"}" * size + b'",' + data[1:]
    usage_read = data.find(b"}", data.find(b'"usage"')) + 1 if size and b'"usage"' in data else len(data)
    for end in range(size + 1, len(data) + 1):
        usage = JSONUsage()
        usage.feed(data[:end])
        usage.finish()
        assert usage.cut == (end < usage_read), data[:end][-20:]


@pytest.mark.parametrize("data", [b"\xff\xfe not JSON", b'{"a":NaN}', b'{"usage":7}', b"NaN"])
def test_what_is_no_json_is_not_cut(data: bytes) -> None:
    usage = JSONUsage()
    usage.whole(data)
    assert not usage.cut


def test_a_long_answer_is_given_up_where_its_usage_cannot_be_read() -> None:
    for usage in (b'{"prompt_tokens": "12"}', b'{"x": ' + b"1" * MAX_USAGE):
        assert read(*pieces(b'{"usage": ' + usage + b" " * BLOCK + b'}, "usage": {"prompt_tokens": 1}}', 999)) == NONE


def test_memory_is_bounded() -> None:
    for piece in (
        b'{"usage": {"prompt_tokens": 5, "x": "' + b"y" * 1000,
        b'"usage"',
        b'{"usage":',
        b"\\",
        b'\\"',
        b"[",
    ):
        reader = JSONUsage()
        for _ in range(4 * BLOCK // len(piece)):
            reader.feed(piece)
            assert len(reader._held) <= BLOCK + len(piece)


class Counted:
    """Bytes that are looked at, by every operation on a block."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = self.tokens = 0
        below, tokens = JSONUsage._stays_below, json_usage._TOKEN
        counted = self

        def stays_below(reader: JSONUsage, plain: bytes) -> bool:
            counted.bytes += len(plain)
            return below(reader, plain)

        class Tokens:
            @staticmethod
            def finditer(plain: bytes, start: int) -> Any:
                counted.bytes += len(plain)
                for token in tokens.finditer(plain, start):
                    counted.tokens += 1
                    yield token

        monkeypatch.setattr(JSONUsage, "_stays_below", stays_below)
        monkeypatch.setattr(json_usage, "_TOKEN", Tokens)


def test_every_byte_is_looked_at_twice_at_most_and_an_echo_is_only_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema of the client's own that holds thousands of usages, some of them 55 deep."""
    deep: Any = {str(number): {} for number in range(50)}
    for _ in range(55):
        deep = {"usage": deep}
    answer = {"tools": [deep] * 1500, "usage": USAGE}
    data = json.dumps(answer).encode()
    counted = Counted(monkeypatch)
    assert read(*pieces(data, 16 * 1024)) == (12, 7, None)
    assert len(data) > 1_000_000
    assert counted.bytes <= 2 * len(data)
    assert counted.tokens <= 2 * BLOCK  # of the first block and the last


def test_what_opens_and_closes_more_levels_than_are_counted_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = b"[" * (PASSES + 1) + b"]" * (PASSES + 1)
    data = b'{"a":[' + b"[" * BLOCK + b"]" * BLOCK + deep + b'],"usage":{"prompt_tokens":12,"completion_tokens":7}}'
    counted = Counted(monkeypatch)
    assert read(*pieces(data, 4096)) == (12, 7, None)
    assert counted.bytes <= 2 * len(data) + BLOCK
