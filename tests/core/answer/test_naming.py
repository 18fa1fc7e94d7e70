"""Names of models in answers to calls for a model route."""

from __future__ import annotations

import json

import pytest

from gateway.core.answer.naming import HELD, AnswerNaming, finish_reason, named

EVENT = b'data: {"id":"1","model":"member","choices":[{"delta":{"content":"\\"model\\":\\"member\\""}}]}\n\n'


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b'{"id":"1","model":"member","x": 1.50}', b'{"id":"1","model":"support","x":1.50}'),
        (b'{"content":[{"input":{"model":"member"}}],"model":"member"}',
         b'{"content":[{"input":{"model":"member"}}],"model":"support"}'),
        (b'{"message":{"model":"member","role":"assistant"}}', b'{"message":{"model":"support","role":"assistant"}}'),
        (b'{"response":{"model":"member"},"n":1}', b'{"response":{"model":"support"},"n":1}'),
        (b'{"message":"a \\"model\\"","text":"\\"model\\""}', b'{"message":"a \\"model\\"","text":"\\"model\\""}'),
        (b'{"message":"text","x":"model","model":"member"}', b'{"message":"text","x":"model","model":"support"}'),
        (b'{"message":{"role":{"model":"member"}}}', b'{"message":{"role":{"model":"member"}}}'),
        (b'"model" in plain text', b'"model" in plain text'),
        (b'{"model":"memb', b'{"model":"memb'),
        (b"no name", b"no name"),
        (b'{"id":"1","model":"member","score":NaN}', b'{"id":"1","model":"support","score":NaN}'),
        (b'\xef\xbb\xbf{"model":"member"}', b'\xef\xbb\xbf{"model":"support"}'),
    ],
)  # fmt: skip
def test_the_outermost_model_alone_is_named(answer: bytes, expected: bytes) -> None:
    assert named(answer, "support") == expected
    whole = AnswerNaming("support", stream=False)
    assert b"".join([whole.feed(answer[:9]), whole.feed(answer[9:]), whole.finish(b"")]) == expected


def test_events_keep_all_but_their_model() -> None:
    naming = AnswerNaming("support", stream=True)
    sent = naming.feed(b": comment\n\n" + EVENT + EVENT) + naming.feed(b"data: [DONE]\n\n") + naming.finish(b"")
    renamed = EVENT.replace(b'"model":"member"', b'"model":"support"', 1)
    assert sent == b": comment\n\n" + renamed + renamed + b"data: [DONE]\n\n"
    crlf = naming.feed(b'event: x\r\ndata: {"model":"member"}\r\n\r\n')
    assert crlf == b'event: x\r\ndata: {"model":"support"}\r\n\r\n'


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (b'\xef\xbb\xbfdata: {"model":"member"}\n\n', b'\xef\xbb\xbfdata: {"model":"support"}\n\n'),
        (b'data: {"id":"1",\r\ndata: "model":"member"} \r\nid: 7\r\n\r\n',
         b'data: {"id":"1","model":"support"} \r\nid: 7\r\n\r\n'),
        (b'data: {"n":[1,\ndata: NaN],"model":"member"}\n\n', b'data: {"n":[1, NaN],"model":"member"}\n\n'),
        (b'data: {"model":"member",\ndata:"n":NaN}\n\n', b'data: {"model":"support", "n":NaN}\n\n'),
        (b'data: {"model":"member"}\r\rid: 7\rdata: {"n":1,\rdata: "model":"member"}\r\r',
         b'data: {"model":"support"}\n\nid: 7\ndata: {"n":1,"model":"support"}\n\n'),
        (b'data: {"model":"member"}\r\rdata: {"model":"member"}\r\rdata: [DONE]\n\n',
         b'data: {"model":"support"}\n\ndata: {"model":"support"}\n\ndata: [DONE]\n\n'),
        (b'data: {"n":1,\rdata: "model":"member"}\r\n\r\n', b'data: {"n":1,"model":"support"}\r\n\r\n'),
        (b'data: {"a":\ndata: 1}\n\ndata: {"model":"member"}\n\n',
         b'data: {"a":\ndata: 1}\n\ndata: {"model":"support"}\n\n'),
    ],
)  # fmt: skip
def test_an_event_of_unusual_form_is_named_too(event: bytes, expected: bytes) -> None:
    assert AnswerNaming("support", stream=True).feed(event) == expected


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        (b'{"id":"1", "n": -1.5e3 ,"ok":true, "model" : "member",',
         b'{"id":"1", "n": -1.5e3 ,"ok":true, "model" : "support",'),
        (b'{"deep":{"model":"member"},"model":"member",', b'{"deep":{"model":"member"},"model":"member",'),
    ],
)  # fmt: skip
def test_a_long_answer_is_named_where_its_model_comes_first(head: bytes, expected: bytes) -> None:
    tail = b'"data":"%b"}' % (b"x" * 2 * HELD)
    naming = AnswerNaming("support", stream=False)
    first = naming.feed(head + tail[:-1000])
    assert first.startswith(expected)
    assert first + naming.feed(tail[-1000:-1]) + naming.finish(tail[-1:]) == expected + tail
    assert json.loads(expected + tail)["data"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"choices":[{"finish_reason":null}]}', ""),
        (b'{"finish_reason":"stop"}{"finish_reason": "length"}', "length"),
        (b'{"stop_reason":"end_turn"}', "end_turn"),
        (b'{"finish_reason":"invented"}', "other"),
        (b"nothing", ""),
    ],
)
def test_the_finish_reason_is_the_last_of_those_that_are_known(data: bytes, reason: str) -> None:
    assert finish_reason(data) == reason
    stream = AnswerNaming("support", stream=True)
    stream.feed(b"data: " + data + b"\n\n")
    stream.feed(b"data: [DONE]\n\n")
    assert stream.reason == reason
