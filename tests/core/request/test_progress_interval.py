"""Interval of progress comments: the header's, else the policy's."""

from __future__ import annotations

import pytest

from gateway.core.request.headers import progress_interval
from gateway.core.request.outcome import Refused


@pytest.mark.parametrize(
    ("header", "default", "seconds"),
    [(None, None, 0.0), (None, 15.0, 15.0), (b"0", 15.0, 0.0), (b"1", None, 1.0), (b"2.5", 15.0, 2.5)],
)
def test_a_header_decides_before_the_policy(header: bytes | None, default: float | None, seconds: float) -> None:
    assert progress_interval(header, default) == seconds


@pytest.mark.parametrize("header", [b"", b"0.5", b"301", b"-1", b"on", b"1e1", b"nan"])
def test_anything_else_is_refused(header: bytes) -> None:
    with pytest.raises(Refused) as refused:
        progress_interval(header, None)
    assert (refused.value.status, refused.value.param) == (400, "x-weir-progress")
