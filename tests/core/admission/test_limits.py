"""Rate limits by example: counts of each level, refusals, and the state that a reload keeps."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from gateway.core.admission import limits
from gateway.core.admission.bucket import LATE, duration
from gateway.core.admission.limits import Charge, LimitBook
from gateway.core.admission.refusals import own_words
from gateway.core.policy.file import decode
from gateway.core.policy.policy import Policy
from gateway.core.policy.traffic import Refusal
from gateway.core.request.outcome import Outcome, Refused, refusal_headers

TENANTS = "{a: {}, b: {}}"
Call = tuple[str, str, str]  # tenant, class, model
ALL = [(tenant, name, model) for tenant in "ab" for name in ("default", "batch") for model in ("m", "n")]


def policy(limits: str = "{}", tenants: str = TENANTS) -> Policy:
    return decode(f"tenants: {tenants}\nlimits: {limits}\n".encode())


def book(limits: str = "{}", tenants: str = TENANTS) -> LimitBook:
    return LimitBook(policy(limits, tenants))


def take(from_: LimitBook, call: Call = ("a", "default", "m"), tokens: int = 10, now: float = 100.0) -> Charge:
    return from_.charge(*call, tokens, now)


def refused(from_: LimitBook, call: Call = ("a", "default", "m"), tokens: int = 10, now: float = 100.0) -> Refused:
    with pytest.raises(Refused) as caught:
        from_.charge(*call, tokens, now)
    assert caught.value.outcome is Outcome.RATE_LIMITED
    assert caught.value.status == 429
    return caught.value


def lines(data: bytes) -> dict[str, str]:
    assert data.endswith(b"\r\n")
    return dict(line.split(": ", 1) for line in data.decode().split("\r\n")[:-1])


# -- one bucket -------------------------------------------------------------------------------------------------------


def test_a_burst_of_one_period_passes_and_then_the_rate_does() -> None:
    it = book("{per_tenant: {requests: 600/min}}")
    for _ in range(600):
        take(it)
    assert refused(it).retry_after == pytest.approx(0.1, abs=2 * LATE)
    assert refused(it, now=100.09)
    take(it, now=100.1 + LATE)
    refused(it, now=100.1 + LATE)
    for _ in range(600):
        take(it, now=160.1 + LATE)


def test_the_burst_may_be_smaller_than_the_period_and_larger() -> None:
    small = book("{per_tenant: {tokens: {rate: 60k/min, burst: 500}}}")
    take(small, tokens=500)
    assert refused(small, tokens=100).retry_after == pytest.approx(0.1, abs=2 * LATE)
    large = book("{per_tenant: {requests: {rate: 1/s, burst: 3}}}")
    for _ in range(3):
        take(large)
    assert refused(large).retry_after == pytest.approx(1, abs=2 * LATE)


def test_time_that_goes_back_a_little_gives_nothing_away() -> None:
    it = book("{per_tenant: {requests: 2/s}}")
    take(it, now=100.0)
    take(it, now=99.5)
    after = refused(it, now=99.5).retry_after
    assert after == pytest.approx(1.0, abs=2 * LATE)
    assert after is not None
    take(it, now=99.5 + after)


def test_the_time_told_is_true_however_clock_readings_are_rounded() -> None:
    for amount in range(1, 200, 6):
        it = book(f"{{per_tenant: {{requests: {amount}/min}}}}")
        for call in range(amount):
            take(it, now=987654.321 + call / 1000)
        after = refused(it, now=987654.6).retry_after
        assert after is not None
        take(it, now=987654.6 + after)


def test_a_call_larger_than_the_burst_is_told_that_no_retry_helps() -> None:
    it = book("{per_tenant: {requests: 1/s, tokens: {rate: 2M/min, burst: 500}}}")
    never = refused(it, tokens=501)
    assert never.message == (
        "This call needs 501 tokens, and the limit of tenant a (2M/min tokens) never lets more than 500 through at "
        "once: make the prompt or max_tokens smaller."
    )
    assert (never.retry_after, never.retry) == (None, False)
    told = lines(refusal_headers(never, random.Random(1)))
    assert told["x-should-retry"] == "false"
    assert told["x-ratelimit-remaining-tokens"] == "500"
    assert "retry-after" not in told
    take(it, tokens=500)
    assert not refused(it, tokens=501).retry, "although requests would allow it in a second"


def test_a_call_of_no_tokens_waits_for_a_debt_all_the_same() -> None:
    it = book("{per_tenant: {tokens: 10/s}}")
    take(it, tokens=0).settle(30, 100.0)
    assert refused(it, tokens=0).retry_after == pytest.approx(2.0, abs=2 * LATE)


# -- levels -----------------------------------------------------------------------------------------------------------

TENANT_A = [call for call in ALL if call[0] == "a"]


@pytest.mark.parametrize(
    ("of_all", "of_a", "owner", "counted"),
    [
        ("{global: {requests: 1/h}}", "", "this gateway, all tenants together", ALL),
        ("{per_tenant: {requests: 1/h}}", "", "tenant a", TENANT_A),
        ("{}", "{requests: 1/h}", "tenant a", TENANT_A),
        ("{classes: {default: {requests: 1/h}}}", "", "class default, all tenants together",
         [call for call in ALL if call[1] == "default"]),
        ("{models: {m: {requests: 1/h}}}", "", "model m, all tenants together",
         [call for call in ALL if call[2] == "m"]),
        ("{}", "{classes: {default: {requests: 1/h}}}", "tenant a in class default",
         [call for call in TENANT_A if call[1] == "default"]),
        ("{}", "{models: {m: {requests: 1/h}}}", "tenant a with model m",
         [call for call in TENANT_A if call[2] == "m"]),
    ],
)  # fmt: skip
def test_each_level_counts_its_own_calls_and_no_others(of_all: str, of_a: str, owner: str, counted: list[Call]) -> None:
    for call in ALL:
        it = book(of_all, f"{{a: {{limits: {of_a or '{}'}}}, b: {{}}}}")
        take(it)
        if call in counted:
            assert refused(it, call).message == (
                f"The limit of {owner} is 1/h requests: this call needs 1, 0 are left."
            )
        else:
            take(it, call)


def limits_of(it: LimitBook, call: Call = ("a", "default", "m")) -> tuple[str | None, str | None]:
    """What the tightest limits of a call permit: (requests, tokens)."""
    told = take(it, call, tokens=0).headers(100.0)
    found = lines(told) if told else {}
    return found.get("x-ratelimit-limit-requests"), found.get("x-ratelimit-limit-tokens")


@pytest.mark.parametrize(
    ("of_all", "of_a", "expected"),
    [
        ("{}", "{}", (None, None)),
        ("{per_tenant: {requests: 5/s, tokens: 50/s}}", "{}", ("5", "50")),
        ("{per_tenant: {requests: 5/s, tokens: 50/s}}", "{requests: 7/s}", ("7", "50")),
        ("{per_tenant: {requests: 5/s, tokens: 50/s}}", "{tokens: unlimited}", ("5", None)),
        ("{per_tenant: {requests: 5/s}}", "{requests: unlimited}", (None, None)),
        ("{per_tenant: {requests: unlimited}}", "{}", (None, None)),
        ("{global: {requests: 3/s}, per_tenant: {requests: 5/s}}", "{requests: unlimited}", ("3", None)),
        ("{models: {m: {requests: 9/s}}}", "{}", ("9", None)),
        ("{models: {n: {requests: 1/s}}}", "{}", (None, None)),
        ("{models: {m: {requests: 5/s}}}", "{models: {n: {requests: 1/s}}}", ("5", None)),
        ("{per_tenant: {requests: 5/s}}", "{models: {m: {requests: 2/s}}}", ("2", None)),
        ("{per_tenant: {requests: 5/s}}", "{classes: {default: {requests: 20/s}}}", ("5", None)),
    ],
)
def test_a_specific_limit_replaces_the_default_of_its_level_field_by_field(
    of_all: str, of_a: str, expected: tuple[str | None, str | None]
) -> None:
    assert limits_of(book(of_all, f"{{a: {{limits: {of_a}}}, b: {{}}}}")) == expected


def test_a_tenant_and_a_class_of_an_older_policy_have_the_defaults() -> None:
    it = book("{per_tenant: {requests: 5/s}, models: {m: {tokens: 7/s}}}")
    assert limits_of(it, ("gone", "gone", "m")) == ("5", "7")


def test_a_refused_call_takes_from_no_level() -> None:
    it = book("{global: {requests: 10/s, tokens: 1k/s}, per_tenant: {requests: 2/s}}")
    take(it)
    take(it)
    before = refused(it).headers
    for _ in range(50):
        assert refused(it).headers == before
    assert lines(take(it, ("b", "default", "m")).headers(100.0))["x-ratelimit-remaining-tokens"] == "970"


def test_of_several_limits_the_one_to_wait_for_longest_is_named() -> None:
    it = book("{global: {requests: 60/min}, per_tenant: {tokens: {rate: 10/s, burst: 100}}}")
    for _ in range(60):
        it.charge("a", "default", "m", 1, 100.0)
    no = refused(it, tokens=80)
    assert no.retry_after == pytest.approx(4.0, abs=2 * LATE)
    assert no.limit == "10/s tokens"
    assert no.full_message == "The limit of tenant a is 10/s tokens: this call needs 80, 40 are left. Try again in 5 s."
    no = refused(it, tokens=41)
    assert no.retry_after == pytest.approx(1.0, abs=2 * LATE)
    assert no.limit == "60/min requests"


# -- a charge's end ---------------------------------------------------------------------------------------------------

ROOM = "{per_tenant: {requests: 100/h, tokens: 1k/h}}"


def left(it: LimitBook) -> tuple[int, int]:
    told = lines(refused(it, tokens=10_000, now=0.0).headers)
    return int(told["x-ratelimit-remaining-requests"]), int(told["x-ratelimit-remaining-tokens"])


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (lambda charge: charge.settle(30, 0.0), (99, 970)),
        (lambda charge: charge.settle(300, 0.0), (99, 700)),
        (lambda charge: charge.settle(0, 0.0), (99, 1000)),
        (lambda charge: charge.refund(), (100, 1000)),
        (lambda charge: charge.keep(), (99, 900)),
        (lambda charge: charge.settle(3000, 0.0), (99, 0)),
    ],
)
def test_a_charge_ends_once(ends: Any, expected: tuple[int, int]) -> None:
    it = book(ROOM)
    with take(it, tokens=100, now=0.0) as charge:
        assert left(it) == (99, 900)
        ends(charge)
        assert left(it) == expected
        charge.refund()
        charge.settle(7, 0.0)
        charge.keep()
    assert left(it) == expected


def test_left_without_an_end_it_is_refunded_also_by_an_exception() -> None:
    it = book(ROOM)
    with take(it, now=0.0):
        pass
    with pytest.raises(KeyError), take(it, now=0.0):
        raise KeyError
    assert left(it) == (100, 1000)


def test_a_debt_is_paid_before_the_next_call() -> None:
    it = book("{per_tenant: {tokens: 100/s}}")
    take(it, tokens=100).settle(250, 100.0)
    assert refused(it, tokens=50).retry_after == pytest.approx(2.0, abs=2 * LATE)
    take(it, tokens=50, now=102.0 + LATE)


@pytest.mark.parametrize(
    ("limit", "end"),
    [
        ("{requests: 1/s}", lambda charge: charge.refund()),
        ("{tokens: 100/s}", lambda charge: charge.refund()),
        ("{tokens: 100/s}", lambda charge: charge.settle(0, 101.0)),
    ],
)
def test_what_has_drained_is_not_given_back(limit: str, end: Any) -> None:
    it = book(f"{{per_tenant: {limit}}}")
    first, second = take(it, tokens=100), take(it, tokens=20, now=101.0)
    end(first)
    end(second)
    take(it, tokens=100, now=101.0)
    refused(it, tokens=1, now=101.0)


def test_where_nothing_is_limited_nothing_is_made() -> None:
    for it in (book(), book("{per_tenant: {requests: unlimited}}"), book("{models: {other: {tokens: 1/h}}}")):
        with take(it) as charge:
            charge.settle(1_000_000, 100.0)
            assert charge.headers(100.0) == b""
        assert take(it) is charge


# -- what callers are told --------------------------------------------------------------------------------------------


def test_the_headers_are_of_the_tightest_limit_of_each_kind() -> None:
    it = book("{global: {requests: 6/min, tokens: 500/s}, per_tenant: {requests: 100/s, tokens: 600/s}}")
    charge = take(it, tokens=200)
    assert lines(charge.headers(100.0)) == {
        "x-ratelimit-limit-requests": "6",
        "x-ratelimit-remaining-requests": "5",
        "x-ratelimit-reset-requests": "10s",
        "x-ratelimit-limit-tokens": "500",
        "x-ratelimit-remaining-tokens": "300",
        "x-ratelimit-reset-tokens": "400ms",
    }
    assert lines(charge.headers(100.2))["x-ratelimit-remaining-tokens"] == "400"
    charge.settle(2000, 100.2)
    told = lines(charge.headers(100.2))
    assert (told["x-ratelimit-remaining-tokens"], told["x-ratelimit-reset-tokens"]) == ("0", "3.8s")


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, b"0s"), (0.0001, b"1ms"), (4.0000000001, b"4s"), (0.25, b"250ms"), (0.9991, b"1s"), (1.0, b"1s"),
        (8.64, b"8.64s"), (59.9999, b"1m0s"), (90.951, b"1m30.951s"), (360.0, b"6m0s"), (3600.0, b"1h0m0s"),
        (86_400.0, b"24h0m0s"),
    ],
)  # fmt: skip
def test_times_are_written_as_openai_does(seconds: float, expected: bytes) -> None:
    assert duration(seconds) == expected


def test_a_tenants_own_words() -> None:
    template = Refusal(body={
        "resultStatus": 1002, "tips": "顾客太多,客官请稍候 {retry_after} 秒", "data": None, "ok": False,
        "more": ["{tenant}/{class}/{model}", {"{limit}": "{limit}", "id": "{request_id}"}],
        "not": "{x} {} {0} {tenant.x}",
    })  # fmt: skip
    no = Refused(Outcome.RATE_LIMITED, "no", retry_after=2.1, limit="1/h requests")
    body = own_words(template, no, tenant="a", class_name="batch", model='"m"{tenant}\n', request_id="r1")
    assert json.loads(body) == {
        "resultStatus": 1002, "tips": "顾客太多,客官请稍候 3 秒", "data": None, "ok": False,
        "more": ['a/batch/"m"{tenant}\n', {"{limit}": "1/h requests", "id": "r1"}], "not": "{x} {} {0} {tenant.x}",
    }  # fmt: skip
    never = Refused(Outcome.RATE_LIMITED, "no", retry=False)
    template = Refusal(body={"wait": "{retry_after}"})
    words = own_words(template, never, tenant="a", class_name="c", model="m", request_id="r")
    assert words == b'{"wait":"-"}'


# -- what is remembered, and for how long -----------------------------------------------------------------------------


def test_forgotten_routes_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ROUTES_REMEMBERED", 2)
    it = book("{per_tenant: {requests: 2/h}}")
    for tenant in "abcabc":
        take(it, (tenant, "default", "m"))
        assert len(it._routes) <= 2
    for tenant in "abc":
        refused(it, (tenant, "default", "m"))


def test_a_reload_keeps_what_was_taken() -> None:
    it = book("{per_tenant: {requests: 10/h}}")
    for _ in range(6):
        take(it)
    it.apply(policy("{per_tenant: {requests: 8/h}}"), 100.0)
    take(it)
    take(it)
    refused(it)
    it.apply(policy("{per_tenant: {requests: 9/h}}"), 100.0)
    take(it)
    refused(it)


def test_a_lower_limit_asks_for_one_new_burst_at_most_and_for_debts() -> None:
    it = book("{per_tenant: {tokens: 1k/s}}")
    charge = take(it, tokens=900)
    it.apply(policy("{per_tenant: {tokens: 10/s}}"), 100.0)
    assert refused(it, tokens=10).retry_after == pytest.approx(1.0, abs=2 * LATE)
    charge.settle(1000, 100.0)
    assert refused(it, tokens=10).retry_after == pytest.approx(11.0, abs=2 * LATE)
    it.apply(policy("{per_tenant: {tokens: 1/s}}"), 100.0)
    assert refused(it, tokens=1).retry_after == pytest.approx(101.0, abs=2 * LATE)


def test_a_reload_drains_at_the_old_rate_up_to_its_own_time() -> None:
    it = book("{per_tenant: {tokens: 1k/s}}")
    take(it, tokens=1000)
    it.apply(policy("{per_tenant: {tokens: {rate: 1/h, burst: 1000}}}"), 100.5)
    take(it, tokens=500, now=100.5)
    refused(it, tokens=1, now=100.5)


def test_a_call_settles_on_a_limit_that_is_gone() -> None:
    it = book("{global: {tokens: 100/h}, per_tenant: {tokens: 100/h}}")
    charge = take(it, tokens=100)
    it.apply(policy("{global: {tokens: 100/h}}"), 100.0)
    charge.settle(40, 100.0)
    take(it, tokens=60)
    refused(it, tokens=1)
    it.apply(policy(), 100.0)
    assert take(it).headers(100.0) == b""


@pytest.mark.parametrize(
    ("of_all", "of_a", "expected"),
    [
        ("{}", "{}", (False, False)),
        ("{per_tenant: {requests: 1/s}}", "{requests: 1/s}", (False, False)),
        ("{}", "{tokens: 1/s}", (True, False)),
        ("{}", "{models: {m: {tokens: 1/s}}}", (True, False)),
        ("{}", "{classes: {default: {tokens: 1/s}}}", (True, False)),
        ("{per_tenant: {tokens: 1/s}}", "{}", (True, True)),
        ("{global: {tokens: 1/s}}", "{}", (True, True)),
        ("{classes: {default: {tokens: 1/s}}}", "{}", (True, True)),
    ],
)
def test_whose_tokens_are_counted(of_all: str, of_a: str, expected: tuple[bool, bool]) -> None:
    it = book(of_all, f"{{a: {{limits: {of_a}}}, b: {{}}}}")
    assert (it.counts_tokens("a"), it.counts_tokens("b")) == expected


# -- before a body is read --------------------------------------------------------------------------------------------

SIX = """{
    global: {requests: 90/h}, per_tenant: {requests: 9/h, tokens: 99/h}, classes: {default: {requests: 8/h}},
    models: {m: {requests: 7/h, tokens: 98/h}}
}"""


def arriving(it: LimitBook, outcome: Outcome | None, tokens: int = 10) -> None:
    """A call to its end: refused with this outcome, or cancelled where it is None."""
    arrived = it.arrive("a", 100.0)
    error: BaseException = Cancelled() if outcome is None else Refused(outcome, "no")
    with pytest.raises(type(error)), it.charge("a", "default", "m", tokens, 100.0, arrived):
        raise error


class Cancelled(BaseException):
    """As asyncio's, which no `except Exception` sees."""


