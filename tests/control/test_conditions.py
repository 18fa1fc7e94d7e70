"""Conditions of the headline and the observer: what is wrong, since when, where, and what to do. Over real sockets."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from msgspec import structs

from gateway.control.console.conditions import NAMED
from gateway.core.call_counts import CallCounts
from gateway.core.engines.breaker import Ending
from gateway.core.engines.trouble import REASONS, STALLED, Trouble
from gateway.core.history import History
from gateway.core.policy.policy import Policy
from gateway.core.policy.routes import ModelRoute, RouteMember, Until
from gateway.core.request.outcome import Outcome
from gateway.core.request.record import Record
from gateway.decider.ended_calls import EndedCalls
from gateway.decider.metrics.families import route_families
from gateway.decider.observer import OVER, TROUBLES, Observer
from gateway.shared.files.file_status import FileStatus
from tests.control.parts import Parts, play


async def headline(parts: Parts) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await parts.get("/status")).json()["headline"]
    return found


def test_an_engine_that_is_down_is_told_since_the_outage_began_and_who_takes_its_calls() -> None:
    async def scene(parts: Parts) -> None:
        loop = asyncio.get_running_loop()
        left, right = parts.up("e0"), parts.up("e1")
        began = loop.time()
        for _ in range(5):
            left.check(False, loop.time(), Trouble("refused", "connection refused", loop.time()))
            await asyncio.sleep(0.01)
        (line,) = await headline(parts)
        assert line["what"] == "Engine e0 is down. Other engines take its calls."
        assert line["why"] == "connection refused"
        assert line["since"] == pytest.approx(time.time() - loop.time() + began, abs=0.1)
        assert "Nothing listens at http://127.0.0.1:1." in line["change"]
        assert (line["engines"], line["runbook"]) == (["e0"], "WeirEngineDown")
        right.down(Trouble(STALLED, "it has read and written no token for 30 s", loop.time()))
        first, second = await headline(parts)
        assert first["what"].startswith("Engine e0 is down. No other engine serves m:")
        assert "It hangs: it takes requests and works on none. Restart it." in second["change"]
        left.draining = True
        assert [line["engines"] for line in await headline(parts)] == [["e1"]], "an operator knows of a drained one"

    play(scene)


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_has_advice(reason: str) -> None:
    async def scene(parts: Parts) -> None:
        parts.up("e0").down(Trouble(reason, "why", 1.0))
        (line,) = await headline(parts)
        assert line["change"]
        assert "{" not in line["change"]

    play(scene)


def test_many_engines_share_a_line() -> None:
    async def scene(parts: Parts) -> None:
        from gateway.core.engines.engine import Engine  # noqa: PLC0415
        from gateway.core.policy.policy import Policy  # noqa: PLC0415

        for number in range(2, 6):
            parts.fleet.add(Engine(f"e{number}", f"http://127.0.0.1:{number}", Policy()))
        for engine in parts.fleet:
            engine.check(False, 5.0 + int(engine.id[1]), Trouble("refused", "connection refused", 5.0))
        (line,) = await headline(parts)
        assert line["what"] == "6 of 6 engines are down."
        assert line["why"].endswith("and 3 more")
        assert len(line["engines"]) == 6

    play(scene)


def test_of_a_thousand_engines_in_one_trouble_three_are_looked_at_closely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of those takes a look at all the others."""

    async def scene(parts: Parts) -> None:
        from gateway.core.engines.engine import Engine  # noqa: PLC0415
        from gateway.core.policy.policy import Policy  # noqa: PLC0415

        for number in range(2, 1000):
            parts.fleet.add(Engine(f"e{number}", f"http://127.0.0.1:{number}", Policy()))
        for engine in parts.fleet:
            parts.up(engine.id).health.unmeasured = "GET /metrics was answered 404"
        (line,) = await headline(parts)
        assert (line["level"], len(line["engines"]), line["since"]) == ("warn", NAMED, None)
        assert line["what"].startswith("1000 of 1000 engines tell no metrics, so they are no vLLM")
        for engine in parts.fleet:
            engine.down(Trouble("refused", "connection refused", 5.0))
        looks, serving = list[str](), parts.fleet.serving

        def watched(model: str) -> tuple[Engine, ...]:
            looks.append(model)
            return serving(model)

        monkeypatch.setattr(parts.fleet, "serving", watched)
        (line,) = await headline(parts)
        assert line["what"] == "1000 of 1000 engines are down."
        assert len(looks) < 10

    play(scene)


def test_an_open_breaker_and_missing_metrics_are_told() -> None:
    async def scene(parts: Parts) -> None:
        engine = parts.up("e0")
        now = asyncio.get_running_loop().time()
        for _ in range(engine.policy.breaker.failures):
            engine.breaker.ended(engine.breaker.sent(now), Ending.FAILURE, now)
        engine.health.failed_call = "it answered 500"
        parts.up("e1").health.unmeasured = "GET /metrics was answered 404"
        first, second = await headline(parts)
        assert first["what"].startswith("Engine e0 fails its calls: its circuit breaker is open. Other engines")
        assert (first["why"], first["runbook"]) == ("it answered 500", "WeirBreakerOpen")
        assert first["since"] == pytest.approx(time.time(), abs=1.0)
        assert second["what"] == "Engine e1 tells no metrics, so it is no vLLM, or runs with --disable-log-stats."
        assert "100000 tokens of KV cache and 256 calls at once" in second["why"]

    play(scene)


