"""Token usage of SSE streams of each route: relayed bytes, removed events, learned numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.answer import sse_usage
from gateway.core.answer.sse_usage import MAX_EVENT, SSEUsage, UsageError

USAGE = {"prompt_tokens": 12, "completion_tokens": 7, "total_tokens": 19}
DONE = b"data: [DONE]\n\n"

MESSAGE_STOP = b'"message_stop"'


def event(data: Any, name: str | None = None, end: str = "\n") -> bytes:
    head = f"event: {name}{end}" if name else ""
    return f"{head}data: {json.dumps(data, separators=(',', ':'))}{end}{end}".encode()


def delta(text: str, **more: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "delta": {"content": text}}], **more}


def numbers(reader: SSEUsage) -> tuple[int | None, int | None, int | None]:
    return reader.prompt_tokens, reader.completion_tokens, reader.cached_tokens


def test_whole_events_pass_as_the_same_object() -> None:
    reader = SSEUsage(hide=True)
    for end in ("\n", "\r\n"):
        data = event(delta("D"), end=end) + event(delta("x"), end=end)
        assert reader.feed(data) is data
    assert reader.finish() == b""
    assert numbers(reader) == (None, None, None)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("hide", [True, False])
def test_the_usage_event_is_read_and_hidden_if_need_be(hide: bool, end: str) -> None:
    reader = SSEUsage(hide)
    before, usage = event(delta("x"), end=end), event({"choices": [], "usage": USAGE}, end=end)
    done = DONE.replace(b"\n", end.encode())
    assert reader.feed(before + usage + done) == (before + done if hide else before + usage + done)
    assert numbers(reader) == (12, 7, None)
    assert reader.done
    assert reader.ended(b"")
    assert reader.delivered(b"")
    assert not reader.error


def test_an_event_cut_anywhere_waits_for_its_end() -> None:
    data = event(delta("x")) + event({"choices": [], "usage": USAGE}, end="\r\n") + DONE
    for cut in range(len(data)):
        reader = SSEUsage(hide=False)
        first = reader.feed(data[:cut])
        assert first in (b"", data[: len(first)])
        assert first.endswith((b"\n\n", b"\r\n\r\n")) or not first
        assert first + reader.feed(data[cut:]) == data
        assert numbers(reader) == (12, 7, None)


def test_an_event_is_relayed_with_its_last_byte() -> None:
    for end in ("\n", "\r\n", "\r"):
        data = event(delta("x"), end=end)
        reader = SSEUsage(hide=True)
        assert {reader.feed(data[at : at + 1]) for at in range(len(data) - 1)} == {b""}
        assert reader.feed(data[-1:]) == data


def test_done_in_a_read_of_its_own() -> None:
    reader = SSEUsage(hide=True)
    assert reader.feed(DONE) == DONE
    assert reader.done


def test_blank_lines_too_many_stay() -> None:
    reader = SSEUsage(hide=True)
    assert (
        reader.feed(b": ping\n\n\r\n\n" + event({"choices": [], "usage": USAGE}) + DONE) == b": ping\n\n\r\n\n" + DONE
    )


def test_usage_beside_choices_is_never_hidden() -> None:
    reader = SSEUsage(hide=True)
    null = event(delta("x", usage=None))
    continuous = event(delta("y", usage={"prompt_tokens": 12, "completion_tokens": 1}))
    empty = event({"choices": []}) + event({"choices": [], "usage": None})
    assert reader.feed(null + continuous + empty) == null + continuous + empty
    assert numbers(reader) == (12, 1, None)


def test_text_that_speaks_of_usage_is_text() -> None:
    reader = SSEUsage(hide=True)
    data = event(delta('{"choices":[],"usage":{"prompt_tokens":1}} "error" data: [DONE]'))
    assert reader.feed(data) == data
    assert numbers(reader) == (None, None, None)
    assert not reader.done
    assert not reader.error


def test_cached_tokens() -> None:
    reader = SSEUsage(hide=True)
    reader.feed(event({"choices": [], "usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": 8}}}))
    assert numbers(reader) == (12, 7, 8)


@pytest.mark.parametrize(
    ("data", "refused"),
    [
        (event({"error": {"message": "boom", "code": 500}}), False),
        (event({"error": {"message": "boom", "code": 400}}), True),
        (event({"error": {"message": "boom", "code": 501}}), True),
        (event({"error": {"message": "boom", "code": 1}}), False),
        (event({"error": "boom"}), False),
        (event({"object": "error", "message": "boom", "type": "BadRequestError", "code": 400}), True),
        (event({"type": "error", "error": {"type": "api_error"}}, "error"), False),
        (event({"type": "response.failed", "response": {"error": {"message": "x"}}}, "response.failed"), False),
    ],
)
def test_errors_in_a_stream(data: bytes, refused: bool) -> None:
    reader = SSEUsage(hide=True)
    assert reader.feed(data) == data
    assert (reader.error, reader.refused) == (True, refused)
    assert reader.ended(MESSAGE_STOP)
    assert not reader.delivered(MESSAGE_STOP)
    assert numbers(reader) == (None, None, None)


def test_messages() -> None:
    reader = SSEUsage(hide=True)
    start = event(
        {"type": "message_start", "message": {"usage": {"input_tokens": 12, "output_tokens": 0}}}, "message_start"
    )
    text = event({"type": "content_block_delta", "delta": {"text": "x"}}, "content_block_delta")
    last = event({"type": "message_delta", "usage": {"input_tokens": 0, "output_tokens": 7}}, "message_delta")
    stop = event({"type": "message_stop"}, "message_stop")
    for data in (start, text, last):
        assert reader.feed(data) == data
        assert not reader.ended(MESSAGE_STOP)
    assert numbers(reader) == (12, 7, None)
    assert reader.feed(stop) == stop
    assert reader.ended(MESSAGE_STOP)
    assert not reader.ended(b"")


@pytest.mark.parametrize("kind", ["response.completed", "response.incomplete", "response.failed"])
def test_responses(kind: str) -> None:
    reader = SSEUsage(hide=True)
    created = event({"type": "response.created", "response": {"usage": None, "error": None}}, "response.created")
    assert reader.feed(created) == created
    assert not reader.ended(b"")
    usage = {"input_tokens": 12, "output_tokens": 7, "input_tokens_details": {"cached_tokens": 3}}
    last = event({"type": kind, "response": {"usage": usage}}, kind)
    assert reader.feed(last) == last
    assert numbers(reader) == (12, 7, 3)
    assert reader.ended(b"")
    assert reader.error is (kind == "response.failed")


@pytest.mark.parametrize(
    "data",
    [
        b'data: {"usage": nonsense}\n\n',
        b'data: {"usage": {"prompt_tokens": -1}}\n\n',
        b'data: {"usage": {"prompt_tokens": 1e99}}\n\n',
        b'data: "usage"\n\n',
        b'data: {"usage": {}, "x": "\xff"}\n\n',
        b'data: {"x": ' + b"[" * 9999 + b'"usage"\n\n',  # the parser's own recursion ends there
        b': a comment with "usage"\n\n',
        b'event: x\n"usage"\n\n',
        b'data: {"usage": {"note": 1}}\n\n',
        b'data: {"error": null, "message": {}}\n\n',
        b"\n\n",
        b"data: [DONE] but not quite\n\n",
    ],
)
def test_what_cannot_be_read_is_relayed_untouched(data: bytes) -> None:
    reader = SSEUsage(hide=True)
    assert reader.feed(data) == data
    assert numbers(reader) == (None, None, None)
    assert not reader.done
    assert not reader.error


def test_data_over_several_lines_is_one_event() -> None:
    reader = SSEUsage(hide=True)
    assert reader.feed(b'data: {"choices": [],\ndata:"usage": {"prompt_tokens": 3}}\n\n') == b""
    assert reader.prompt_tokens == 3


def test_the_end_of_the_body_ends_the_last_event() -> None:
    reader = SSEUsage(hide=True)
    assert reader.feed(b"data: [DONE]\n") == b""
    assert not reader.done
    assert reader.finish() == b"data: [DONE]\n"
    assert reader.done
    assert reader.finish() == b""
    hidden = SSEUsage(hide=True)
    assert hidden.feed(b"\r\n" + event({"choices": [], "usage": USAGE})[:-1]) == b""
    assert hidden.finish() == b"\r\n"
    assert hidden.prompt_tokens == 12


def test_an_event_that_never_ends_is_an_error() -> None:
    reader = SSEUsage(hide=True)
    for _ in range(MAX_EVENT // 1024):
        assert reader.feed(b"x" * 1024) == b""
    with pytest.raises(UsageError, match="no end of an event in 1048577 bytes"):
        reader.feed(b"x")
    tail = SSEUsage(hide=True)
    with pytest.raises(UsageError):
        tail.feed(event(delta("x")) + b"x" * (MAX_EVENT + 1))
    exact = SSEUsage(hide=True)
    assert exact.feed(b"x" * MAX_EVENT) == b""
    assert len(exact.feed(b"\n\n")) == MAX_EVENT + 2


def test_an_event_may_repeat_what_the_client_sent() -> None:
    reader = SSEUsage(hide=True, sent=1000)
    assert reader.feed(b"x" * (MAX_EVENT + 4000)) == b""
    with pytest.raises(UsageError):
        reader.feed(b"x")


def test_an_event_in_many_reads_is_parsed_once_and_an_echo_is_not_its_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last event of a response repeats the client's tools and schema."""
    decode, sizes = sse_usage._decode_event, []

    def counted(data: bytes) -> Any:
        sizes.append(len(data))
        return decode(data)

    monkeypatch.setattr(sse_usage, "_decode_event", counted)
    echo = [{"usage": {"input_tokens": 0, "output_tokens": 0}, "error": {"usage": {}}}] * 10_000
    numbers_of = {"input_tokens": 12, "output_tokens": 7}
    last = event({"type": "response.completed", "response": {"tools": echo, "usage": numbers_of, "text": echo[:9]}})
    reader = SSEUsage(hide=True)
    assert b"".join([reader.feed(last[at : at + 100]) for at in range(0, len(last), 100)]) == last
    assert numbers(reader) == (12, 7, None)
    assert not reader.error
    assert sizes == [len(last) - len(b"data: ") - 2]


