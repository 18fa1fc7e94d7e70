"""Capacity search of the bench, against servers that are a number."""

from __future__ import annotations

import math
import re

import msgspec
import pytest

from loadtest.report.capacity import PRECISION, Capacity, Tried, needed, search, verdict
from loadtest.report.records import Slo
from tests.loadtest.made_runs import a_run


def keeping(most: float) -> tuple[list[float], Capacity]:
    """The search on a server that can do `most`, and the rates it tried."""
    tried = []

    def attempt(rate: float) -> Tried:
        tried.append(rate)
        return Tried(rate, () if rate <= most else ("late",))

    return tried, search(8.0, attempt)


@pytest.mark.parametrize("most", [0.3, 5.0, 8.0, 23.7, 900.0])
def test_it_closes_in_on_what_a_server_can_do(most: float) -> None:
    tried, found = keeping(most)
    assert found.kept <= most < found.missed <= found.kept * PRECISION
    assert len(tried) == len(set(tried)) <= 14
    assert tried[0] == 8.0
    assert f"at {found.missed:.3g}/s: late" in str(found)


def test_it_ends_where_there_is_no_end() -> None:
    tried, found = keeping(1e12)
    assert math.isinf(found.missed)
    assert len(tried) == 11
    assert str(found) == "at least 8.19e+03/s, where the SLO was kept; no higher rate was missed (after 11 rates)"
    _, found = keeping(0.0)
    assert found.kept == 0.0
    assert str(found) == "less than 0.00781/s, where the SLO was missed (after 11 rates)"


def test_what_the_sender_cannot_do_says_nothing_of_the_target() -> None:
    found = search(8.0, lambda rate: Tried(rate, ("invalid: late",) if rate > 20.0 else (), rate > 20.0))
    assert (found.kept, found.missed) == (16.0, math.inf)
    assert "the sender cannot do 32/s" in str(found)
    late = iter([True, False])  # once, by chance
    found = search(8.0, lambda rate: Tried(rate, ("late",), next(late, False)))
    assert not found.tried[0].late


def test_too_few_requests_tell_nothing() -> None:
    found = search(8.0, lambda rate: Tried(rate, ("late",), few="" if rate > 3.0 else "9 requests"))
    assert (found.kept, found.missed) == (0.0, 4.0)
    assert str(found) == "less than 4/s, where the SLO was missed (9 requests)"
    assert str(search(8.0, lambda rate: Tried(rate, (), few="none"))) == "unknown (none)"
    assert [needed([share]) for share in (0.5, 0.9, 0.99, 0.999, 1.0)] == [2, 10, 100, 1000, 1]


def test_what_a_run_tells_of_its_rate() -> None:
    """Of two classes: of the best 99 % of one nothing is known before there are 100."""
    kept = (Slo(class_name="interactive", attainment=0.9), Slo(class_name="batch", attainment=0.9))
    strict = (Slo(class_name="interactive", attainment=0.9), Slo(class_name="batch", attainment=0.99))
    assert verdict(5.0, msgspec.structs.replace(a_run(rate=5.0), slos=kept)) == Tried(5.0, ())
    told = verdict(5.0, msgspec.structs.replace(a_run(rate=5.0), slos=strict))
    assert (len(told.missed), told.late, told.few) == (1, False, "")
    assert told.missed[0].startswith("batch: ")
    late = verdict(5.0, msgspec.structs.replace(a_run(rate=5.0, lag=0.02), slos=kept))
    assert late.late
    assert late.missed[0].startswith("invalid: the sender was late by ")
    few = verdict(0.5, msgspec.structs.replace(a_run(rate=0.5), slos=strict))
    assert re.fullmatch(r"\d\d requests at 0\.5/s, and 100 are needed to tell: give a longer --duration", few.few)


def test_it_can_be_broken_off() -> None:
    found = search(8.0, lambda rate: Tried(rate, ()) if rate < 30.0 else None)
    assert (found.kept, found.why) == (16.0, "broken off")
