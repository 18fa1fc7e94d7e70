"""Frames on the wire: what is written is read, however it is cut; what nobody of ours would write is an error."""

from __future__ import annotations

import struct
from itertools import pairwise
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.call_counts import CallCounts
from gateway.core.engines.breaker import Ending
from gateway.core.request.outcome import Outcome
from gateway.core.request.record import Record
from gateway.frames.codec import FULL, MOST_FROM_RELAY, FrameError, FrameWriter, from_decider, from_relay
from gateway.frames.messages import (
    AllHeld,
    AttemptFailed,
    CallEnd,
    FirstByte,
    FromDecider,
    FromRelay,
    Hello,
    RelayCounts,
    WaitAsk,
)

NUMBERS = st.integers(0, 2**53)
MESSAGES = st.one_of(
    st.builds(WaitAsk, NUMBERS, NUMBERS),
    st.builds(FirstByte, NUMBERS, st.floats(allow_nan=False)),
    st.builds(
        AttemptFailed, NUMBERS, NUMBERS, st.just("connect"), st.text(max_size=300), st.just("own"), st.booleans()
    ),
    st.builds(
        CallEnd,
        NUMBERS,
        st.floats(allow_nan=False),
        st.sampled_from([None, *Ending]),
        st.none() | NUMBERS,
        st.none() | st.tuples(NUMBERS, NUMBERS),
        st.none() | st.tuples(NUMBERS, NUMBERS, st.none() | NUMBERS),
        st.sampled_from(["", "refused", "error", "cancelled"]),
        st.sampled_from(list(Outcome)),
    ),
    st.builds(AllHeld, NUMBERS, st.lists(NUMBERS, max_size=5)),
)


def written(*messages: Any) -> bytes:
    writer = FrameWriter()
    for message in messages:
        writer.add(message)
    return writer.take()


@given(st.lists(st.lists(MESSAGES, min_size=1, max_size=5), max_size=5), st.lists(st.integers(0, 2000), max_size=10))
def test_what_is_written_is_read_however_it_is_cut(turns: list[list[Any]], cuts: list[int]) -> None:
    writer, data = FrameWriter(), b""
    for turn in turns:
        for message in turn:
            writer.add(message)
        data += writer.take()
    reader, read = from_relay(), []
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    for start, end in pairwise(edges):
        read += list(reader.feed(data[start:end]))
    assert read == turns


def test_messages_that_are_many_fill_several_frames() -> None:
    message = AttemptFailed(1, 1, "connect", "x" * 1000, "own", False)
    data = written(*[message] * 1000)
    frames = list(from_relay().feed(data))
    assert [message] * 1000 == [each for frame in frames for each in frame]
    assert len(frames) == 1000 * 1000 // FULL + 1


def test_the_counts_of_a_relay_are_taken_however_many_models_and_tenants_there_are() -> None:
    """A decider that refused them would cut their relay off for good, since it tells them whenever it connects."""
    counts = CallCounts()
    for outcome in Outcome:
        for number in range(1000):
            record = Record(request_id="", route="/v1/chat/completions", model=f"adapter-{number:040}", engine="e")
            record.tenant, record.class_name, record.outcome = f"tenant-{number}", "interactive", outcome
            counts.observe(record)
    told = RelayCounts(counts.told(), counts.calls, 0, 0, {}, {}, {}, 0, 0, 0)
    assert list(from_relay().feed(written(told))) == [[told]]


def test_nothing_is_written_of_nothing() -> None:
    assert FrameWriter().take() == b""


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (struct.pack(">I", 2**30), f"a frame of {2**30} bytes, where 1 to {MOST_FROM_RELAY} are taken"),
        (struct.pack(">I", 0), "a frame of 0 bytes"),
        (b"GET / HTTP/1.1\r\n\r\n", "a frame of 1195725856 bytes"),
        (struct.pack(">I", 3) + b"\xc1\xc1\xc1", "no frame of ours"),
        (struct.pack(">I", 4) + b"\x91" * 4, "no frame of ours"),
        (struct.pack(">I", 1) + b"\x80", "no frame of ours: Expected `array`"),
    ],
)  # fmt: skip
def test_what_nobody_of_ours_would_write_is_an_error(data: bytes, why: str) -> None:
    with pytest.raises(FrameError, match=why):
        list(from_relay().feed(data))


def test_no_more_is_kept_of_a_frame_than_its_length_says() -> None:
    reader = from_relay()
    assert list(reader.feed(struct.pack(">I", 1000))) == []
    for _ in range(999):
        assert list(reader.feed(b"x")) == []
    with pytest.raises(FrameError):
        list(reader.feed(b"x"))


@pytest.mark.parametrize("side", [FromRelay, FromDecider])
def test_no_tag_is_there_twice_and_messages_of_the_other_side_are_refused(side: Any) -> None:
    tags = [each.__struct_config__.tag for each in (*get_args(FromRelay), *get_args(FromDecider))]
    assert len(tags) == len(set(tags))
    read = from_decider() if side is FromRelay else from_relay()
    kind = get_args(side)[0]
    frame = msgspec.msgpack.encode([[kind.__struct_config__.tag]])
    with pytest.raises(FrameError, match="Invalid value"):
        list(read.feed(struct.pack(">I", len(frame)) + frame))


@pytest.mark.parametrize(
    "wrong", [Hello(1, -1, 0, 0, 0.0, 0), WaitAsk(1, -1), WaitAsk(2**63, 1), FirstByte(1, "now")]  # type: ignore[arg-type]
)  # fmt: skip
def test_a_message_out_of_bounds_is_an_error(wrong: Any) -> None:
    with pytest.raises(FrameError, match="no frame of ours"):
        list(from_relay().feed(written(wrong)))


def test_a_message_with_a_field_too_many_is_an_error() -> None:
    frame = msgspec.msgpack.encode([[WaitAsk.__struct_config__.tag, 1, 1, 1]])
    with pytest.raises(FrameError, match="no frame of ours"):
        list(from_relay().feed(struct.pack(">I", len(frame)) + frame))
