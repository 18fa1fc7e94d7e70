"""Statistics: the definitions on hand-made requests, the formulas against published tables and worked examples."""

from __future__ import annotations

import pytest

from loadtest.report.records import Slo, Window
from loadtest.report.stats import Latency, interval, jain, latency_of, met, slo_of, student_t
from tests.loadtest.made_runs import a_result, counts_of


@pytest.mark.parametrize(
    ("fields", "ttft", "e2e", "tpot"),
    [
        ({}, 0.2, 0.5, 0.1),  # 10.2 - 10; 10.2 + 3 x 0.1 - 10, not 10.51; 0.3 / (4 - 1)
        ({"completion_tokens": 7}, 0.2, 0.5, 0.05),  # events that carry several tokens: usage counts, not events
        ({"completion_tokens": 1, "gaps": ()}, 0.2, 0.2, None),
        ({"completion_tokens": 0}, 0.2, 0.5, None),  # no usage
        ({"first_token": 0.0, "gaps": ()}, 0.51, 0.51, None),  # not a stream: both end with the answer
    ],
)
def test_latencies_are_vllms_from_the_intended_time(
    fields: dict[str, object], ttft: float, e2e: float, tpot: float | None
) -> None:
    result = a_result(**fields)
    own, vllms = latency_of(result, result.at), latency_of(result, result.sent)
    assert (own.ttft, own.e2e) == pytest.approx((ttft, e2e))
    assert (vllms.ttft, vllms.e2e) == pytest.approx((ttft - 0.001, e2e - 0.001))
    assert own.tpot == vllms.tpot == (None if tpot is None else pytest.approx(tpot))


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (None, True),
        (Slo(), True),
        (Slo(ttft=0.5), True),  # at the bound is in time
        (Slo(ttft=0.49), False),
        (Slo(tpot=0.1, e2e=2.0), True),
        (Slo(tpot=0.09), False),
        (Slo(e2e=1.99), False),
    ],
)
def test_a_request_meets_an_slo_if_it_is_within_every_bound(slo: Slo | None, good: bool) -> None:
    assert met(slo, Latency(ttft=0.5, e2e=2.0, tpot=0.1)) is good


def test_an_answer_without_tpot_is_within_every_bound_of_it() -> None:
    assert met(Slo(tpot=0.001), Latency(ttft=0.5, e2e=2.0, tpot=None))


def test_a_class_has_its_own_slo_before_the_one_for_all() -> None:
    every, own = Slo(ttft=1.0), Slo(class_name="chat", ttft=0.1)
    assert slo_of([every, own], "chat") is own
    assert slo_of([own, every], "batch") is every
    assert slo_of([own], "batch") is None


def test_a_window_goes_by_intended_times() -> None:
    window = Window(duration=60.0, warmup=10.0, cooldown=5.0)
    assert [at in window for at in (9.99, 10.0, 54.99, 55.0)] == [False, True, True, False]
    assert 1e9 in Window(warmup=3.0)


@pytest.mark.parametrize(
    ("freedom", "confidence", "t"),
    [
        (1, 0.95, 12.7062), (2, 0.95, 4.3027), (3, 0.95, 3.1824), (4, 0.95, 2.7764), (9, 0.95, 2.2622),
        (10, 0.95, 2.2281), (30, 0.95, 2.0423), (120, 0.95, 1.9799), (1, 0.99, 63.6567), (5, 0.99, 4.0321),
        (10, 0.90, 1.8125),
    ],
)  # fmt: skip
def test_students_t_is_that_of_the_tables(freedom: int, confidence: float, t: float) -> None:
    assert student_t(freedom, confidence) == pytest.approx(t, abs=1e-4)


def test_an_interval_is_students() -> None:
    found = interval([1.0, 2.0, 3.0, 4.0, 5.0])  # s = sqrt(2.5); 2.7764 x sqrt(2.5 / 5)
    assert (found.mean, found.half, found.samples) == (3.0, pytest.approx(1.96324, abs=1e-4), 5)
    assert interval([4.0]).half is None
    with pytest.raises(ValueError, match="no values"):
        interval([])


@pytest.mark.parametrize(
    ("shares", "index"),
    [([], 1.0), ([0.0, 0.0], 1.0), ([3.0, 3.0, 3.0], 1.0), ([1.0, 0.0, 0.0, 0.0], 0.25), ([1.0, 2.0, 3.0], 36 / 42)],
)
def test_jains_index(shares: list[float], index: float) -> None:
    assert jain(shares) == pytest.approx(index)


def test_only_whole_windows_are_counted() -> None:
    times = [0.0, 0.9, 1.0, 2.5, 9.9]
    assert counts_of(times, 1.0, 0.0, 3.2) == [2, 1, 1]
    assert counts_of(times, 1.0, 0.5, 3.0) == [2, 0]
