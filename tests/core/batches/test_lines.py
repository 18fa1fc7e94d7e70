"""Lines of a batch's file: found wherever the file is cut, and judged before any is sent."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import pytest

from gateway.core.batches.lines import ENDPOINTS, FAULTS_TOLD, Judged, read_line

CHAT = "/v1/chat/completions"


def line(id: str = "a", **fields: object) -> bytes:
    whole = {"custom_id": id, "method": "POST", "url": CHAT, "body": {"model": "m", "messages": []}} | fields
    return json.dumps(whole).encode()


def judged(data: bytes, *, cut: Iterator[int] | None = None, longest: int = 1000, most: int = 100_000) -> Judged:
    made = Judged(CHAT, longest, most)
    while data:
        size = len(data) if cut is None else next(cut)
        made.feed(data[:size])
        data = data[size:]
    made.end()
    return made


def test_lines_are_the_same_wherever_the_file_is_cut() -> None:
    rng = random.Random(1)
    texts = [line(f"id {number} é") + b" " * rng.randrange(5) for number in range(50)]
    data = b"\r\n".join(texts[:25]) + b"\n\n \n" + b"\n".join(texts[25:])  # the last has no line feed
    whole = list(judged(data).taken())
    assert [found.custom_id for found in whole] == [f"id {number} é" for number in range(50)]
    for found, text in zip(whole, texts, strict=True):
        kept = data[found.offset : found.offset + found.length]
        assert kept.strip() == text.strip()
        read = read_line(kept)
        assert read is not None
        assert json.loads(read[0])["model"] == read[1]
        assert json.loads(kept)["custom_id"] == found.custom_id
    assert [found.number for found in whole[24:26]] == [25, 28]  # empty lines count as lines, and are no requests
    for most in (1, 7, 300):
        pieces = iter(lambda most=most: rng.randrange(1, most + 1), 0)  # type: ignore[misc]
        assert list(judged(data, cut=pieces).taken()) == whole


@pytest.mark.parametrize(
    ("bad", "code", "param", "said"),
    [
        (b"{", "invalid_json_line", None, "not parseable"),
        (b'{"custom_id": "\xff"}', "invalid_json_line", None, "UTF-8"),
        (b"[]", "invalid_request", None, "object"),
        (b"{}", "invalid_request", "custom_id", "custom_id"),
        (line(id=""), "invalid_request", "custom_id", "length"),
        (line(id="x" * 513), "invalid_request", "custom_id", "512"),
        (line(method="GET"), "invalid_method", "method", "GET"),
        (line(url="/v1/embeddings"), "mismatched_endpoint", "url", CHAT),
        (line(body=[]), "invalid_request", "body", "object"),
        (line(body={}), "invalid_request", "body", "model"),
        (line(body={"model": 7}), "invalid_request", "body", "model"),
        (line(body={"model": "m", "stream": True}), "invalid_request", "body", "stream"),
        (line("0"), "duplicate_custom_id", "custom_id", "'0'"),
        (line("x" * 300, pad="y" * 900), "line_too_long", None, "1000"),
    ],
)
def test_one_bad_line_is_told_by_its_number_and_none_is_sent(
    bad: bytes, code: str, param: str | None, said: str
) -> None:
    lines = [line(str(number)) for number in range(10)]
    found = judged(b"\n".join([*lines[:5], bad, *lines[5:]]))
    (fault,) = found.faults
    assert (fault.line, fault.code, fault.param) == (6, code, param)
    assert said in fault.message
    assert not list(found.taken())
    assert found.total == 11


def test_a_file_has_one_request_at_least_and_no_more_than_a_batch_takes() -> None:
    assert [fault.code for fault in judged(b"\n \n").faults] == ["empty_file"]
    data = b"\n".join([line(str(number)) for number in range(6)])
    assert not judged(data, most=6).faults
    (fault,) = judged(data, most=5).faults
    assert (fault.code, fault.line) == ("too_many_requests", None)
    assert "more than 5 requests" in fault.message


def test_what_follows_more_requests_than_a_batch_takes_is_not_judged() -> None:
    found = Judged(CHAT, 1000, 5)
    found.feed(b"\n".join(line(str(number)) for number in range(6)))
    assert not found.full
    found.feed(b"\n" + b"{\n" * 10)
    assert found.full
    found.end()
    assert [fault.code for fault in found.faults] == ["too_many_requests"]


def nested(id: str, deep: int) -> bytes:
    return line(id).replace(b'"messages": []', b'"messages": ' + b"[" * deep + b"]" * deep)


def test_a_line_that_is_nested_too_deep_to_be_read_is_a_bad_one() -> None:
    found = judged(nested("a", 1_000_000), longest=3_000_000)
    (fault,) = found.faults
    assert (fault.code, fault.line) == ("invalid_json_line", 1)
    assert "nested too deep" in fault.message


def test_a_line_that_has_changed_since_it_was_judged_is_told_from_others() -> None:
    good = read_line(line("a"))
    assert good is not None
    assert good[1] == json.loads(line("a"))["body"]["model"]
    for changed in (b"", line("a")[:-1], b"[]", b'{"custom_id": "\xff"}', nested("a", 1_000_000)):
        assert read_line(changed) is None


def test_faults_that_are_told_are_bounded() -> None:
    found = judged(b"{\n" * 500)
    assert (len(found.faults), found.bad, found.total) == (FAULTS_TOLD, 500, 500)


def test_endpoints_are_the_routes_of_whole_json_answers() -> None:
    assert {CHAT, "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/messages"} <= set(ENDPOINTS)
    assert not {"/v1/audio/transcriptions", "/v1/models", "/v1/messages/count_tokens", "/tokenize"} & set(ENDPOINTS)


def test_blank_lines_are_skipped_in_one_step_and_are_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    one = Judged._line
    monkeypatch.setattr(Judged, "_line", lambda self: (seen.append(1), one(self))[1])
    found = judged(b"\n" * 1000 + b" \r\n" * 1000 + line() + b"\n" * 3000 + b"   ", most=5000)
    assert [(each.number, each.offset) for each in found.taken()] == [(2001, 4000)]
    assert not found.faults
    assert len(seen) == 2  # the request, and what follows the last line feed
    for most, slices in ((5001, None), (100, iter(lambda: 7, 0))):
        found = judged(line() + b"\n" * 3 + b"\n \t" * 5100, most=most, cut=slices)
        assert found.full
        assert [fault.code for fault in found.faults] == ["too_many_blank_lines"]