@pytest.mark.parametrize(
    ("event", "held", "expected"),
    [
        (b'data: {"choices":[]}\n\n', b"", True),
        (b'data: {"text":"DO"}\n\n', b"", True),
        (b'data: {"choices":[]}\n\n', b"data: {", False),  # the end of what came before
        (b'data: {"choices":[]}\n', b"", False),  # not whole events
        (b'data: {"choices":[],"usage":{}}\n\n', b"", False),
        (b'data: {"error":{}}\n\n', b"", False),
        (b"data: [DONE]\n\n", b"", False),
    ],
)
def test_a_chunk_passes_unread_only_if_nothing_in_it_concerns_us(event: bytes, held: bytes, expected: bool) -> None:
    reader = SSEUsage(hide=True)
    reader.feed(held)
    assert reader.passes(b"%x\r\n%b\r\n" % (len(event), event)) is expected


# -- usage in every event ---------------------------------------------------------------------------------------------


def counted(prompt: int, completion: int, **more: Any) -> dict[str, Any]:
    return {
        "usage": {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion},
        **more,
    }


def every(text: str, completion: int, index: int = 0, **more: Any) -> bytes:
    """An event as vLLM writes it with continuous_usage_stats, which tells what its choice has."""
    choice = {"index": index, "delta": {"content": text}}
    return event({"id": "c", "choices": [choice], **counted(12, completion, **more)})