def levels(it: LimitBook) -> dict[str, float]:
    return {f"{key[0]} {''.join(key[1:])}": bucket.level for key, bucket in it._buckets.items()}


def test_a_request_is_taken_from_each_limit_once() -> None:
    it = book(SIX)
    arrived = it.arrive("a", 100.0)
    assert levels(it) == {"requests a": 1, "tokens a": 0, "requests ": 1}
    charge = it.charge("a", "default", "m", 10, 100.0, arrived)
    arrived.refund()
    charge.settle(7, 100.0)
    assert levels(it) == {
        "requests a": 1, "tokens a": 7, "requests ": 1, "requests default": 1, "requests m": 1, "tokens m": 7,
    }  # fmt: skip
    assert lines(charge.headers(100.0))["x-ratelimit-limit-requests"] == "7"


@pytest.mark.parametrize(
    ("outcome", "requests"),
    [
        (Outcome.NOT_FOUND, 1),
        (Outcome.FORBIDDEN, 1),
        (Outcome.TOO_LARGE, 1),
        (Outcome.EXPIRED, 1),
        (None, 1),
        (Outcome.QUEUE_FULL, 0),
        (Outcome.DEADLINE_UNREACHABLE, 0),
        (Outcome.UPSTREAM, 0),
        (Outcome.BUG, 0),
    ],
)
def test_a_request_is_given_back_only_where_its_client_did_nothing(outcome: Outcome | None, requests: int) -> None:
    it = book(SIX)
    arriving(it, outcome)
    assert set(levels(it).values()) == {0, requests}
    assert levels(it)["requests a"] == requests
    assert levels(it)["tokens a"] == 0


