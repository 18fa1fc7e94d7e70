"""The loads and the table of `make rivals`."""

from __future__ import annotations

import pytest

from loadtest.lab.rivals.__main__ import AgentCall, line, row

CPU = (1.0, 2.0, 3.0)


def test_a_refused_call_counts_as_refused_and_in_no_time() -> None:
    found = row([AgentCall(200, 1.0, 2.0), AgentCall(200, 3.0, 4.0), AgentCall(429, None, 0.1)], 0.5, CPU)
    assert (found.mean, found.e2e, found.refused) == (2.0, 3.0, 1)
    with pytest.raises(ValueError, match="429"):
        row([AgentCall(429, None, 0.1)], 0.0, CPU)


def test_a_line_has_medians_and_the_spread_of_the_mean() -> None:
    rows = [row([AgentCall(200, first, 9.0)], 0.5, CPU) for first in (1.0, 2.0, 6.0)]
    assert "50%    2.00" in line("weir", rows)
    assert "1.00-6.00" in line("weir", rows)