def test_a_policy_that_cannot_be_used_and_a_log_that_cannot_be_written_have_a_time() -> None:
    status = FileStatus(file="policy.yaml").failed("policy.yaml:3: found x\npolicy.yaml:4: y", "2026-11-25T03:00:00Z")

    async def scene(parts: Parts) -> None:
        policy, log = await headline(parts)
        assert policy["what"].startswith("The policy file policy.yaml cannot be used. Version 1, of before, stays")
        assert policy["why"] == "policy.yaml:3: found x (and 1 more)"
        assert (policy["since"], policy["runbook"]) == (1795575600.0, "WeirPolicyBad")
        assert log["why"] == "/var/log/weir.jsonl: No space left on device"
        assert (log["since"], log["runbook"]) == (7.0, "WeirLogLinesLost")

    trouble = ("/var/log/weir.jsonl: No space left on device", 7.0)
    play(scene, policy_status=lambda: status, log_trouble=lambda: trouble)


def test_the_observer_notes_when_a_trouble_began_and_that_it_is_over() -> None:
    async def scene(parts: Parts) -> None:
        now, ended = [1000.0], EndedCalls()
        counts = CallCounts()
        observer = Observer(History(), parts.fleet, parts.dispatch, lambda: counts, ended, lambda: now[0])

        def call(at: float, outcome: Outcome) -> None:
            record = Record(request_id="i", route="/v1", tenant="acme", class_name="batch", model="m", outcome=outcome)
            counts.observe(record)
            ended.add(record, at)

        observer.look()
        observer.close()
        for at in (1003.0, 1004.0):
            call(at, Outcome.RATE_LIMITED)
        call(1005.0, Outcome.OK)
        now[0] = 1010.0
        observer.close()
        key = ("acme", Outcome.RATE_LIMITED)
        assert observer.began[key] == pytest.approx(time.time() - 7.0, abs=0.5)
        (event,) = observer.history.events
        assert (event.event, event.text) == ("limit_met", "tenant acme has met a limit: calls are refused with 429")
        assert event.at == observer.began[key]
        assert [(each.answered, each.refused) for each in observer.history.after(1)] == [(1, 2)]
        now[0] = 1020.0
        call(1019.0, Outcome.RATE_LIMITED)
        observer.close()
        assert len(observer.history.events) == 1, "it goes on"
        now[0] = 1100.0
        observer.close()
        assert key not in observer.began

    play(scene)


def test_troubles_that_are_over_make_room_for_those_of_other_tenants() -> None:
    async def scene(parts: Parts) -> None:
        now, counts = [1000.0], CallCounts()
        observer = Observer(History(), parts.fleet, parts.dispatch, lambda: counts, EndedCalls(), lambda: now[0])
        for number in (*range(TROUBLES + 1), TROUBLES + 2):
            if number == TROUBLES + 2:
                observer.close()
                assert len(observer.began) == TROUBLES
                now[0] += 2 * OVER
                observer.close()
                assert observer.began == {}
            counts.tenants[f"t{number}", Outcome.UPSTREAM] = [1, 0]
        observer.close()
        assert list(observer.began) == [(f"t{TROUBLES + 2}", Outcome.UPSTREAM)]
        assert observer.history.events[-1].text == f"calls of tenant t{TROUBLES + 2} fail at their engine (upstream)"

    play(scene)


def test_the_history_is_served_from_where_the_page_is() -> None:
    async def scene(parts: Parts) -> None:
        history = observer.history
        history.look(1, 2, 3, 4)
        history.close(10.0, {"default": (5, 0, 0)})
        history.note(9.0, "something")
        told = json.loads((await parts.get("/history")).content)
        assert told == {
            "step": 10,
            "closed": 1,
            "buckets": [[10.0, 5, 0, 0, 1, 2, 3, 4, {"default": [5, 0, 0]}]],
            "events": [[9.0, "info", "notice", "something"]],
        }
        assert (await parts.get("/history?after=1")).json()["buckets"] == []
        assert (await parts.get("/history?after=x")).status_code == 400
        assert "health checks" in (await parts.get("/runbooks/WeirEngineDown")).text
        assert (await parts.get("/runbooks/nothing")).status_code == 404

    observer = Observer(History(), None, None, CallCounts, EndedCalls(), time.monotonic)  # type: ignore[arg-type]
    play(scene, observer=observer)


def test_the_history_wants_the_admin_token() -> None:
    async def scene(parts: Parts) -> None:
        for path in ("/history", "/runbooks/WeirEngineDown", "/sidecars/box/models/m/logs"):
            assert (await parts.get(path)).status_code == 401

    play(scene, "t" * 20)


def test_a_canary_that_was_taken_out_is_shown_counted_and_told_once() -> None:
    members = (RouteMember(model="old"), RouteMember(model="new", until=Until(errors=0.02)))
    policy = Policy(models={"support": ModelRoute(members=members)})

    async def scene(parts: Parts) -> None:
        routes, told = parts.dispatch.routes, []
        routes.say = told.append
        record = Record(request_id="r", route="", model="old", asked_model="support", outcome=Outcome.OK)
        for second in range(400):
            routes.observe(record, float(second))
            routes.observe(structs.replace(record, model="new", outcome=Outcome.UPSTREAM), float(second))
        (line,) = [each for each in await headline(parts) if "canary" in each["what"]]
        assert line["what"] == "The canary new gets no more calls of support: it is worse than the other members."
        assert line["why"].startswith("errors: ")
        assert line["change"] == "Mend it, then change its member in models.support: the trial begins anew."
        assert [each.partition(":")[0] for each in told] == [
            "new gets no more calls of the model route support, whose canary it was"
        ]
        (samples,) = [family.samples for family in route_families(routes) if family.name == "weir_canary_out"]
        (sample,) = samples
        assert (sample.labels, sample.value) == ({"asked_model": "support", "model": "new"}, 1.0)

    play(scene, policy=policy)
