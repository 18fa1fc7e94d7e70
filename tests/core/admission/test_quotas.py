"""Token quotas by calendar day and month: counts, refusals, reloads, and what goes on over a restart."""

from __future__ import annotations

import datetime
import json
import random

import pytest

from gateway.core.admission.limits import Charge, LimitBook
from gateway.core.admission.quotas import DAY, Calendar, Used, bounds, day_text, quota_of
from gateway.core.policy.file import decode
from gateway.core.policy.policy import Policy
from gateway.core.policy.traffic import TokenQuota
from gateway.core.request.outcome import LONGEST, Outcome, Refused, refusal_headers
from gateway.shared.files.checked import InvalidFile

NOON = 1_764_504_000.0  # 2025-11-30 12:00 UTC, the last day of its month
MIDNIGHT = 1_764_547_200


def policy(limits: str = "{}", tenants: str = "{a: {}, b: {}}", storage: str = "kept") -> Policy:
    return decode(f"tenants: {tenants}\nlimits: {limits}\nstorage: {storage}\n".encode())


def book(limits: str = "{}", tenants: str = "{a: {}, b: {}}") -> LimitBook:
    """Its monotonic clock began 1000 s before NOON."""
    return LimitBook(policy(limits, tenants), calendar=Calendar(NOON - 1000.0))


DAILY = "{quota: {day: 1k}}"


def take(from_: LimitBook, tokens: int = 100, now: float = 1000.0, tenant: str = "a") -> Charge:
    return from_.charge(tenant, "default", "m", tokens, now)


def refused(from_: LimitBook, tokens: int = 100, now: float = 1000.0, tenant: str = "a") -> Refused:
    with pytest.raises(Refused) as caught:
        take(from_, tokens, now, tenant)
    assert caught.value.outcome is Outcome.RATE_LIMITED
    return caught.value


def used(from_: LimitBook, now: float = 1000.0, tenant: str = "a") -> dict[str, tuple[int, int]]:
    return {each.span: (each.used(now), each.reserved) for each in from_.quotas.of(tenant)}


