"""Money of providers: prices, highest costs, reservations, what a call is charged, shares, and marks that run ahead."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from gateway.core.admission.quotas import DAY, HELD, Calendar
from gateway.core.money.book import MoneyBook, Spending, Spent
from gateway.core.money.purse import CALLS, LOT
from gateway.core.money.tariff import MICRO, Tariff
from gateway.core.policy.file import decode, explain
from gateway.core.policy.policy import Policy
from gateway.core.policy.providers import MoneyLimit
from gateway.core.request.call import Call
from gateway.core.request.routes import ROUTES
from gateway.shared.files.kinds import meant

NOON = 1_764_504_000.0  # 2025-11-30 12:00 UTC, the last day of its month
NOW = 1000.0
CHAT = ROUTES[b"/v1/chat/completions"]


def policy(budget: str = "[1/day]", prices: str = "1/0.5/2") -> Policy:
    return decode(
        f"""\
tenants: {{acme: {{}}, other: {{}}}}
storage: kept
models: {{chat: {{members: [home], fallback: [mini]}}}}
providers:
  cloud:
    url: https://api.example.com/v1
    key_file: cloud.key
    models: {{mini: small}}
    prices: {prices}
    budget: {budget}
    tenants: [acme, other]
    classes: [default]
""".encode()
    )


def book(budget: str = "[1/day]", *, ahead: bool = False) -> MoneyBook:
    """Book whose monotonic clock began 1000 s before NOON."""
    return MoneyBook(policy(budget), Calendar(NOON - NOW), ahead=ahead)


def call(prompt: int = 1000, output: int = 1000, *, tenant: str = "acme", size: int = 0, n: int = 1) -> Call:
    made = Call(
        request_id="r", route=CHAT, model="mini", tenant=tenant, class_name="default", arrived=0.0, deadline=60.0,
        stream=True, n=n, leaves=size,
    )  # fmt: skip
    made.prompt_tokens, made.asked = prompt, output
    return made


def spend(from_: MoneyBook, made: Call | None = None, now: float = NOW) -> Spending:
    made = made or call()
    assert from_.may_spend("cloud", made, now)
    return from_.reserve("cloud", made, now)


def amounts(from_: MoneyBook, now: float = NOW) -> dict[tuple[str, str], tuple[int, int]]:
    """Spent and reserved, by tenant ("": all) and window."""
    return {
        (tenant, purse.window.span): (purse.window.used(now), purse.window.reserved)
        for _, tenant, purse in from_.purses()
    }


# -- prices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "micro"),
    [((0, 0, 0), 0), ((1, 0, 0), 1), ((10, 4, 0), 8), ((10, 50, 1), 7), ((1_000_000, 0, 1_000_000), 3 * MICRO)],
    ids=["nothing", "rounded up", "cached", "more cached than there are", "millions"],
)
def test_a_cost_is_exact_and_rounded_up_once(tokens: tuple[int, int, int], micro: int) -> None:
    assert Tariff(MICRO, MICRO // 2, 2 * MICRO).cost(*tokens) == micro


@pytest.mark.parametrize(
    ("text", "tariff"),
    [
        ("0.15/0.60", (150_000, 150_000, 600_000)),
        ("0.15/0.075/0.6", (150_000, 75_000, 600_000)),
        ("0.000001/10000", (1, 1, 10_000 * MICRO)),
        ("10000/0.000001/1", (10_000 * MICRO, 1, MICRO)),
        ("1/1/2", (MICRO, MICRO, 2 * MICRO)),
    ],
)
def test_prices_are_exact_and_cached_prompt_costs_as_much_as_other_unless_it_has_its_own(
    text: str, tariff: tuple[int, int, int]
) -> None:
    read = Tariff.parse(text)
    assert read == Tariff(*tariff)
    assert Tariff.parse(str(read)) == read


@pytest.mark.parametrize(
    "text",
    [
        "", "1", "1/", "/1", "1/2/3/4", "-1/2", "1/-2", "1e3/2", "0/1", "1/0", "1/0/1", "1/2/1", "0.0000001/1",
        "10000.1/1", "1/10000.000001", "99999/99999", "100000/1", "nan/1", "1 / 2", "$1/$2", "1,5/2", "\u0661/1",
    ],
)  # fmt: skip
def test_no_other_text_is_prices(text: str) -> None:
    assert Tariff.parse(text) is None


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("20/day", (20.0, "day")),
        ("0.01/month", (0.01, "month")),
        ("100000000/month", (100_000_000.0, "month")),
        ("0.1%/tenant", (0.001, "tenant")),
        ("100%/tenant", (1.0, "tenant")),
    ],
)
def test_a_limit_of_money_is_read_and_written(text: str, limit: tuple[float, str]) -> None:
    read = MoneyLimit.parse(text)
    assert read is not None
    assert (read.amount, read.per, str(read)) == (*limit, text)


@pytest.mark.parametrize(
    "text",
    [
        "", "20", "20/week", "0/day", "0.009/day", "100000001/day", "-1/day", "1e3/day", "50/tenant", "50%/day",
        "0%/tenant", "0.09%/tenant", "101%/tenant", "20 / day", "999999999/month",
    ],
)  # fmt: skip
def test_no_other_text_is_a_limit_of_money(text: str) -> None:
    assert MoneyLimit.parse(text) is None


@given(st.integers(100_000, 100_000_000), st.sampled_from((1, 100, 100_000)))
@example(65_600_000, 100_000)  # 65.6%
def test_each_share_of_a_tenant_is_written_as_it_is_read(millionths: int, step: int) -> None:
    share = Decimal(max(100_000, millionths - millionths % step)).scaleb(-6).normalize()
    read = MoneyLimit.parse(f"{share:f}%/tenant")
    assert read is not None
    assert str(read) == f"{share:f}%/tenant"


def test_a_budget_is_explained_as_it_is_read() -> None:
    read = policy("[20/day, 65.6%/tenant]")
    assert decode(explain(read).encode(), "explained") == read


def test_what_was_meant_by_prices_as_a_price_list_has_them() -> None:
    assert list(Tariff.meant("$0.15 / $0.60")) == ["0.15/0.60"]
    assert meant("$20 / day", MoneyLimit) == "20/day"


def test_the_highest_cost_has_each_byte_as_a_token_and_the_longest_of_all_answers() -> None:
    tariff = Tariff(3 * MICRO, MICRO, 2 * MICRO)
    assert tariff.highest(call(10, 100, size=40, n=2)) == 3 * (10 + 40) + 2 * 200
    shaped = call(10, 100)
    shaped.shaped = 7
    assert tariff.highest(shaped) == 3 * 10 + 2 * 7


# -- one call ---------------------------------------------------------------------------------------------------------


def test_the_highest_cost_is_reserved_and_the_real_one_is_spent() -> None:
    money = book()
    spending = spend(money)
    assert amounts(money) == {("", "day"): (0, 3000)}
    spending.usage = (900, 100, 50)
    spending.end(NOW)
    spending.end(NOW)
    assert amounts(money) == {("", "day"): (800 + 50 + 100, 0)}
    assert money.totals == {("cloud", "acme", "mini"): (950, 950)}


@pytest.mark.parametrize(
    ("usage", "tokens", "unbilled", "micro"),
    [
        ((10**9, 0, 10**9), None, False, 3000),
        ((-5, 0, 10), None, False, 3000),
        ((0, 0, 0), None, False, 3000),
        ((5, -1, 0), None, False, 3000),
        ((5, 0, -1), 1001, False, 3000),
        (None, None, False, 3000),
        (None, -1, False, 3000),
        (None, 1100, False, 1200),
        (None, 10, False, 1000),
        (None, None, True, 0),
    ],
    ids=[
        "absurd", "negative", "of nothing", "negative cached", "negative answer", "nobody told", "negative estimate",
        "cut short", "cut short at once", "refused by the provider",
    ],
)  # fmt: skip
def test_no_usage_costs_more_than_was_reserved_and_a_lie_costs_all_of_that(
    usage: tuple[int, int, int] | None, tokens: int | None, unbilled: bool, micro: int
) -> None:
    money = book()
    spending = spend(money)
    spending.usage, spending.tokens, spending.unbilled = usage, tokens, unbilled
    spending.end(NOW)
    assert amounts(money) == {("", "day"): (micro, 0)}


def test_two_hundred_calls_at_the_edge_of_a_budget_spend_no_more_than_that() -> None:
    money = book("[0.01/day]")  # 10,000 micro-units: three calls of 3000
    gone = []
    for _ in range(200):
        if money.may_spend("cloud", call(), NOW):
            gone.append(money.reserve("cloud", call(), NOW))
    assert len(gone) == 3
    assert money.spent_until("cloud", call(), NOW) == HELD, "calls under way may cost less in the end"
    assert money.spent_until("cloud", call(10_000, 1), NOW) == math.inf
    for spending in gone:
        spending.end(NOW)  # nobody tells what they used
    assert amounts(money) == {("", "day"): (9000, 0)}
    assert not money.may_spend("cloud", call(), NOW)
    assert money.spent_until("cloud", call(), NOW) == DAY / 2
    assert money.may_spend("cloud", call(500, 250), NOW), "1000 are left"
    assert money.spent_until("cloud", call(500, 250), NOW) is None


def test_the_tighter_of_day_and_month_binds_and_a_new_day_begins_with_nothing_spent() -> None:
    money = book("[0.01/day, 0.011/month]")
    for _ in range(3):
        spend(money).end(NOW)
    assert not money.may_spend("cloud", call(), NOW)
    assert money.may_spend("cloud", call(), NOW + DAY), "a day and a month later"
    money = MoneyBook(policy("[0.01/day, 0.011/month]"), Calendar(NOON - NOW - 3 * DAY), ahead=False)
    for _ in range(3):
        spend(money).end(NOW)
    assert money.spent_until("cloud", call(), NOW) == 3 * DAY + DAY / 2
    assert not money.may_spend("cloud", call(), NOW + DAY), "the month has 2000 left"
    assert money.may_spend("cloud", call(1000, 500), NOW + DAY)


def test_what_is_reserved_goes_on_into_the_next_day() -> None:
    money = book("[0.01/day]")
    spending = [spend(money) for _ in range(3)]
    assert not money.may_spend("cloud", call(), NOW + DAY)
    for each in spending:
        each.end(NOW + DAY)
    assert amounts(money, NOW + DAY) == {("", "day"): (9000, 0)}


def test_one_tenant_spends_no_more_than_its_share() -> None:
    money = book("[0.01/day, 35%/tenant]")
    spend(money)
    assert not money.may_spend("cloud", call(), NOW)
    spend(money, call(tenant="other"))
    assert amounts(money) == {("", "day"): (0, 6000), ("acme", "day"): (0, 3000), ("other", "day"): (0, 3000)}


def test_a_reload_keeps_what_is_spent_and_calls_settle_at_the_price_they_went_for() -> None:
    money = book("[0.01/day]")
    spending = spend(money)
    money.apply(policy("[0.02/day]", "100/100"))
    spending.end(NOW)
    assert amounts(money) == {("", "day"): (3000, 0)}
    money.apply(Policy())
    assert not money
    assert not money.may_spend("cloud", call(), NOW)
    assert money.spent_until("cloud", call(), NOW) is None
    money.apply(policy("[0.02/day]"))
    assert amounts(money) == {("", "day"): (3000, 0)}


# -- marks ------------------------------------------------------------------------------------------------------------


def test_nothing_is_spent_before_the_gateway_before_is_known_nor_beyond_the_mark() -> None:
    money, heard = book(ahead=True), list[None]()
    money.short = lambda: heard.append(None)
    assert not money.may_spend("cloud", call(), NOW)
    assert not heard
    money.restore([], NOW, kept=True)
    assert not money.may_spend("cloud", call(), NOW)
    assert heard, "a mark is to be raised"
    states = money.states(NOW)
    assert [each.micro for each in states] == [CALLS * 3000], "a lot would be less"
    money.keep(states)
    for _ in range(CALLS):
        spend(money)
    assert not money.may_spend("cloud", call(), NOW)
    assert money.spent_until("cloud", call(), NOW) is None, "it is no budget that is spent"
    money.keep(money.states(NOW))
    assert money.may_spend("cloud", call(), NOW)


def test_a_mark_is_raised_by_a_lot_once_half_of_its_lead_is_used() -> None:
    money = book("[10/day]", ahead=True)
    money.restore([], NOW, kept=True)
    money.keep(money.states(NOW))
    lot = 10 * MICRO // LOT
    assert [each.micro for each in money.states(NOW)] == [lot]
    spend(money, call(lot // 2, 0))
    assert [each.micro for each in money.states(NOW)] == [lot]
    spend(money, call(1, 0))
    assert [each.micro for each in money.states(NOW)] == [lot + lot // 2 + 1]


def test_a_mark_is_no_more_than_the_budget() -> None:
    money = book("[0.01/day]", ahead=True)
    money.restore([], NOW, kept=True)
    money.may_spend("cloud", call(), NOW)
    money.keep(money.states(NOW))
    for _ in range(3):
        spend(money)
    assert [each.micro for each in money.states(NOW)] == [10_000]
    assert money.may_spend("cloud", call(500, 250), NOW)


def test_after_a_kill_the_mark_counts_as_spent_and_after_an_end_what_was_promised() -> None:
    money = book("[0.1/day, 50%/tenant]", ahead=True)
    money.restore([], NOW, kept=True)
    money.may_spend("cloud", call(), NOW)
    money.keep(money.states(NOW))
    spend(money).end(NOW)
    spend(money)
    killed = book("[0.1/day, 50%/tenant]", ahead=True)
    killed.restore(money.states(NOW), NOW, kept=True)
    assert amounts(killed)["", "day"] == (CALLS * 3000, 0)
    assert killed.totals == {}
    assert [(key, line.money.used(NOW)) for key, line in killed.lines.items()] == [
        (("cloud", "acme", "mini", span), 3000) for span in ("day", "month")
    ]
    ended = book("[0.1/day, 50%/tenant]", ahead=True)
    ended.restore(money.states(NOW, last=True), NOW, kept=True)
    assert amounts(ended) == {("", "day"): (6000, 0), ("acme", "day"): (6000, 0), ("other", "day"): (0, 0)}


def test_a_leader_that_is_no_more_spends_nothing_before_the_amounts_are_here_again() -> None:
    money = book(ahead=True)
    for _ in range(2):
        assert not money.may_spend("cloud", call(), NOW)
        money.restore([], NOW, kept=True)
        money.may_spend("cloud", call(), NOW)
        money.keep(money.states(NOW))
        assert money.may_spend("cloud", call(), NOW)
        money.forget()


def test_budgets_count_as_spent_where_nobody_knows_until_they_renew() -> None:
    money = book()
    assert money.exhaust(NOW)
    assert amounts(money) == {("", "day"): (MICRO, 0)}
    assert not money.may_spend("cloud", call(), NOW)
    assert money.may_spend("cloud", call(), NOW + DAY)
    assert not MoneyBook(decode(b"{}"), Calendar(NOON - NOW)).exhaust(NOW), "there is no budget"


def test_a_mark_of_a_provider_that_a_reload_has_removed_raises_none() -> None:
    money = book(ahead=True)
    money.restore([], NOW, kept=True)
    money.keep([Spent("gone", "", "", "day", 0, 5_000_000, 0)])
    assert not money.may_spend("cloud", call(), NOW)


def test_a_mark_of_yesterday_lets_nothing_out_today() -> None:
    money = book(ahead=True)
    money.restore([], NOW, kept=True)
    money.keep(money.states(NOW))
    assert money.may_spend("cloud", call(), NOW)
    assert not money.may_spend("cloud", call(), NOW + DAY)
    late = book(ahead=True)
    late.restore(money.states(NOW), NOW + DAY, kept=True)
    assert amounts(late, NOW + DAY) == {("", "day"): (0, 0)}
    money.keep(money.states(NOW + DAY))
    assert money.may_spend("cloud", call(), NOW + DAY)


def test_a_clock_that_is_wrong_for_a_while_gives_no_budget_twice() -> None:
    calendar = Calendar(NOON - NOW)
    kept = MoneyBook(policy("[1/day]"), calendar, ahead=False)
    made = spend(kept)
    made.usage = (1000, 0, 1000)
    made.end(NOW)
    spent = amounts(kept)["", "day"]
    assert spent[0] > 0
    calendar.offset += 86_400
    spend(kept).end(NOW)
    calendar.offset -= 86_400
    assert amounts(kept)["", "day"] == spent


@pytest.mark.parametrize("restarted", [False, True])
def test_a_new_budget_has_in_it_what_was_spent_before(restarted: bool) -> None:
    old = book("[1/day]")
    for tenant in ("acme", "other"):
        made = spend(old, call(tenant=tenant))
        made.usage = (1000, 0, 1000)
        made.end(NOW)
    one = sum(micro for micro, _ in old.totals.values()) // 2
    assert one > 0
    new = "[1/day, 2/month, 50%/tenant]"
    if restarted:
        kept = old.states(NOW, last=True)
        old = book(new)
        old.restore(kept, NOW, kept=True)
    else:
        old.apply(policy(new))
    assert amounts(old) == {
        ("", "day"): (2 * one, 0), ("", "month"): (2 * one, 0),
        ("acme", "day"): (one, 0), ("acme", "month"): (one, 0),
        ("other", "day"): (one, 0), ("other", "month"): (one, 0),
    }  # fmt: skip
    old.apply(policy(new))
    assert amounts(old)["acme", "day"] == (one, 0), "nothing counts twice"


@pytest.mark.parametrize("usage", [None, (100, 0, 50)], ids=["nobody told", "less than reserved"])
def test_a_budget_that_a_reload_adds_counts_the_calls_under_way(usage: tuple[int, int, int] | None) -> None:
    money = book("[1/month]")
    under_way, *ended = [spend(money) for _ in range(3)]
    for each in ended:
        each.end(NOW)
    new = "[0.01/day, 1/month, 90%/tenant]"
    for _ in range(2):
        money.apply(policy(new))
        assert amounts(money)["", "day"] == amounts(money)["acme", "day"] == (6000, 3000), "no reload counts twice"
        assert amounts(money)["other", "day"] == (0, 0)
    assert not money.may_spend("cloud", call(), NOW), "1000 are left"
    under_way.usage = usage
    under_way.end(NOW)
    cost = 3000 if usage is None else 200
    for tenant in ("", "acme"):
        for span in ("day", "month"):
            assert amounts(money)[tenant, span] == (6000 + cost, 0)
    money.apply(policy(new.replace("day: 0.01", "day: 0.02")))
    assert amounts(money)["", "day"] == (6000 + cost, 0)


class Counted(str):
    """Name that counts its comparisons with names that are not the same object."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_what_is_to_be_kept_is_asked_of_the_lines_that_have_changed_alone() -> None:
    money = book()
    for tenant in ("acme", "globex", "acme"):
        money.changed.clear()
        spend(money, call(tenant=tenant)).end(NOW)
    changed = money.states(NOW, money.changed)
    assert {(each.tenant, each.span) for each in changed if each.model} == {("acme", "day"), ("acme", "month")}
    assert {each for each in changed if not each.model} == {each for each in money.states(NOW) if not each.model}
    unbilled = spend(money, call(tenant="initech"))
    unbilled.unbilled = True
    unbilled.end(NOW)
    assert {each.tenant for each in money.states(NOW) if each.model} == {"acme", "globex"}, "nothing has no row"


@pytest.mark.parametrize("restarted", [False, True])
def test_a_reload_and_a_restart_take_as_many_steps_for_each_tenant_however_many_there_are(restarted: bool) -> None:
    names = [Counted(f"tenant{number}") for number in range(300)]
    given = policy("[1/day, 2/month, 50%/tenant]")
    given = structs.replace(given, providers={"cloud": structs.replace(given.providers["cloud"], tenants=tuple(names))})
    money = MoneyBook(given, Calendar(NOON - NOW), ahead=False)
    for name in names:
        spend(money, call(tenant=name)).end(NOW)
    kept = money.states(NOW, last=True)
    Counted.compared = 0
    if restarted:
        money = MoneyBook(given, Calendar(NOON - NOW), ahead=False)
        money.restore(kept, NOW, kept=True)
    else:
        money.apply(given)
    assert amounts(money)["", "day"] == (900_000, 0)
    assert Counted.compared < 20 * len(names)
