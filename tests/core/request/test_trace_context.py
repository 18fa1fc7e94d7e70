"""Trace ids in `traceparent` headers, valid and malformed (W3C Trace Context)."""

from __future__ import annotations

import pytest

from gateway.core.request.trace_context import TraceParent, parent_line, trace_parent

ID, PARENT = b"4bf92f3577b34da6a3ce929d0e0e4736", b"00f067aa0ba902b7"
GOOD = b"00-%b-%b-01" % (ID, PARENT)


@pytest.mark.parametrize(
    "value",
    [GOOD, b"00-%b-%b-00" % (ID, PARENT), b"01-%b-%b-01" % (ID, PARENT), b"cc-%b-%b-01-what the-future" % (ID, PARENT)],
)
def test_a_trace(value: bytes) -> None:
    parent = trace_parent({b"host": b"x", b"traceparent": value, b"tracestate": b"a=b"})
    assert parent == TraceParent(ID.decode(), PARENT.decode(), not value.endswith(b"-00"))


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"ff-%b-%b-01" % (ID, PARENT),
        b"00-%b-%b-01" % (b"0" * 32, PARENT),
        b"00-%b-%b-01" % (ID, b"0" * 16),
        GOOD.upper(),
        GOOD[:-1],
        GOOD + b"-more",
        GOOD + b"x",
        b"01" + GOOD[2:] + b"x",
        b"0" + GOOD,
        GOOD.replace(b"-", b" "),
        b" " + GOOD,
        b"00-%b-%b-01, 00-%b-%b-01" % (ID, PARENT, ID, PARENT),
    ],
)
def test_no_trace(value: bytes) -> None:
    assert trace_parent({b"traceparent": value}) is None


def test_none_or_two_are_no_trace() -> None:
    assert trace_parent({b"host": b"x"}) is None
    for one in (GOOD, b"01-%b-%b-01-more" % (ID, PARENT)):
        for between in (b", ", b","):
            assert trace_parent({b"traceparent": one + between + one}) is None


@pytest.mark.parametrize("sampled", [True, False])
def test_a_line_is_read_as_it_was_written(sampled: bool) -> None:
    name, _, value = parent_line(ID.decode(), PARENT.decode(), sampled=sampled).rstrip().partition(b": ")
    assert trace_parent({name: value}) == TraceParent(ID.decode(), PARENT.decode(), sampled)
