"""Properties of rate limits under any traffic: equal to GCRA as it is defined, in exact arithmetic."""

from __future__ import annotations

import copy
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.admission.limits import Charge, LimitBook
from gateway.core.policy.policy import Policy
from gateway.core.policy.traffic import Limit, Limits, RateLimit, Tenant, TenantLimits
from gateway.core.policy.types import Rate
from gateway.core.request.outcome import Refused
from tests.examples import examples

TENANTS, CLASSES, MODELS = ("a", "b"), ("default", "batch"), ("m", "n")

# Amounts per second and times in sixteenths: floats are then exact, and so every decision must be GCRA's.
quotas = st.builds(
    lambda amount, burst: RateLimit(rate=Rate(amount, 1.0), burst=burst),
    st.integers(1, 20),
    st.none() | st.integers(1, 60),
)
quantities = st.none() | st.just("unlimited") | quotas
some_limit = st.builds(Limit, requests=quantities, tokens=quantities)
of_classes = st.dictionaries(st.sampled_from(CLASSES), some_limit, max_size=2)
of_models = st.dictionaries(st.sampled_from(MODELS), some_limit, max_size=2)
tenants = st.fixed_dictionaries({
    name: st.builds(Tenant, limits=st.builds(
        TenantLimits, requests=quantities, tokens=quantities, classes=of_classes, models=of_models
    ))
    for name in TENANTS
})  # fmt: skip
limits = st.builds(
    Limits, global_=some_limit, per_tenant=some_limit,
    classes=of_classes, models=of_models,
)  # fmt: skip
policies = st.builds(Policy, tenants=tenants, limits=limits)
calls = st.tuples(st.sampled_from(TENANTS), st.sampled_from(CLASSES), st.sampled_from(MODELS))
tokens = st.integers(0, 40)
pauses = st.integers(0, 24).map(lambda sixteenths: sixteenths / 16)
steps = st.lists(
    st.tuples(pauses, st.just("charge"), calls, tokens)
    | st.tuples(pauses, st.sampled_from(["settle", "refund", "keep"]), st.integers(0, 30), tokens),
    min_size=6,
    max_size=40,
)


