"""Properties of load shedding: the breaker's probes, the mode's steps, the shaping of bodies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.admission.mode import SIGNALS, UNKNOWN_HOLDS, Mode, ModelMode, Signals
from gateway.core.admission.shaping import FIELDS, cap, shape_body
from gateway.core.engines.breaker import (
    LONGEST,
    PROBES,
    RATED,
    UNCOUNTED,
    BreakerState,
    CircuitBreaker,
    Ending,
)
from gateway.core.policy.traffic import Breaker, ModeRule, Modes, ShapingTier, Threshold
from gateway.core.recent_calls import WINDOW, RecentCalls
from gateway.core.request.call import CallSettings
from gateway.core.request.outcome import Refused
from gateway.core.request.parser import parse
from gateway.core.request.routes import ROUTES

CLOSED, OPEN, HALF_OPEN = BreakerState
BREAKER = Breaker(open_for=2.0)
LONGEST_OPEN = LONGEST * BREAKER.open_for
QUARTERS = st.integers(0, 24).map(lambda quarters: quarters / 4)  # seconds, exact in binary
endings = st.sampled_from(Ending)
OPERATIONS = st.one_of(
    st.tuples(st.just("wait"), QUARTERS),
    st.tuples(st.just("send"), st.booleans()),  # True: whatever the breaker says, as in a panic
    st.tuples(st.just("first byte"), st.integers(0, 99)),
    st.tuples(st.just("end"), st.integers(0, 99), endings),
    st.tuples(st.just("calls"), st.integers(1, 4), st.sampled_from([Ending.FAILURE, Ending.FAILURE, Ending.SUCCESS])),
)


def single(operations: list[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Calls that take no time are sent, if they may be, and end before the next."""
    for operation in operations:
        if operation[0] == "calls":
            for _ in range(operation[1]):
                yield "send", False
                yield "end", -1, operation[2]
        else:
            yield operation


class Sent:
    """A call as the test knows it: where its breaker stood when it was sent."""

    def __init__(self, breaker: CircuitBreaker, now: float) -> None:
        self.token = breaker.sent(now)
        self.state, self.change = breaker.state, sum(breaker.transitions.values())
        self.at = now
        self.awaited = self.state is HALF_OPEN and self.token != UNCOUNTED

    def counts(self, breaker: CircuitBreaker) -> bool:
        return self.token != UNCOUNTED and self.change == sum(breaker.transitions.values())


@given(st.lists(OPERATIONS, min_size=20, max_size=80))
def test_the_breaker_keeps_its_laws(operations: list[tuple[Any, ...]]) -> None:
    breaker, now, relapses = CircuitBreaker(BREAKER), 100.0, 0
    calls: list[Sent] = []
    row = 0  # failures since it closed or since a success
    ended: list[tuple[int, bool]] = []  # the slot and failure of every call that counted since it closed
    for operation, *arguments in single(operations):
        state, change = breaker.state, sum(breaker.transitions.values())
        if operation == "wait":
            now += arguments[0]
        elif operation == "send":
            due = breaker.since + min(BREAKER.open_for * 2**relapses, LONGEST_OPEN)
            if arguments[0]:
                calls.append(Sent(breaker, now))
            elif breaker.allows(now):
                calls.append(Sent(breaker, now))
                assert calls[-1].token != UNCOUNTED
            assert (breaker.state is OPEN) == (state is OPEN and now < due)
        elif calls and operation == "first byte":
            call = calls[arguments[0] % len(calls)]
            breaker.first_byte(call.token)
            call.awaited = False
        elif calls:
            call = calls.pop(arguments[0] % len(calls))
            counts, ending = call.counts(breaker), arguments[1]
            breaker.ended(call.token, ending, now)
            if counts and state is CLOSED and ending is not Ending.NEUTRAL:
                failed = ending is Ending.FAILURE
                row = row + 1 if failed else 0
                ended = [(slot, bad) for slot, bad in ended if slot > int(now) - WINDOW] + [(int(now), failed)]
                share = sum(bad for _, bad in ended) / len(ended)
                trips = failed and (row >= BREAKER.failures or (len(ended) >= RATED and share > 0.5))
                assert (breaker.state is OPEN) == trips
            elif not counts or ending is Ending.NEUTRAL:
                assert sum(breaker.transitions.values()) == change, "it had nothing to say"
        if breaker.state is not CLOSED:
            row, ended = 0, []
        assert row < BREAKER.failures
        probes = [call for call in calls if call.awaited and call.counts(breaker) and now - call.at < LONGEST_OPEN]
        assert len(probes) <= 1
        if breaker.state is HALF_OPEN:
            assert breaker.allows(now) is (not probes)
        relapses = 0 if breaker.state is CLOSED else relapses + (state is HALF_OPEN and breaker.state is OPEN)
    # Whatever was never said of the calls under way, it lets a probe go in the end, and comes back.
    now += 2 * LONGEST_OPEN
    for _ in range(PROBES):
        assert breaker.allows(now)
        breaker.ended(breaker.sent(now), Ending.SUCCESS, now)
    assert breaker.state is CLOSED
    assert breaker.allows(now)


