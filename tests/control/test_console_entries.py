"""Entries, figures, rows and the headline of the console: plain values, without a socket."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.control.console.figures import Open, class_figures
from gateway.control.console.headline import Line, headline
from gateway.control.console.mirrors import mirror_entries
from gateway.control.console.remedy import ModelState
from gateway.control.console.stream import Entries, changes, read_anew
from gateway.core.policy.routes import Mirror, ModelRoute, RouteMember
from gateway.core.policy.traffic import TrafficClass
from gateway.core.request.outcome import STATUS, Outcome
from gateway.core.request.record import COPY, MEMBER, Record
from gateway.core.routes.canary import Answers
from gateway.decider.ended_calls import KEPT, REASON, EndedCalls


def told(seen: Entries, now: Entries) -> Any:
    found = changes(seen, now)
    return None if found is None else json.loads(found)


def test_a_watcher_is_told_what_has_changed_since_it_was_told_last() -> None:
    first = read_anew({}, {"a": 1, "b": 1})
    assert told({}, first) == {"whole": True, "set": {"a": 1, "b": 1}, "gone": []}
    assert told(first, read_anew(first, {"a": 1, "b": 1})) is None
    second = read_anew(first, {"a": 2})
    third = read_anew(second, {"a": 2, "c": 1})
    assert told(first, third) == {"whole": False, "set": {"a": 2, "c": 1}, "gone": ["b"]}
    assert told(second, third) == {"whole": False, "set": {"c": 1}, "gone": []}
    assert told(first, read_anew(third, {"a": 2, "b": 2, "c": 1}))["gone"] == []


def record(**facts: Any) -> Record:
    return Record(request_id="i", route="r", **{"class_name": "batch", "tenant": "acme", "model": "m"} | facts)


def test_the_ring_keeps_the_last_calls_and_no_prompt() -> None:
    ring = EndedCalls()
    for number in range(KEPT + 5):
        ring.add(record(request="secret", reason="x" * 1000), float(number))
    assert ring.last == KEPT + 5
    first, calls = ring.after(0, 3)
    assert (first, [at for at, _ in calls]) == (6, [5.0, 6.0, 7.0])
    assert [at for at, _ in ring.after(KEPT + 3, 9)[1]] == [KEPT + 3.0, KEPT + 4.0]
    assert ring.after(KEPT + 5, 9) == (KEPT + 6, ())
    assert [at for at, _ in ring.since(KEPT + 2.0)] == [KEPT + 4.0, KEPT + 3.0]
    assert ring.reach(KEPT + 4.0, 60.0) == 60.0
    assert ring.reach(10.0, 60.0) == 5.0
    assert not isinstance(calls[0][1].request, str)
    assert len(calls[0][1].reason) == REASON


def test_the_sides_of_a_mirror_are_shown_by_their_means() -> None:
    routes = {
        "support": ModelRoute(members=(RouteMember(model="m0"),), mirror=Mirror(model="m1", share=1.0)),
        "new": ModelRoute(members=(RouteMember(model="m0"),), mirror=Mirror(model="m1", share=1.0)),
        "plain": ModelRoute(members=(RouteMember(model="m0"),)),
    }
    sides = {("support", COPY): Answers(), ("gone", COPY): Answers()}
    for tokens, finish in ((10, "stop"), (21, "length")):
        sides["support", COPY].add(record(outcome=Outcome.OK, completion_tokens=tokens, ttft=0.25, finish=finish))
    sides["support", COPY].add(record(outcome=Outcome.QUEUE_FULL))
    nothing = {"ok": 0, "error": 0, "dropped": 0, "tokens": None, "ttft": None, "finishes": {}}
    copies = {"ok": 2, "error": 0, "dropped": 1, "tokens": 15.5, "ttft": 0.25, "finishes": {"stop": 1, "length": 1}}
    assert dict(mirror_entries(routes, sides)) == {
        "mirror/support": {"model": "m1", "sides": {MEMBER: nothing, COPY: copies}},
        "mirror/new": {"model": "m1", "sides": {MEMBER: nothing, COPY: nothing}},
    }


def test_figures_count_what_was_in_time() -> None:
    classes = dict.fromkeys(("batch", "whole"), TrafficClass(ttft=1.0, deadline=10.0))
    answered = {"outcome": Outcome.OK, "stream": True, "completion_tokens": 100}
    ended = [
        (1.0, record(ttft=0.5, total=5.0, **answered)),
        (1.0, record(ttft=1.5, total=5.0, **answered)),
        (1.0, record(ttft=0.5, total=50.0, **answered)),
        (1.0, record(ttft=6.0, total=6.0, class_name="whole", **(answered | {"stream": False}))),
        (1.0, record(outcome=Outcome.RATE_LIMITED)),
        (1.0, record(outcome=Outcome.UPSTREAM)),
        (1.0, record(outcome=Outcome.CLIENT_GONE)),
        (1.0, record(outcome=Outcome.OK, class_name="gone", ttft=9.0)),
    ]
    figures = class_figures(ended, [], classes, 10.0, 10.0)
    batch = figures["batch"]
    assert (batch.answered, batch.refused, batch.failed, batch.caller) == (0.3, 0.1, 0.1, 0.1)
    assert (batch.ttft_p50, batch.ttft_p99, batch.in_time, batch.goodput) == (0.5, 1.5, 0.3333, 10.0)
    assert figures["gone"].in_time == 1.0
    whole = figures["whole"]
    assert (whole.ttft_p50, whole.ttft_p99, whole.in_time, whole.goodput) == (None, None, 1.0, 10.0)


def test_offered_and_admitted_count_calls_that_have_not_ended_too() -> None:
    answered = {"outcome": Outcome.OK, "engine": "e"}
    ended = [
        (99.0, record(total=3.0, queue=1.0, **answered)),  # came and admitted within the last 10 s
        (99.0, record(total=12.0, queue=5.0, **answered)),  # came before, admitted within
        (99.0, record(total=30.0, queue=1.0, **answered)),  # both before
        (99.0, record(total=0.0, outcome=Outcome.RATE_LIMITED)),  # came, never admitted
    ]
    open = [Open("batch", 95.0, 96.0), Open("batch", 80.0, 95.0), Open("batch", 99.0, None), Open("new", 80.0, None)]
    figures = class_figures(ended, open, {}, 10.0, 100.0)
    assert (figures["batch"].offered, figures["batch"].admitted, figures["batch"].answered) == (0.4, 0.4, 0.3)
    assert (figures["new"].offered, figures["new"].admitted) == (0.0, 0.0)


CLASSES = {"batch": TrafficClass(weight=1.0), "default": TrafficClass(weight=4.0)}


def lines(*facts: Any, lately: float = 0.0) -> list[Line]:
    return headline(*facts, lately=lately, classes=CLASSES, names={"h:1": "engine-1"})


def test_the_headline_says_who_is_refused_why_and_what_to_change() -> None:
    limit = "The limit of tenant 'acme' is 600/min requests: this call needs 1, 0 are left."
    ended = [(9.0, record(outcome=Outcome.RATE_LIMITED, reason=limit))] * 3
    ended += [(8.0, record(outcome=Outcome.SHED, reason="pressure.", class_name="default"))] * 2
    ended += [(8.0, record(outcome=Outcome.OK)), (8.0, record(outcome=Outcome.NOT_FOUND, reason="no such model"))]
    ended += [(8.0, record(outcome=Outcome.CLIENT_GONE))]
    first, second, third = lines(ended, {"m": ModelState("brownout", "kv 0.95 >= 0.93")}, [], 60.0, 0)
    assert first.what.startswith(
        "Class batch of tenant acme, model m: 3 of 6 calls of the last minute were refused with"
    )
    assert first.what.endswith("429 (rate_limited).")
    assert first.why == f"The last was told: {limit}"
    assert "tenants.acme.limits" in first.change
    assert "m is in mode brownout: kv 0.95 >= 0.93." in second.why
    assert "add an engine of m" in second.change
    assert (third.level, third.calls) == ("warn", 1)


def test_refusals_that_one_change_would_help_are_one_line() -> None:
    ended = [(9.0, record(outcome=Outcome.QUEUE_FULL, reason="full"))]
    ended += [(8.0, record(outcome=Outcome.EXPIRED, reason="deadline"))] * 2
    (line,) = lines(ended, {}, [], 60.0, 0)
    assert line.what.endswith(
        "3 of 3 calls of the last minute were refused: 2 with 504 (expired), 1 with 503 (queue_full)."
    )
    assert line.why == "The last was told: Its deadline passed before the end of the answer."
    assert "classes.batch.deadline" in line.change


def test_the_headline_gives_the_status_that_callers_got_not_that_of_the_outcome() -> None:
    cut = record(outcome=Outcome.TRUNCATED, status=200, reason="the engine went away", engine="e0")
    own = record(outcome=Outcome.UPSTREAM, status=500, reason="EngineCore died", engine="e0", class_name="default")
    first, second = lines([(9.0, cut), (9.0, cut), (9.0, own)], {}, [], 60.0, 0)
    assert first.what.endswith("2 of 2 calls of the last minute failed after 200, broken off (truncated).")
    assert second.what.endswith("1 of 1 calls of the last minute failed with 500 (upstream).")
    both = [(9.0, record(outcome=Outcome.UPSTREAM, status=status)) for status in (500, 502, 500)]
    (line,) = lines(both, {}, [], 60.0, 0)
    assert line.what.endswith("failed: 2 with 500 (upstream), 1 with 502 (upstream).")


def test_the_advice_names_the_engines_whose_log_to_read() -> None:
    ended = [(9.0, record(outcome=Outcome.TRUNCATED, engine=engine)) for engine in ("h:1", "h:1", "gone:2")]
    (line,) = lines(ended, {}, [], 60.0, 0)
    assert line.change.startswith("Read the log of engine-1 (2), gone:2 (1).")
    assert line.engines == ("engine-1", "gone:2")
    assert line.runbook == "WeirBreakerOpen"


def test_an_engines_words_are_not_given_for_what_callers_were_told() -> None:
    ended = [(9.0, record(outcome=Outcome.UPSTREAM, status=500, reason="EngineCore died", engine="h:1"))]
    (line,) = lines(ended, {}, [], 60.0, 0)
    assert line.why == "The engine said: EngineCore died"
    (line,) = lines([(9.0, record(outcome=Outcome.TRUNCATED, status=200, reason="broke off."))], {}, [], 60.0, 0)
    assert line.why == "The last of them: broke off."


def test_a_line_says_since_when_calls_end_so() -> None:
    ended = [(at, record(outcome=Outcome.RATE_LIMITED, reason="r")) for at in (9.0, 7.0, 5.0)]
    (line,) = lines(ended, {}, [], 60.0, 0)
    assert line.since == 5.0


@pytest.mark.parametrize(("calls", "expected"), [(3, []), (100, ["unknown callers"])])
def test_a_few_stray_requests_of_unknown_callers_are_no_alarm(calls: int, expected: list[str]) -> None:
    stray = record(outcome=Outcome.NOT_FOUND, status=404, tenant="", class_name="", model="")
    found = [line for line in lines([(9.0, stray)] * calls, {}, [], 60.0, 0) if line.level != "good"]
    assert ["unknown callers" for line in found if "unknown callers" in line.what] == expected
    (own,) = lines([(9.0, record(outcome=Outcome.NOT_FOUND, status=404))], {}, [], 60.0, 0)
    assert own.level == "warn", "a tenant that asks for what is not there is told of at once"
    (key,) = lines([(9.0, record(outcome=Outcome.UNAUTHORIZED, status=401, tenant=""))], {}, [], 60.0, 0)
    assert key.level == "warn"


FULL = "they run 4 of at most 4 calls, 90% of their KV-cache budget is held"


def test_an_overload_is_told_once_with_the_engines_that_are_missing() -> None:
    ended = [(9.0, record(outcome=Outcome.QUEUE_FULL, reason="full", tenant=tenant)) for tenant in ("a", "b", "b")]
    ended += [(9.0, record(outcome=Outcome.OK))]
    state = ModelState("normal", "", engines=2, wanted=5, full=FULL, queued=7)
    down = Line(level="bad", what="1 of 3 engines are down.")
    first, second, *groups = lines(ended, {"m": state}, [down], 30.0, 7)
    assert first == down, "a cause goes first"
    assert second.what == "Overload: 3 of 4 calls of the last 30 s for model m found no room."
    assert second.why == f"More was offered than its engines can do. Now {FULL}, and 7 calls wait."
    assert second.since == 9.0
    assert second.change.startswith("Add 3 engines of m: what was offered of late wants 5, and 2 serve it.")
    assert [line.what.partition(",")[0] for line in groups] == ["Class batch of tenant b", "Class batch of tenant a"]
    assert all("add the engines named above" in line.change for line in groups)
    burst = ended[:1] + [(9.0, record(outcome=Outcome.OK))] * 20
    (alone,) = lines(burst, {"m": state}, [], 30.0, 0)
    assert "add an engine of m" in alone.change, "a burst is no overload"
    (enough,) = lines(ended[:1], {"m": ModelState("normal", "", engines=5, wanted=5)}, [], 30.0, 7)
    assert "add an engine of m" in enough.change


def test_what_is_over_says_so_and_comes_after_what_goes_on() -> None:
    state = ModelState("normal", "", engines=1, wanted=2, full=FULL)
    ended = [(50.0, record(outcome=Outcome.RATE_LIMITED, reason="r"))]
    ended += [(9.0, record(outcome=Outcome.SHED, reason="late", class_name="default"))] * 9
    first, *rest = lines(ended, {"m": state}, [], 60.0, 0, lately=40.0)
    assert first.level == "bad"
    assert first.what.endswith("with 429 (rate_limited).")
    assert all(line.what.endswith(", none of them in the last 10 s.") for line in rest)
    assert [line.level for line in rest] == ["warn", "warn"]


@pytest.mark.parametrize("outcome", [Outcome.SHED, Outcome.DEADLINE_UNREACHABLE])
def test_a_weight_is_named_where_another_class_holds_room(outcome: Outcome) -> None:
    ended = [(9.0, record(outcome=outcome, reason="late"))]
    (line,) = lines(
        ended, {"m": ModelState("normal", "", room={"batch": 50, "default": 100, "gone": 500})}, [], 60.0, 0
    )
    assert line.change.endswith(
        "To take room from class default, which holds 67% of it now, raise classes.batch.weight "
        "(1; that of default is 4)."
    )
    for room in ({"batch": 95, "default": 5}, {"batch": 10}, {}):
        (line,) = lines(ended, {"m": ModelState("normal", "", room=room)}, [], 60.0, 0)
        assert line.change.endswith("classes.batch.weight is no cure: no other class holds much room now.")


def test_a_class_at_its_max_concurrency_is_told_to_raise_it() -> None:
    ended = [(9.0, record(outcome=Outcome.DEADLINE_UNREACHABLE, reason="too late"))]
    state = ModelState("normal", "", engines=2, wanted=5, full=FULL)
    (line,) = lines(ended, {"m": state}, [], 60.0, 0, {"batch"})
    assert line.change.startswith("Raise classes.batch.max_concurrency")


def test_the_headline_of_a_quiet_gateway_says_so() -> None:
    assert lines([], {}, [], 60.0, 0) == [Line(level="good", what="No call ended in the last minute.")]
    (line,) = lines([(1.0, record(outcome=Outcome.OK))], {}, [], 12.0, 4)
    assert line.what == "No call of the last 12 s was refused: 1 ended. 4 wait now."
    (line,) = lines([], {}, [Line(level="bad", what="w")], 60.0, 0)
    assert line.what == "w"


@pytest.mark.parametrize("outcome", [each for each in STATUS if each not in (Outcome.CLIENT_GONE, Outcome.SLOW_CLIENT)])
def test_every_outcome_has_something_to_change(outcome: Outcome) -> None:
    (line,) = lines([(1.0, record(outcome=outcome, reason="why"))], {}, [], 60.0, 0)
    assert line.change
    assert line.why.endswith(": why")