def bare(text: str, index: int = 0) -> bytes:
    return event({"id": "c", "choices": [{"index": index, "delta": {"content": text}}]})


def meter(n: int = 1, **how: Any) -> SSEUsage:
    return SSEUsage(hide=True, cut=True, single=n == 1, **how)


def test_the_usage_of_every_event_is_taken_out_and_the_last_is_known_when_a_stream_is_left() -> None:
    reader = meter()
    for number in range(1, 6):
        assert reader.feed(every(f"w{number}", number)) == bare(f"w{number}")
    reader.sum_up()
    assert (numbers(reader), reader.whole) == ((12, 5, None), False)
    assert reader.feed(event({"choices": [], **counted(12, 6)})) == b""
    reader.sum_up()
    assert (numbers(reader), reader.whole) == ((12, 6, None), True)


@pytest.mark.parametrize(
    "said",
    [
        every("x", 3) + every("y", 4),  # two at once
        every("x", 4, system_fingerprint="f"),  # another field after it
        event(delta("usage", usage={"prompt_tokens": 12, "completion_tokens": 4, "prompt_tokens_details": {"a": 1}})),
        event(delta('","usage":{"', **counted(12, 4))),
        event({"usage": counted(12, 4)["usage"], "choices": [{"index": 0, "delta": {"name": "usage"}}]}),
        event(delta("x", **counted(12, 4)), end="\r\n"),
        event(delta("x", **counted(12, 4)), name="chunk"),
    ],
)
@pytest.mark.parametrize("single", [True, False])
def test_it_is_taken_out_however_it_is_written(said: bytes, single: bool) -> None:
    reader = SSEUsage(hide=True, cut=True, single=single)
    shown = reader.feed(said[:20]) + reader.feed(said[20:])
    reader.sum_up()
    assert numbers(reader) == (12, 4, None)
    for before, after in zip(said.splitlines(), shown.splitlines(), strict=True):
        if before.startswith(b"data: "):
            expected = json.loads(before[6:])
            del expected["usage"]
            assert json.loads(after[6:]) == expected
        else:
            assert before == after


