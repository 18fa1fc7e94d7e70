"""Figure of providers: the money that calls cost which the own engines cannot serve in time, beside the least.

All calls are interactive. The least money is a bound that no policy can beat: in hindsight, the calls with the lowest
price for a token leave the house until the tokens of the others are no more than the engines can do in that time.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gateway.core.money.tariff import MICRO, Tariff
from loadtest.lab.figures.runs import MIX, Measured, Setting, in_time, tokens
from loadtest.lab.rows import Row
from loadtest.load.plan import poisson
from loadtest.simulate.inprocess import targets_of
from loadtest.simulate.simulated_client import Try

PROMPT, COMPLETION = 0.15, 0.60  # for a million tokens
TARIFF = Tariff(int(PROMPT * MICRO), int(PROMPT * MICRO), int(COMPLETION * MICRO))
POLICY = f"""
classes:
  interactive: {{weight: 8, ttft: 2s, deadline: 60s, max_queue: 256}}
  default: {{}}
storage: kept
models: {{sim-or-cloud: {{members: [sim], fallback: [outside]}}}}
providers:
  cloud:
    url: https://api.example.com/v1
    key_file: cloud.key
    models: {{outside: small}}
    prices: {{prompt: {PROMPT}, completion: {COMPLETION}}}
    budget: {{day: 1000000}}
    tenants: [anonymous]
    classes: [interactive]
    max_concurrency: 4096
""".encode()
# The same, but for a call that leaves as soon as another waits: by load, and by no prediction.
BY_LOAD = POLICY.replace(b"max_queue: 256", b"max_queue: 1") + b"deadlines: {predict: false}\n"


def outside(setting: Setting) -> list[Row]:
    """Interactive calls at 0.8, 1.5 and 3 times the capacity, with a provider."""
    mix = (msgspec.structs.replace(MIX[0], share=1.0),)
    bare = Setting(
        engines=setting.engines, seed=setting.seed, warm=setting.warm, measured=setting.measured, mix=mix,
        progress=setting.progress,
    )  # fmt: skip
    capacity, rows = bare.saturated(), list[Row]()
    routed = (msgspec.structs.replace(mix[0], model="sim-or-cloud"),)
    for name, policy in (("late", POLICY), ("load", BY_LOAD)):
        bare.policy, bare.targets = policy, targets_of(policy)
        for factor in (0.8, 1.5, 3.0):
            calls = poisson(routed, factor * capacity.calls, bare.ends, setting.seed)
            made = bare.run(f"{factor:g}x load, spill by {name}", calls, grace=60.0)
            rows.append(_row(bare, name, factor, made, capacity.tokens * bare.measured))
    setting.known |= bare.known
    setting.tries += bare.tries
    return rows


def _row(setting: Setting, name: str, factor: float, made: Measured, able: float) -> Row:
    sent = [each for each in made.result.tries if setting.warm <= each.sent < setting.ends]
    firsts = [each for each in sent if each.number == 1]
    left = [each for each in sent if each.outcome == "ok" and not each.engine.startswith("engine-")]
    ttft = setting.targets["interactive"].ttft
    good = [each for each in sent if in_time(each, setting.targets) and each.first_byte - each.intended <= ttft]
    spent, least = sum(map(cost, left)), cheapest(sent, able)
    share = len(left) / max(1, len(firsts))
    ratio = spent / least if least else float("inf") if spent else 1.0
    small = factor < 1.0
    return Row(
        name="money",
        what=f"interactive at {factor:g}x, spill by {name}: in time; leave the house; money an hour",
        value=f"{len(good) / max(1, len(firsts)):.2%}; {share:.2%}; {3600 * spent / MICRO / setting.measured:.2f}",
        baseline=f"least money {3600 * least / MICRO / setting.measured:.2f}: {ratio:.2f} times that",
        milestone="" if name == "load" else "< 0.1 % leave" if small else ">= 99 % in time; <= 1.1 times the least",
        met=None if name == "load" else share < 0.001 if small else len(good) >= 0.99 * len(firsts) and ratio <= 1.1,
    )


def cost(tried: Try) -> int:
    """Micro-units of the call at the provider, whoever has served it."""
    return TARIFF.cost(tried.prompt_tokens, 0, tried.completion_tokens)


def cheapest(sent: Iterable[Try], able: float) -> float:
    """The least micro-units for which the calls that stay have no more tokens than `able`, one call in part."""
    calls = sorted([each for each in sent if tokens(each)], key=lambda each: cost(each) / tokens(each))
    over, money = sum(map(tokens, calls)) - able, 0.0
    for each in calls:
        if over <= 0:
            break
        money += min(1.0, over / tokens(each)) * cost(each)
        over -= tokens(each)
    return money
