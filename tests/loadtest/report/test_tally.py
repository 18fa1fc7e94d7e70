"""Tally of a run: hand-made results, with every figure of their summary worked out beside them."""

from __future__ import annotations

import pytest

from loadtest.report.records import RequestResult, Run, Slo, Window
from loadtest.report.summary import Ending, missed, summarise
from loadtest.report.tally import REASONS, Tally, Timeline, tallies_of
from tests.loadtest.made_runs import a_result

WINDOW = Window(duration=30.0, warmup=5.0, cooldown=5.0)  # 20 s are measured
SLOS = (Slo(class_name="interactive", ttft=0.2, attainment=0.75), Slo(class_name="batch", e2e=60.0))


def at(time: float, **fields: object) -> RequestResult:
    """The result of `made_runs`, all of it moved to `time`."""
    by = time - 10.0
    moved = {"at": time, "sent": 10.001 + by, "first_token": 10.2 + by, "finished": 10.51 + by}
    return a_result(**moved | fields)


def refused(time: float, **fields: object) -> RequestResult:
    nothing = {"first_token": 0.0, "completion_tokens": 0, "gaps": ()}
    return at(time, **nothing | {"status": 503, "outcome": "overloaded", "reason": "queue full"} | fields)


def a_run(*results: RequestResult, slos: tuple[Slo, ...] = SLOS) -> Run:
    return Run(name="weir", rate=1.0, window=WINDOW, slos=slos, results=results)


def test_goodput_is_what_met_its_slo_over_all_that_was_offered_in_the_window() -> None:
    summary = summarise(
        a_run(
            at(4.99),  # warm-up
            at(5.0),
            at(6.0),
            at(7.0, first_token=7.3),  # late
            refused(8.0),
            at(9.0, outcome="truncated"),
            at(10.0, class_name="batch", tenant="b", first_token=30.0),  # out of the window by now, and still counted
            at(25.0),  # cool-down
        )
    )
    own, total = summary.classes["interactive"], summary.total
    assert (own.offered, own.ok, own.met, own.goodput) == (5, 3, 2, 0.4)
    assert (total.offered, total.met, total.goodput) == (6, 3, 0.5)
    rates = (total.offered_rate, total.met_rate, total.completion_token_rate)
    assert rates == pytest.approx((6 / 20, 3 / 20, 16 / 20))
    assert own.endings == [Ending("ok", "", 3), Ending("overloaded", "queue full", 1), Ending("truncated", "", 1)]
    assert (own.ttft.count, own.ttft.p50, own.ttft.max) == (3, pytest.approx(0.2), pytest.approx(0.3))
    assert (own.ttft_from_send.p50, own.e2e_from_send.p50) == pytest.approx((0.199, 0.499))
    assert (own.itl.count, own.itl.mean, own.tpot.p99) == (9, pytest.approx(0.1), pytest.approx(0.1))
    assert summary.fairness == pytest.approx((0.4 + 1.0) ** 2 / (2 * (0.16 + 1.0)))
    assert (summary.seconds, summary.repeats, summary.valid) == (20.0, 1, True)


def test_repeats_are_one_sample_and_several_observations() -> None:
    first = [at(5.0), at(6.0)]
    second = [at(5.0, repeat=1), refused(6.0, repeat=1)]
    summary = summarise(a_run(*first, *second))
    assert (summary.repeats, summary.seconds, summary.total.offered) == (2, 40.0, 4)
    found = summary.intervals["goodput"]  # of 1.0 and 0.5: s = 0.35355, t(1) = 12.7062
    assert (found.mean, found.half, found.samples) == (0.75, pytest.approx(12.7062 * 0.25, abs=1e-3), 2)
    assert summary.intervals["ttft_p50"].half == pytest.approx(0.0, abs=1e-9)