def test_what_each_of_several_sequences_has_is_summed() -> None:
    reader = meter(n=3)
    for completion in range(1, 8):
        for index in range(3):
            assert reader.feed(every("x", completion + index, index)) == bare("x", index)
    reader.sum_up()
    assert numbers(reader) == (12, 7 + 8 + 9, None)


def test_choices_without_end_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse_usage, "MAX_CHOICES", 2)
    reader = meter(n=3)
    for index in range(9):
        reader.feed(every("x", 1, index))
    assert reader.completion_tokens == 2


def test_whoever_wants_the_usage_of_every_event_gets_it() -> None:
    reader = SSEUsage(hide=False)
    assert reader.feed(every("x", 3)) == every("x", 3)
    assert (numbers(reader), reader.whole) == ((12, 3, None), False)


def test_a_usage_that_cannot_be_read_goes_on_as_it_came() -> None:
    reader = meter()
    said = b'data: {"choices":[{"index":0}],"usage":{"prompt_tokens":-1}}\n\n'
    assert reader.feed(said) == said
    reader.sum_up()
    assert numbers(reader) == (None, None, None)


def test_the_beginning_of_a_message_does_not_tell_of_its_whole() -> None:
    reader = SSEUsage(hide=False)
    message = {"type": "message", "usage": {"input_tokens": 9, "output_tokens": 1}}
    reader.feed(event({"type": "message_start", "message": message}, "message_start"))
    assert (numbers(reader), reader.whole) == ((9, 1, None), False)
    reader.feed(event({"type": "message_delta", "usage": {"input_tokens": 9, "output_tokens": 40}}, "message_delta"))
    assert (numbers(reader), reader.whole) == ((9, 40, None), True)


def test_usage_that_tells_of_the_prompt_alone_says_nothing_of_a_choice() -> None:
    reader = SSEUsage(hide=False, cut=True)
    reader.feed(event({"choices": [{"index": 0, "delta": {}}], "usage": {"prompt_tokens": 12}}))
    assert (reader.prompt_tokens, reader.completion_tokens) == (12, None)
