"""Money of own engines: the price of an hour, and how calls share the time of an engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.money.book import MoneyBook
from gateway.core.money.engine_time import HOME
from gateway.core.money.tariff import MICRO, HourlyPrice
from gateway.core.policy.file import decode, explain
from gateway.shared.files.checked import InvalidFile
from gateway.shared.files.kinds import meant
from tests.core.money.test_money import NOW, book, call

HOUR = 3600.0


def priced(price: str = "2/hour") -> MoneyBook:
    made = book()
    made.apply(decode(f"engines_price: {price}\nstorage: kept\n".encode()))
    return made


def totals(money: MoneyBook) -> dict[str, tuple[int, int]]:
    """Micro-units and tokens, by tenant."""
    assert {provider for provider, _, _ in money.totals} <= {HOME}
    return {tenant: total for (_, tenant, _), total in money.totals.items()}


@pytest.mark.parametrize(
    ("text", "micro"), [("2.10/hour", 2_100_000), ("0.000001/hour", 1), ("10000/hour", 10_000 * MICRO)]
)
def test_a_price_of_an_hour_is_read_and_written(text: str, micro: int) -> None:
    read = HourlyPrice.parse(text)
    assert read == HourlyPrice(micro)
    assert HourlyPrice.parse(str(read)) == read


@pytest.mark.parametrize(
    "text",
    ["", "2.10", "/hour", "-1/hour", "0/hour", "0.0000001/hour", "10000.1/hour", "100000/hour", "nan/hour", "inf/hour",
     "1e3/hour", "2/day", "2 /hour", "$2/hour", "2,1/hour", "\u0661/hour"],
)  # fmt: skip
def test_no_other_text_is_a_price_of_an_hour(text: str) -> None:
    assert HourlyPrice.parse(text) is None


@pytest.mark.parametrize("text", ["2.1", "$2.1", "2.1 / h", "2.1/hr", "2.1 /hour"])
def test_a_malformed_price_of_an_hour_gets_its_correction(text: str) -> None:
    assert meant(text, HourlyPrice) == "2.1/hour"


@pytest.mark.parametrize("price", ["-2/hour", "0/hour", ".nan", "20000/hour", "2.10", "{hour: 2.10}"])
def test_a_bad_price_is_told_with_its_line(price: str) -> None:
    with pytest.raises(InvalidFile) as raised:
        decode(f"storage: kept\nengines_price: {price}\n".encode())
    (problem,) = raised.value.problems
    assert (problem.at.line, problem.expected) == (2, HourlyPrice.what)


def test_a_price_is_explained_as_it_is_read() -> None:
    read = decode(b"storage: kept\nengines_price: 2.10/hour\n")
    assert decode(explain(read).encode(), "explained") == read


def test_calls_share_the_time_of_an_engine_by_the_tokens_that_they_hold() -> None:
    money = priced("3.6/hour")  # 1000 micro-units a second
    first = money.begin("e", call(tenant="acme"), 200, NOW)
    second = money.begin("e", call(tenant="other"), 800, NOW + 10)
    first.usage, second.tokens = (90, 50, 10), 1200
    assert money.meters.held == {"e": 1000}
    first.end(NOW + 14)
    first.end(NOW + 99)
    second.end(NOW + 15)
    # ten seconds alone, and a fifth of four; four fifths of four, and one alone
    assert totals(money) == {"acme": (10_800, 100), "other": (4_200, 1200)}


def test_time_without_calls_and_other_engines_cost_nothing() -> None:
    money = priced("3.6/hour")
    for at in (NOW, NOW + HOUR):
        one, beside = money.begin("e", call(), 10, at), money.begin("other", call(), 1_000_000, at)
        one.end(at + 1)
        beside.end(at + 1)
    assert totals(money) == {"acme": (4_000, 0)}
    assert not money.meters.held, "an engine that is gone leaves nothing"


def test_a_call_costs_no_less_than_nothing() -> None:
    money = priced("3.6/hour")
    money.begin("e", call(), 0, NOW).end(NOW + 1)
    first = money.begin("e", call(tenant="other"), 10, NOW + 2)
    second = money.begin("e", call(), 10, NOW + 1.5)  # the clock was read before the first one's
    first.end(NOW + 2)
    second.end(NOW + 3)
    assert totals(money) == {"acme": (2_000, 0), "other": (0, 0)}


def test_what_a_failed_call_held_is_paid_and_its_tokens_are_none() -> None:
    money = priced("3.6/hour")
    failed = money.begin("e", call(), 10, NOW)
    failed.unbilled = True
    failed.end(NOW + 2)
    assert totals(money) == {"acme": (2_000, 0)}


def test_a_reload_changes_the_price_or_ends_it_and_what_was_spent_stays() -> None:
    money = priced("3.6/hour")
    open_call = money.begin("e", call(), 10, NOW)
    money.begin("e", call(tenant="other"), 10, NOW + 1).end(NOW + 1)
    money.apply(decode(b"engines_price: 7.2/hour\nstorage: kept\n"))
    assert money
    money.begin("e", call(tenant="other"), 10, NOW + 2).end(NOW + 2)
    money.apply(decode(b"storage: kept\n"))
    assert not money
    open_call.end(NOW + 3)
    assert totals(money)["acme"] == (3_000, 0), "1 s at the first price, 1 s at the second, 1 s at none"
    assert not money.exhaust(NOW), "it has no budgets"


def test_it_goes_on_after_a_restart() -> None:
    money, after = priced(), priced()
    money.begin("e", call(), 10, NOW).end(NOW + HOUR)
    after.restore(money.states(NOW + HOUR), NOW + HOUR, kept=True)
    after.begin("e", call(), 10, NOW + HOUR).end(NOW + 2 * HOUR)
    used = {span: line.money.used(NOW + 2 * HOUR) for (_, _, _, span), line in after.lines.items()}
    assert used == {"day": 4 * MICRO, "month": 4 * MICRO}


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 10**6), st.floats(0, 60), st.floats(0.001, 60)),
        min_size=1,
        max_size=40,
    )
)
def test_calls_together_pay_for_the_time_of_their_engine_exactly(calls: list[tuple[str, int, float, float]]) -> None:
    money = priced("2.1/hour")
    events = [(NOW + began, 0, number) for number, (_, _, began, _) in enumerate(calls)]
    events += [(NOW + began + lasted, 1, number) for number, (_, _, began, lasted) in enumerate(calls)]
    shares, busy, since = {}, 0.0, NOW
    for at, ends, number in sorted(events):
        busy += at - since if shares else 0.0
        since = at
        if ends:
            shares.pop(number).end(at)
        else:
            tenant, tokens, _, _ = calls[number]
            shares[number] = money.begin("e", call(tenant=tenant), tokens, at)
    paid = sum(micro for micro, _ in totals(money).values())
    assert abs(paid - busy * 2.1 * MICRO / HOUR) < 1.6, "half a micro-unit for each of three tenants"
