"""Row about money: interactive calls and a provider, beside the least that those cost which must leave.

The least is counted in hindsight: the calls whose tokens are cheapest leave, until the tokens of the others are no more
than the capacity.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gateway.core.money.tariff import Tariff
from loadtest.clients.calls import Try
from loadtest.lab.figures.runs import MIX, Setting, in_time, tokens
from loadtest.lab.rows import Row, percent
from loadtest.load.plan import poisson

TARIFF = Tariff(150_000, 150_000, 600_000)  # for a million tokens: 0.15 and 0.60
POLICY = b"""
classes: {interactive: {weight: 8, ttft: 2s, deadline: 60s, max_queue: 256}, default: {}}
storage: kept
models: {sim-or-cloud: {members: [sim], fallback: [outside]}}
providers:
  cloud: {url: https://api.example.com/v1, key_file: cloud.key, models: {outside: small}, prices: %b,
          budget: [1000000/day], tenants: [anonymous], classes: [interactive]}
""" % str(TARIFF).encode()
FACTORS = (0.8, 1.5, 3.0)  # of the capacity


def row_money(setting: Setting) -> list[Row]:
    """Spill what would be late, and what cannot start at once."""
    mix = (msgspec.structs.replace(MIX[0], share=1.0),)
    own = msgspec.structs.replace(setting, mix=mix, policy=POLICY, capacity=None)
    capacity, rows = own.saturated(), list[Row]()
    routed = (msgspec.structs.replace(mix[0], model="sim-or-cloud"),)
    for by_load in (False, True):
        for factor in FACTORS:
            what = f"{factor:g}x, {'as soon as a call waits' if by_load else 'spill: late'}"
            calls = poisson(routed, factor * capacity.calls, own.ends, own.seed)
            tries = own.run(what, calls, grace=60.0, by_load=by_load)
            sent = [tried for tried in tries if own.warm <= tried.sent < own.ends]
            rows.append(_row(own, what, sent, capacity.tokens * own.measured))
    return rows


def _row(setting: Setting, what: str, sent: list[Try], able: float) -> Row:
    good = sum(in_time(tried, setting.targets) for tried in sent if tried.number == 1) / max(1, len(sent))
    left = [tried for tried in sent if tried.outcome == "ok" and tried.engine.startswith("provider:")]
    spent, least = sum(map(cost, left)), least_money(sent, able)
    value = f"{percent(good)}; {percent(len(left) / max(1, len(sent)))}; {spent / least if least else spent:.2f}"
    return Row(name="money", what=f"{what}: in time; leave the house; money over the least", value=value)


def cost(tried: Try) -> int:
    """Micro-units that the call costs at the provider, whoever serves it."""
    return TARIFF.cost(tried.prompt_tokens, 0, tried.completion_tokens)


def least_money(sent: Iterable[Try], able: float) -> float:
    """Micro-units for which the tokens of the calls that stay are no more than `able`; one call leaves in part."""
    calls = sorted(filter(tokens, sent), key=lambda tried: cost(tried) / tokens(tried))
    over, money = sum(map(tokens, calls)) - able, 0.0
    for tried in calls:
        share = min(1.0, max(0.0, over / tokens(tried)))
        money += share * cost(tried)
        over -= tokens(tried)
    return money
