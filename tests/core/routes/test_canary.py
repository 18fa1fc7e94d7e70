"""Sequential test of a canary: who is taken out, by which figure, and who is not."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec import structs

from gateway.core.policy.routes import ModelRoute, RouteMember, Until
from gateway.core.request.outcome import Outcome
from gateway.core.request.record import Record
from gateway.core.routes.canary import CanaryTrial

MINUTE = 60.0


def trial(until: Until) -> CanaryTrial:
    return CanaryTrial(ModelRoute(members=(RouteMember(model="old", weight=9), RouteMember(model="new", until=until))))


def ended(ttft: float, class_name: str = "default", *, stream: bool = True, **more: Any) -> Record:
    return Record(request_id="r", route="", class_name=class_name, ttft=ttft, stream=stream, **more)


class Traffic:
    """Calls of both members, ten a second; one of four is the canary's."""

    def __init__(self, until: Until, seed: int = 1) -> None:
        self.trial = trial(until)
        self.rng = random.Random(seed)
        self.now = 0.0

    def run(self, minutes: float, *, slower: float = 1.0, errors: float = 0.0, usual_errors: float = 0.0) -> str | None:
        """The words of the figure that took the canary out, and `now` when it did."""
        end = self.now + minutes * MINUTE
        while self.now < end:
            self.now += 0.1
            new = self.rng.random() < 0.25
            failed = self.rng.random() < (errors if new else usual_errors)
            ttft = self.rng.lognormvariate(-1.0, 0.5) * (slower if new else 1.0)
            outcome = Outcome.UPSTREAM if failed else Outcome.OK
            words = self.trial.observe("new" if new else "old", outcome, ended(ttft), self.now)
            if words is not None:
                return words
        return None


@pytest.mark.parametrize("seed", range(3))
def test_a_canary_like_the_others_stays(seed: int) -> None:
    traffic = Traffic(Until(errors=0.02, ttft=1.5), seed)
    assert traffic.run(90, errors=0.05, usual_errors=0.05) is None
    assert not traffic.trial.out


def test_a_canary_that_fails_more_calls_is_out_and_the_figure_is_named() -> None:
    traffic = Traffic(Until(errors=0.02))
    assert traffic.run(20, errors=0.03, usual_errors=0.02) is None
    began = traffic.now
    words = traffic.run(30, errors=0.2, usual_errors=0.02)
    assert words is not None
    assert words.startswith("errors: ")
    assert words.endswith("% of the others'")
    assert 2 * MINUTE < traffic.now - began < 10 * MINUTE
    assert traffic.trial.out == {"new": words}
    assert traffic.trial.observe("new", Outcome.UPSTREAM, None, traffic.now) is None, "it is out already"


def test_a_canary_whose_first_tokens_are_late_is_out() -> None:
    traffic = Traffic(Until(ttft=1.5))
    assert traffic.run(20, slower=1.2) is None
    words = traffic.run(30, slower=2.5)
    assert words is not None
    assert words.startswith("ttft: ")
    assert "more than 1.5 times the others' median, 0." in words


def test_one_bad_minute_takes_nobody_out() -> None:
    traffic = Traffic(Until(errors=0.02, ttft=1.5))
    assert traffic.run(10) is None
    for _ in range(5):
        assert traffic.run(1, errors=1.0) is None, "a minute in which every call failed"
        assert traffic.run(10) is None
    assert traffic.run(4, errors=1.0) is not None


def test_what_says_nothing_of_a_model_counts_for_nobody() -> None:
    one = trial(Until(errors=0.01))
    for second in range(10_000):
        for outcome in (Outcome.CLIENT_GONE, Outcome.QUEUE_FULL, Outcome.RATE_LIMITED):
            assert one.observe("new", outcome, ended(1.0), second) is None
        assert one.observe("fallback", Outcome.UPSTREAM, ended(1.0), second) is None
    assert not one.out
    assert list(one.members) == ["old", "new"]


def test_first_tokens_are_compared_within_a_class() -> None:
    one = trial(Until(ttft=1.5))
    for second in range(2000):
        assert one.observe("old", Outcome.OK, ended(0.1, "interactive"), second) is None
        assert one.observe("new", Outcome.OK, ended(9.0, "batch"), second) is None, "nobody to compare it with"
        assert one.observe("new", Outcome.OK, ended(9.0, "interactive", stream=False), second) is None
        assert one.observe("new", Outcome.OK, ended(0.1, "interactive"), second) is None


def test_each_figure_alone() -> None:
    slow = Traffic(Until(errors=0.5))
    assert slow.run(30, slower=9.0) is None
    failing = Traffic(Until(ttft=1.5))
    assert failing.run(30, errors=0.9) is None


def test_a_verdict_outlives_its_decider_as_long_as_the_route_is_the_same() -> None:
    traffic = Traffic(Until(errors=0.02))
    assert traffic.trial.checkpoint("support") == []
    words = traffic.run(30, errors=0.5, usual_errors=0.02)
    assert words is not None
    (saved,) = traffic.trial.checkpoint("support")
    after = trial(Until(errors=0.02))
    after.restore(saved)
    assert after.out == {"new": words}
    assert after.checkpoint("support") == [saved]
    changed = trial(Until(errors=0.03))
    changed.restore(saved)
    of_another_member = trial(Until(errors=0.02))
    of_another_member.restore(structs.replace(saved, model="old"))
    assert changed.out == of_another_member.out == {}


def test_one_tenant_whose_calls_are_refused_takes_no_canary_out() -> None:
    """A tenant's bad requests, ten a second in a session that is the canary's, beside ordinary traffic."""
    traffic = Traffic(Until(errors=0.02))
    for _ in range(60):
        assert traffic.run(1, errors=0.01, usual_errors=0.01) is None
        for second in range(600):
            now = traffic.now + second / 10
            words = traffic.trial.observe("new", Outcome.ENGINE_REFUSED, ended(0.1, tenant="bad"), now)
            assert words is None


def test_a_canary_that_refuses_every_call_is_out() -> None:
    one = trial(Until(errors=0.02))
    for second in range(3600):
        one.observe("old", Outcome.OK, ended(0.1, tenant="acme"), second)
        if one.observe("new", Outcome.ENGINE_REFUSED, ended(0.1, tenant="acme"), second) is not None:
            break
    assert 3 * MINUTE < second < 15 * MINUTE


def test_one_caller_of_long_prompts_takes_no_canary_out() -> None:
    one = trial(Until(ttft=1.5))
    for second in range(3600):
        assert one.observe("old", Outcome.OK, ended(0.1, prompt_tokens=100), second) is None
        assert one.observe("new", Outcome.OK, ended(0.1, prompt_tokens=100), second) is None
        for _ in range(3):
            assert one.observe("new", Outcome.OK, ended(5.0, prompt_tokens=30_000), second) is None
    for second in range(3600, 7200):
        one.observe("old", Outcome.OK, ended(1.0, prompt_tokens=30_000), second)
        if one.observe("new", Outcome.OK, ended(5.0, prompt_tokens=20_000), second) is not None:
            break
    assert one.out, "among long prompts it is slower"