def test_a_late_sender_makes_a_run_invalid_and_one_bad_repeat_is_enough() -> None:
    good = [at(5.0 + 0.01 * number, sent=5.004 + 0.01 * number) for number in range(1000)]
    bad = [at(5.0 + 0.01 * number, sent=5.006 + 0.01 * number, repeat=1) for number in range(5)]
    assert summarise(a_run(*good)).valid
    summary = summarise(a_run(*good, *bad))
    assert not summary.valid
    assert (summary.lag_p50, summary.lag_p99) == pytest.approx((0.004, 0.006))
    assert "late by 6.0 ms at p99" in missed([], summary)[0]


def test_an_slo_is_missed_below_its_attainment_or_without_a_request() -> None:
    kept = summarise(a_run(at(5.0), at(6.0), at(7.0), refused(8.0)))
    assert missed(SLOS, kept) == ["batch: no request of this class was offered"]  # 3 of 4 is 0.75
    lost = summarise(a_run(at(5.0), refused(8.0), at(6.0, class_name="batch")))
    assert missed(SLOS, lost) == ["interactive: 1 of 2 requests met it: 0.5000, below 0.75"]


def test_the_slo_for_all_is_each_classs_own() -> None:
    slos = (Slo(ttft=0.2),)
    summary = summarise(a_run(at(5.0), at(6.0, class_name="x"), refused(7.0, class_name="x"), slos=slos))
    assert [one.partition(":")[0] for one in missed(slos, summary)] == ["x"]


def test_a_run_of_nothing_is_summed_up_all_the_same() -> None:
    summary = summarise(a_run())
    assert (summary.total.offered, summary.total.goodput, summary.fairness, summary.intervals) == (0, 1.0, 1.0, {
        "completion_token_rate": summary.intervals["completion_token_rate"], "met_rate": summary.intervals["met_rate"],
    })  # fmt: skip
    assert summary.valid


def test_times_that_cannot_be_are_counted_as_such_and_cost_nobody_the_report() -> None:
    summary = summarise(a_run(at(5.0), at(6.0, first_token=5.9), at(7.0, gaps=(0.1, -0.05))))
    assert summary.total.endings == [
        Ending("inconsistent", "answered before it was asked", 2),
        Ending("ok", "", 1),
    ]
    assert (summary.total.ok, summary.total.met) == (1, 1)


def test_reasons_that_a_server_makes_up_do_not_fill_the_memory() -> None:
    tally = Tally(WINDOW)
    for number in range(3 * REASONS):
        tally.add(refused(6.0, reason=f"request {number}"))
    outcomes = tally.classes["interactive"].outcomes
    assert len(outcomes) == REASONS + 1
    assert outcomes["overloaded", "(other)"] == 2 * REASONS


def test_streams_without_a_usage_are_told() -> None:
    assert summarise(a_run(at(5.0), at(6.0, completion_tokens=0))).total.uncounted == 1


def test_a_timeline_joins_its_bins_when_it_gets_long() -> None:
    timeline = Timeline(most=4)
    for time, good in ((0.5, True), (1.5, False), (3.9, True)):
        timeline.add("a", time, good)
    assert (timeline.width, [one.offered for one in timeline.bins["a"]]) == (1.0, [1, 1, 0, 1])
    timeline.add("a", 9.0, True)
    assert timeline.width == 4.0
    assert [(one.offered, one.met) for one in timeline.bins["a"]] == [(3, 2), (0, 0), (1, 1)]
    other = Timeline(most=100)
    other.add("a", 2.5, True)
    other.add("b", 17.0, False)
    timeline.merge(other)
    assert timeline.width == 8.0
    assert [(one.offered, one.met) for one in timeline.bins["a"]] == [(4, 3), (1, 1)]
    assert [(one.offered, one.met) for one in timeline.bins["b"]] == [(0, 0), (0, 0), (1, 0)]


def test_results_are_tallied_once_and_without_an_end_until_the_last() -> None:
    run = Run(name="x", rate=0.0, window=Window(warmup=1.0), results=[at(3.0), at(11.0), at(5.0)])
    assert tallies_of(run) is tallies_of(run)
    assert summarise(run).seconds == 10.0