def test_a_request_that_is_refused_for_its_tokens_is_not_given_back() -> None:
    it = book(SIX)
    arrived = it.arrive("a", 100.0)
    with pytest.raises(Refused):
        it.charge("a", "default", "m", 99, 100.0, arrived)
    assert levels(it) == {
        "requests a": 1, "tokens a": 0, "requests ": 1, "requests default": 0, "requests m": 0, "tokens m": 0,
    }  # fmt: skip


def test_who_is_over_a_limit_is_told_so_before_his_body_is_read() -> None:
    it = book(SIX)
    for _ in range(9):
        it.arrive("a", 100.0)
    with pytest.raises(Refused, match="The limit of tenant a is 9/h requests") as limited:
        it.arrive("a", 100.0)
    assert lines(limited.value.headers)["x-ratelimit-remaining-tokens"] == "99"
    it.arrive("b", 100.0)


def test_where_nothing_is_limited_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ROUTES_REMEMBERED", 2)
    it = book("{classes: {default: {requests: 1/h}}}")
    for tenant in "abc":
        it.arrive(tenant, 100.0).refund()
    assert len(it._arrivals) == 2
    it.charge("a", "default", "m", 1, 100.0, it.arrive("a", 100.0))
    refused(it)
    assert book().arrive("a", 100.0).headers(100.0) == b""