# -- windows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("year", [1969, 1970, 1999, 2000, 2024, 2026, 2100])
def test_days_and_months_are_those_of_the_calendar(year: int) -> None:
    for month in range(1, 13):
        first = datetime.datetime(year, month, 1, tzinfo=datetime.UTC)
        last = (first + datetime.timedelta(days=32)).replace(day=1) - datetime.timedelta(seconds=1)
        begins, ends = int(first.timestamp()), int(last.timestamp()) + 1
        for wall in (begins, begins + 0.5, ends - DAY, ends - 0.001):
            assert bounds("month", wall) == (begins, ends)
            day = int(wall // DAY) * DAY
            assert bounds("day", wall) == (day, day + DAY)
            assert day_text(day) == datetime.datetime.fromtimestamp(day, datetime.UTC).strftime("%Y-%m-%d")


def test_a_new_day_begins_with_nothing_used_and_calls_under_way_go_on() -> None:
    it = book("{quota: {day: 1k, month: 2k}}")
    take(it, 600).settle(700, 1000.0)
    under_way = take(it, 250)
    assert used(it) == {"day": (700, 250), "month": (700, 250)}
    midnight = 1000.0 + MIDNIGHT - NOON
    assert [each.start_at(1000.0) for each in it.quotas.of("a")] == [MIDNIGHT - DAY, MIDNIGHT - 30 * DAY]
    assert [each.start_at(midnight) for each in it.quotas.of("a")] == [MIDNIGHT, MIDNIGHT]
    assert used(it, midnight) == {"day": (0, 250), "month": (0, 250)}  # nobody has come: it is asked and not changed
    under_way.settle(300, midnight + 1.0)
    assert used(it, midnight + 1.0) == {"day": (300, 0), "month": (300, 0)}
    take(it, 700, midnight + 2.0).settle(700, midnight + 3.0)
    assert used(it, midnight + DAY)["day"] == (0, 0)
    assert used(it, midnight + DAY)["month"] == (1000, 0)


@pytest.mark.parametrize(("back", "left"), [(5.0, 400), (7200.0, 0)])
def test_a_clock_that_is_set_back_a_little_empties_no_window_twice(back: float, left: int) -> None:
    it = book(DAILY)
    midnight = 1000.0 + MIDNIGHT - NOON
    take(it, 400, midnight + 1.0).settle(400, midnight + 1.0)
    it.quotas.calendar.offset -= back
    assert used(it, midnight + 1.0)["day"] == (left, 0)


@pytest.mark.parametrize("wrong", [-40 * DAY, -DAY, DAY, 40 * DAY])
def test_a_clock_that_is_wrong_for_a_while_empties_no_window(wrong: int) -> None:
    it = book("{quota: {day: 1k, month: 2k}}")
    take(it, 600).settle(600, 1000.0)
    it.quotas.calendar.offset += wrong
    assert used(it)["day"] == (0, 0)
    take(it, 300).settle(300, 1000.0)
    it.quotas.calendar.offset -= wrong
    refused(it, 500)
    assert used(it)["day"] == (600, 0)
    take(it, 100).settle(100, 1000.0)
    assert used(it)["day"] == (700, 0)
    assert used(it, 1000.0 + wrong)["day"] == (300, 0)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_start_with_a_wrong_clock_forgets_nothing_that_was_kept(goes_on: bool) -> None:
    it = book(DAILY)
    it.quotas.calendar.offset += DAY
    kept = [Used("a", "day", MIDNIGHT + number * DAY, 950 + number) for number in range(-9, 1)]
    (it.quotas.goes_on if goes_on else it.quotas.told)(kept, 1000.0)
    it.quotas.calendar.offset -= DAY
    assert used(it)["day"] == (949, 0)
    refused(it, 100)
    assert [used(it, 1000.0 - days * DAY)["day"][0] for days in (2, 3, 4)] == [947, 946, 0], "few are remembered"


# -- calls ------------------------------------------------------------------------------------------------------------


def test_a_call_is_refused_until_the_window_ends_and_let_in_then() -> None:
    it = book(DAILY)
    take(it, 900).settle(950, 1000.0)
    take(it, 50).settle(50, 1000.0)
    refusal = refused(it, 10)
    assert refusal.retry_after == MIDNIGHT - NOON
    assert refusal.code == "insufficient_quota"
    assert refusal.limit == "1000 tokens per day"
    assert json.loads(refusal.body())["error"] == {
        "message": "Tenant a has a quota of 1000 tokens per day (UTC): 1000 are used, and this call needs 10. "
        "The next day begins with nothing used. Try again in 43200 s (12 h 0 min).",
        "type": "rate_limit_error",
        "param": None,
        "code": "insufficient_quota",
    }
    lines = refusal_headers(refusal, random.Random(1))
    assert MIDNIGHT - NOON > LONGEST
    assert b"retry-after: 43200\r\n" in lines
    assert b"x-should-retry: false\r\n" in lines
    take(it, 10, tenant="b")
    refused(it, 10, 1000.0 + refusal.retry_after - 0.01)
    take(it, 10, 1000.0 + refusal.retry_after)


def test_the_window_that_ends_last_is_named() -> None:
    it = book("{quota: {day: 1k, month: 1k}}")
    later = 1000.0 + 2 * DAY  # 2025-12-02
    take(it, 1000, later).settle(1000, later)
    refusal = refused(it, 1, later)
    assert refusal.limit == "1000 tokens per month"
    assert refusal.retry_after == MIDNIGHT + 31 * DAY - (NOON + 2 * DAY)


def test_a_day_that_is_used_up_is_named_before_a_month_that_calls_under_way_hold() -> None:
    it = book("{quota: {day: 1k, month: 2k}}")
    now = 1000.0 - 10 * DAY  # 2025-11-20
    take(it, 950, now - DAY).settle(950, now - DAY)
    take(it, 980, now).settle(980, now)
    take(it, 15, now)
    refusal = refused(it, 60, now)
    assert (refusal.limit, refusal.retry_after) == ("1000 tokens per day", MIDNIGHT - NOON)


def test_a_call_that_is_larger_than_the_quota_of_a_day_is_not_told_to_wait_for_the_next_month() -> None:
    it = book("{quota: {day: 1k, month: 2k}}")
    now = 1000.0 - 10 * DAY
    take(it, 1000, now - DAY).settle(1000, now - DAY)
    refusal = refused(it, 1001, now)
    assert (refusal.limit, refusal.retry_after, refusal.helps) == ("1000 tokens per day", None, False)


def test_calls_under_way_hold_their_estimates_and_give_back_what_they_do_not_use() -> None:
    it = book(DAILY)
    first, second, third = take(it, 400), take(it, 400), take(it, 200)
    held = refused(it, 1)
    assert "Calls under way hold 1000 until they end." in held.message
    assert held.retry_after == 5.0
    first.settle(100, 1000.0)
    second.refund()
    third.keep()
    third.keep()
    assert used(it) == {"day": (300, 0), "month": (300, 0)}
    take(it, 700)
    refused(it, 1)


def test_a_call_that_is_larger_than_the_quota_is_told_that_no_retry_helps() -> None:
    never = refused(book(DAILY), 1001)
    assert "more than the whole quota. Make the prompt or max_tokens smaller." in never.message
    assert not never.helps
    assert never.retry_after is None


def test_a_refusal_by_a_quota_or_a_rate_takes_nothing_of_the_other() -> None:
    it = book("{per_tenant: {tokens: 500/min}, quota: {day: 1k}}")
    take(it, 400)
    assert "limit of tenant a is 500/min" in refused(it, 200).message
    assert used(it)["day"] == (0, 400)
    assert it.level(("tokens", "a", "", "")) == 400
    refused(it, 601)
    assert it.level(("tokens", "a", "", "")) == 400


def test_a_tenants_own_quota_replaces_the_default_window_by_window() -> None:
    given = policy("{quota: {day: 1k, month: 9k}}", "{a: {limits: {quota: {day: unlimited}}}, b: {}}")
    assert quota_of(given, "a") == TokenQuota(day="unlimited", month=9000)
    assert quota_of(given, "b") == TokenQuota(day=1000, month=9000)
    it = LimitBook(given, calendar=Calendar(NOON))
    take(it, 5000)
    refused(it, 5000)


def test_without_storage_nothing_is_counted_and_with_it_all_are() -> None:
    without = LimitBook(policy(storage="null"))
    assert not without.limited
    assert not without.counts_tokens("a")
    assert not take(without).live
    it = book()
    assert it.limited
    assert it.counts_tokens("a")
    take(it, 10**9).settle(10**9, 1000.0)
    assert [(each.tenant, each.span, each.tokens) for each in it.quotas.states()] == [
        ("a", "day", 10**9),
        ("a", "month", 10**9),
    ]
    assert [each.tenant for each in it.quotas] == ["a", "a", "b", "b"]


# -- reloads, restarts ------------------------------------------------------------------------------------------------


def test_a_reload_keeps_what_is_used_also_of_a_tenant_that_was_gone_for_a_while() -> None:
    it = book(DAILY)
    under_way = take(it, 100)
    take(it, 500).settle(500, 1000.0)
    it.apply(policy("{quota: {day: 550}}"), 1000.0)
    refused(it, 1)
    it.apply(policy(DAILY, "{b: {}}"), 1000.0)
    assert it.quotas.of("a") == ()
    under_way.settle(200, 1000.0)
    it.apply(policy(DAILY), 1000.0)
    assert used(it)["day"] == (700, 0)
    it.apply(policy(storage="null"), 1000.0)
    assert not it.quotas


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_restart_keeps_what_was_used_by_a_tenant_that_a_reload_brings_back(goes_on: bool) -> None:
    it = book(DAILY, "{b: {}}")
    kept = [Used("a", "day", MIDNIGHT - DAY, 900)]
    (it.quotas.goes_on if goes_on else it.quotas.told)(kept, 1000.0)
    it.apply(policy(DAILY), 1000.0)
    refused(it, 101)
    take(it, 100).settle(100, 1000.0)
    assert it.quotas.states()[0] == Used("a", "day", MIDNIGHT - DAY, 1000), "no smaller number replaces it in the file"


def test_what_was_kept_is_added_to_what_has_come_since_and_counts_once() -> None:
    it = book(DAILY)
    take(it, 50).settle(50, 1000.0)
    kept = [Used("a", "day", MIDNIGHT - DAY, 300), Used("a", "day", 0, 999), Used("gone", "day", MIDNIGHT - DAY, 7)]
    for _ in range(2):
        it.quotas.told(kept, 1000.0)
    assert used(it) == {"day": (350, 0), "month": (50, 0)}


def test_the_next_decider_goes_on_from_the_checkpoint_and_the_file_adds_nothing_to_it() -> None:
    it, after = book(DAILY), book(DAILY)
    take(it, 300).settle(300, 1000.0)
    state = it.checkpoint(1000.0)
    kept = it.quotas.states()
    for _ in range(2):
        after.restore(state, 1000.0, places=True)
        after.quotas.told(kept, 1000.0)
    assert used(after)["day"] == (300, 0)
    take(after, 20).settle(20, 1000.0)
    after.restore(state, 1000.0, places=True)
    assert used(after)["day"] == (320, 0)
    after.restore(state, 1000.0 + DAY, places=True)
    assert used(after, 1000.0 + DAY)["day"] == (0, 0)


def test_a_call_of_another_decider_counts_at_its_end_in_quotas_alone() -> None:
    it = book("{per_tenant: {tokens: 10k/min}, quota: {day: 1k}}")
    carried = it.carry("a", 400, 1000.0)
    assert used(it)["day"] == (0, 400)
    carried.settle(100, 1000.0)
    carried.forgo()
    assert used(it)["day"] == (100, 0)
    assert it.level(("tokens", "a", "", "")) == 0.0
    assert not it.carry("nobody", 400, 1000.0).live


# -- the policy -------------------------------------------------------------------------------------------------------


def test_a_quota_without_storage_is_a_mistake() -> None:
    with pytest.raises(InvalidFile) as caught:
        decode(b"limits: {quota: {day: 1M}}\ntenants: {a: {limits: {quota: {month: 2M}}}}\n")
    text = str(caught.value)
    assert "limits.quota: found a quota, and no storage, expected storage: FOLDER too" in text
    assert "tenants.a.limits.quota" in text
    decode(b"limits: {quota: {day: unlimited}}\n")