@given(st.lists(st.tuples(QUARTERS, st.booleans()), max_size=60))
def test_a_window_counts_what_its_slots_hold(events: list[tuple[float, bool]]) -> None:
    rate, now = RecentCalls(), 1000.0
    seen: list[tuple[int, bool]] = []
    for passed, failed in events:
        now += passed
        rate.count(now)
        if failed:
            rate.mark()
        slot = int(now)
        seen.append((slot, failed))
        inside = [bad for at, bad in seen if at > slot - WINDOW]
        assert (rate.calls, rate.marked) == (len(inside), sum(inside))


# -- the mode ---------------------------------------------------------------------------------------------------------

part = st.none() | st.sampled_from([0.0, 0.1, 0.2, 0.5, 0.7, 0.8, 0.9, 1.0])
count = st.none() | st.integers(0, 9)
readings = st.builds(Signals, kv=part, waiting=count, ttft=part.map(lambda x: x and 3 * x), errors=part)
thresholds = st.builds(Threshold, kv=part, waiting=count, ttft=part.map(lambda x: x and 3 * x), errors=part)
rules = st.builds(
    ModeRule,
    enter=thresholds,
    leave=thresholds,
    dwell=st.sampled_from([0.0, 1.0, 7.5]),
    refuse=st.sampled_from([(), ("batch",), ("default", "batch"), "least_important", "all_but_most_important"]),
)
modes = st.just(Modes()) | st.builds(Modes, tight=rules, brownout=rules, closed=rules)
ORDER = ("interactive", "default", "batch")


def reached(rule: ModeRule, signals: Signals) -> bool:
    pairs = [(getattr(rule.enter, name), getattr(signals, name)) for name in SIGNALS]
    return any(limit is not None and value is not None and value >= limit for limit, value in pairs)


def below(rule: ModeRule, signals: Signals) -> bool:
    """Of what is known."""
    pairs = [(getattr(rule.leave, name), getattr(signals, name)) for name in SIGNALS]
    return all(limit is None or value is None or value < limit or not value for limit, value in pairs)


@given(modes, st.lists(st.tuples(QUARTERS, readings), max_size=60))
def test_the_mode_moves_by_one_step_and_never_twice_within_a_dwell(
    policy: Modes, samples: Sequence[tuple[float, Signals]]
) -> None:
    it, now, changed_at, by_level = ModelMode(policy), 50.0, 0.0, (policy.tight, policy.brownout, policy.closed)
    for passed, signals in samples:
        now += passed
        before = it.mode
        changed = it.step(signals, now)
        assert changed is (it.mode is not before)
        pressed = any(reached(rule, signals) for rule in by_level[before.value :])
        if changed:
            assert abs(it.mode.value - before.value) == 1
            assert before is Mode.NORMAL or now - changed_at >= by_level[before.value - 1].dwell
            assert pressed if it.mode > before else not pressed
            if it.mode < before:
                own = by_level[before.value - 1]
                assert below(own, signals)
                assert not reached(own, signals)
            assert it.why
            assert it.since == now
            changed_at = now
        elif pressed:
            assert before is not Mode.NORMAL
            assert now - changed_at < by_level[before.value - 1].dwell
    # Nothing known holds it: three steps, each after its dwell, bring it back.
    for _ in range(3):
        now += UNKNOWN_HOLDS + 7.5
        it.step(Signals(), now)
    assert it.mode is Mode.NORMAL