def test_a_witness_is_told_of_every_charge_and_nothing_of_refusals() -> None:
    seen: list[tuple[Charge, Charge | None]] = []

    class Witness:
        def arrived(self, charge: Charge) -> None:
            seen.append((charge, None))

        def charged(self, charge: Charge, arrived: Charge | None) -> None:
            seen.append((charge, arrived))

    it = LimitBook(policy("{per_tenant: {requests: {rate: 1/min, burst: 1}}}"), Witness())
    arrived = it.arrive("a", 100.0)
    charged = it.charge("a", "default", "m", 10, 100.0, arrived)
    assert seen == [(arrived, None), (charged, arrived)]
    with pytest.raises(Refused):
        it.arrive("a", 100.0)
    assert len(seen) == 2


def test_the_level_of_a_limit_can_be_read() -> None:
    it = book("{per_tenant: {requests: 60/min}}")
    take(it)
    (key,) = it._buckets
    assert it.level(key) > 0.0
    assert book().level(key) == 0.0


def test_limits_that_something_was_asked_of_can_be_looked_at() -> None:
    it = LimitBook(policy("{per_tenant: {requests: 2/min}}"))
    assert list(it.buckets()) == []
    it.charge("a", "default", "m", 10, 0.0)
    assert [(bucket.key, bucket.left(0.0)) for bucket in it.buckets()] == [(("requests", "a", "", ""), 1)]