class Reference:
    """GCRA by theoretical arrival times, as the ATM Forum and I.371 define it, and levels as the policy words them."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.tat: dict[tuple[str, str], Fraction] = {}

    def quotas(self, tenant: str, class_name: str, model: str) -> dict[tuple[str, str], RateLimit]:
        limits, own = self.policy.limits, self.policy.tenants[tenant].limits
        none = Limit()
        levels = {
            f"{tenant} {model}": (own.models.get(model, none), none),
            f"{tenant} {class_name}": (own.classes.get(class_name, none), none),
            tenant: (own, limits.per_tenant),
            class_name: (limits.classes.get(class_name, none), none),
            model: (limits.models.get(model, none), none),
            "global": (limits.global_, none),
        }
        found: dict[tuple[str, str], RateLimit] = {}
        for level, (specific, default) in levels.items():
            for kind in ("requests", "tokens"):
                quota = getattr(specific, kind) or getattr(default, kind)
                if isinstance(quota, RateLimit):
                    found[level, kind] = quota
        return found

    def take(self, call: tuple[str, str, str], tokens: int, now: float) -> bool:
        at, after = Fraction(now), {}
        for key, quota in self.quotas(*call).items():
            emission = Fraction(1, quota.rate.amount)
            amount = 1 if key[1] == "requests" else tokens
            tat = max(self.tat.get(key, at), at) + amount * emission
            if tat - at > (quota.burst or quota.rate.amount) * emission:
                return False
            after[key] = tat
        self.tat |= after
        return True

    def correct(self, call: tuple[str, str, str], requests: int, tokens: int, now: float) -> None:
        at = Fraction(now)
        for key, quota in self.quotas(*call).items():
            more = Fraction(requests if key[1] == "requests" else tokens, quota.rate.amount)
            self.tat[key] = max(at, max(self.tat.get(key, at), at) + more)

    def levels(self, now: float) -> list[Fraction]:
        at = Fraction(now)
        every = [self.quotas(*call) for call in ((t, c, m) for t in TENANTS for c in CLASSES for m in MODELS)]
        quotas = {key: quota for each in every for key, quota in each.items()}
        found = [(self.tat.get(key, at) - at) * quota.rate.amount for key, quota in quotas.items()]
        return sorted(level for level in found if level > 0)


def levels(book: LimitBook, now: float) -> list[Fraction]:
    found = []
    for bucket in book._buckets.values():
        bucket.advance(now)
        found.append(Fraction(bucket.level))
    return sorted(level for level in found if level != 0)


def charged(book: LimitBook, call: tuple[str, str, str], tokens: int, now: float) -> Charge | Refused:
    try:
        return book.charge(*call, tokens, now)
    except Refused as error:
        return error


@settings(max_examples=examples(60))
@given(policies, steps)
def test_every_decision_and_every_level_is_gcras(policy: Policy, steps: list[tuple[float, str, object, int]]) -> None:
    book, reference, now = LimitBook(policy), Reference(policy), 1024.0
    made: list[tuple[Charge, tuple[str, str, str], int]] = []
    over: set[int] = set()
    for pause, what, which, amount in steps:
        now += pause
        if isinstance(which, tuple):
            charge = charged(book, which, amount, now)
            assert isinstance(charge, Charge) == reference.take(which, amount, now)
            if isinstance(charge, Charge):
                made.append((charge, which, amount))
        elif made and isinstance(which, int):
            index = which % len(made)
            charge, call, reserved = made[index]
            ends = {"settle": lambda: charge.settle(amount, now), "refund": charge.refund, "keep": charge.keep}  # noqa: B023 # called in the same turn
            ends[what]()
            if index not in over and what != "keep":
                requests = -1 if what == "refund" else 0
                reference.correct(call, requests, -reserved if what == "refund" else amount - reserved, now)
            over.add(index)
        assert levels(book, now) == reference.levels(now)


@settings(max_examples=examples(60))
@given(
    quotas,
    st.lists(
        st.tuples(st.floats(0, 3), st.integers(0, 30), st.integers(0, 60), st.integers(0, 30)), min_size=8, max_size=40
    ),
)
def test_no_window_has_more_than_its_rate_and_one_burst(
    quota: RateLimit, traffic: list[tuple[float, int, int, int]]
) -> None:
    """What was taken in a window, less what was given back in it, by any clock; so limit + burst in a period."""
    book, now = LimitBook(Policy(limits=Limits(per_tenant=Limit(tokens=quota)))), 12345.678
    made: list[tuple[Charge, int]] = []
    events: list[tuple[float, int]] = []
    burst = quota.burst or quota.rate.amount
    for pause, amount, which, real in traffic:
        now += pause
        if which < len(made):
            charge, reserved = made.pop(which)
            used = min(real, reserved)
            charge.settle(used, now)
            events.append((now, used - reserved))
        charge_or_not = charged(book, ("a", "default", "m"), amount, now)
        if isinstance(charge_or_not, Charge):
            made.append((charge_or_not, amount))
            events.append((now, amount))
            within = [(at, sum(taken for _, taken in events[first:])) for first, (at, _) in enumerate(events)]
            assert all(taken <= burst + quota.rate.amount * (now - at) + 1e-6 for at, taken in within)


@settings(max_examples=examples(60))
@given(policies, st.lists(st.tuples(pauses, calls, tokens), max_size=30), calls, tokens)
def test_a_retry_at_the_time_told_passes_and_no_sooner(
    policy: Policy, before: list[tuple[float, tuple[str, str, str], int]], call: tuple[str, str, str], amount: int
) -> None:
    book, now = LimitBook(policy), 987654.321
    for pause, earlier, taken in before:
        now += pause
        charged(book, earlier, taken, now)
    first = charged(book, call, amount, now)
    if isinstance(first, Refused):
        if first.retry_after is None:
            assert not first.retry
            assert isinstance(charged(book, call, amount, now + 1e6), Refused)
        else:
            early, late = copy.deepcopy(book), copy.deepcopy(book)
            assert isinstance(charged(early, call, amount, now + first.retry_after - 1e-3), Refused)
            assert isinstance(charged(late, call, amount, now + first.retry_after), Charge)


@settings(max_examples=examples(30))
@given(policies, policies, st.lists(st.tuples(pauses, calls, tokens), max_size=20), calls, tokens)
def test_a_reload_gives_nothing_away_and_asks_for_no_more_than_one_burst(
    old: Policy,
    new: Policy,
    before: list[tuple[float, tuple[str, str, str], int]],
    call: tuple[str, str, str],
    amount: int,
) -> None:
    book, now = LimitBook(old), 1024.0
    for pause, earlier, taken in before:
        now += pause
        charged(book, earlier, taken, now)
    kept = {}
    for key, bucket in book._buckets.items():
        bucket.advance(now)
        kept[key] = bucket.level
    book.apply(new, now)
    for key, bucket in book._buckets.items():
        assert bucket.level == min(kept.get(key, 0.0), bucket.burst)
    fresh = charged(LimitBook(new), call, amount, now)
    again = charged(book, call, amount, now)
    assert isinstance(fresh, Charge) or isinstance(again, Refused)
    later = charged(book, call, amount, now + 61.0)
    assert isinstance(later, Refused) == isinstance(fresh, Refused), "any burst of these has drained in a minute"