@given(modes, st.sampled_from(ORDER))
def test_a_worse_mode_refuses_whatever_a_milder_one_does(policy: Modes, class_name: str) -> None:
    it, refused = ModelMode(policy), False
    for mode in Mode:
        it.mode = mode
        now_refused = it.refuses(class_name, ORDER) is not None
        assert now_refused or not refused
        refused = now_refused


# -- shaping ----------------------------------------------------------------------------------------------------------

tiers = st.builds(
    ShapingTier,
    kv_above=st.sampled_from([0.5, 0.8, 0.9]),
    max_tokens=st.integers(1, 5000),
    except_=st.none() | st.sampled_from([(), ("default",)]),
)


@given(
    st.lists(tiers, max_size=4),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from(ORDER),
)
def test_a_cap_only_tightens_with_pressure(every: list[ShapingTier], one: float, two: float, class_name: str) -> None:
    low, high = sorted((one, two))
    mild = cap(every, low, class_name, ORDER)
    hard = cap(every, high, class_name, ORDER)
    assert hard is None or hard in [tier.max_tokens for tier in every]
    assert mild is None or (hard is not None and hard <= mild)


LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")
plain = st.sampled_from(
    ["1e400", "-0.0", "123456789012345678901234567890", "[ 1 ,\t2 ]", '{"max_tokens":99999, "a":[]}', '"\\u00e9\\/"']
) | (st.none() | st.booleans() | st.text(max_size=9) | st.integers() | st.floats(allow_nan=False)).map(json.dumps)
members = st.one_of(
    st.tuples(st.sampled_from(LIMITS), st.none() | st.integers(1, 5000)).map(lambda kv: (kv[0], json.dumps(kv[1]))),
    st.tuples(st.text(max_size=6) | st.sampled_from(["caf\u00e9", "\u6f22", "thinking"]), plain),
    st.tuples(
        st.just("thinking"),
        st.sampled_from(['{"type":"enabled","budget_tokens":2000,"x":1e400}', '{"type":"adaptive"}', '{"a":"b"}']),
    ),
)
REQUIRED = (
    '"model":"m","messages":[{"role":"user","content":"\u6f22 \\u00e9"}],"prompt":"p","input":"i","max_tokens":4096'
)
space = st.text(" \t\r\n", max_size=3)
GENERATING = [route for route in ROUTES.values() if route.generates]


@given(st.sampled_from(GENERATING), st.lists(members, max_size=6), st.booleans(), space, st.integers(1, 5000))
def test_only_what_bounds_the_answer_changes_and_that_only_downwards(
    route: Any, extra: list[tuple[str, str]], escape: bool, blank: str, most: int
) -> None:
    text = "".join(f",{blank}{json.dumps(name, ensure_ascii=escape)}{blank}:{value}" for name, value in extra)
    with suppress(Refused, UnicodeEncodeError):  # lone surrogates, types that parse() refuses
        body = f"{blank}{{{REQUIRED}{text}{blank}}}{blank}".encode()
        call = parse(
            route,
            {b"content-type": b"application/json"},
            body,
            settings=CallSettings(),
            request_id="r",
            tenant="t",
            now=0.0,
        )
        check_shaped(call.body, route.kind, most)


def raws(body: bytes) -> dict[str, bytes]:
    return {name: bytes(raw) for name, raw in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items()}


def check_shaped(body: bytes, kind: str, most: int) -> None:
    out = shape_body(body, kind, most)
    before, after = raws(body), raws(out)
    limits = {*FIELDS[kind], "min_tokens"}
    mine = limits | {"thinking"} if kind == "message" else limits
    assert {name: raw for name, raw in after.items() if name not in mine} == {
        name: raw for name, raw in before.items() if name not in mine
    }
    assert list(after)[: len(before)] == list(before), "in their order"
    numbers = {name: json.loads(after[name]) for name in limits if name in after}
    for name, value in numbers.items():
        asked = json.loads(before.get(name, b"null"))
        assert value == (most if asked is None and value is not None else asked and min(asked, most))
    told = [numbers[name] for name in FIELDS[kind] if numbers.get(name) is not None]
    assert told
    assert max(told) <= most
    assert shape_body(out, kind, most) is out
