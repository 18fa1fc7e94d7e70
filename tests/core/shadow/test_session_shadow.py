"""Sessions of a shadow policy: what it would have placed and ordered otherwise, and that it touches nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from copy import copy

from msgspec import structs

from gateway.core.engines.choice import Choice
from gateway.core.policy.policy import Policy
from gateway.core.policy.sessions import SessionsPolicy
from gateway.core.policy.traffic import TrafficClass
from gateway.core.shadow.shadow import Counts, Shadow
from loadtest.simulate import vtime
from tests.calls import a_call
from tests.core.sessions.test_sessions_wait import ROOT, Sessions

PLAIN = Policy(classes={"default": TrafficClass(ttft=None, deadline=600.0)}, service_tiers={})
SESSIONS = structs.replace(PLAIN, sessions=SessionsPolicy(head_start=4.0, keep=10.0))


class Shadowed(Sessions):
    """The same engines, with a second policy beside the enforced one."""

    def __init__(self, enforced: Policy, shadow: Policy) -> None:
        super().__init__(enforced)
        self.bugs: list[Exception] = []
        self.shadow = Shadow(shadow, self.bugs.append)
        self.shadow.beside(enforced)
        self.dispatch.session_shadow = self.shadow.sessions


def run(enforced: Policy, shadow: Policy, scenario: Callable[[Shadowed], Awaitable[None]]) -> Counts:
    async def main() -> Counts:
        made = Shadowed(enforced, shadow)
        await asyncio.sleep(1.0)
        await scenario(made)
        made.idle()
        assert not made.bugs
        return made.shadow.counts()

    return vtime.run(main())


async def beside_a_full_home(made: Shadowed) -> None:
    """A session's second call comes while the engine that knows it is full for a moment."""
    home = made.engine(int((await made.read(made.turn(*ROOT)))[1:]))
    hold = home.hold(60_000, 0, made.loop.time(), "default")
    asked = asyncio.create_task(made.read(made.turn(*ROOT, 9, tokens=44_000)))
    await asyncio.sleep(1.0)
    hold.release()
    made.dispatch.changed(home)
    await asked


def test_a_call_that_only_the_shadow_would_keep_for_its_engine_is_set_aside() -> None:
    counts = run(PLAIN, SESSIONS, beside_a_full_home)
    assert counts == {("engine", "chosen", "chosen"): 1, ("engine", "chosen", "aside"): 1}


def test_a_call_that_waits_for_the_sake_of_its_session_had_gone_elsewhere() -> None:
    counts = run(SESSIONS, PLAIN, beside_a_full_home)
    assert counts[("engine", "chosen", "chosen")] == 2, "its engine is the best again once it has room"
    assert counts[("ahead", "more", "less")] == 1


async def both_full(made: Shadowed) -> None:
    await made.read(made.turn(*ROOT))
    holds = [engine.hold(60_000, 0, made.loop.time(), "default") for engine in (made.engine(0), made.engine(1))]
    asked = [asyncio.create_task(made.read(made.turn(*prefix, tokens=44_000))) for prefix in ((*ROOT, 9), (20, 21, 22))]
    await asyncio.sleep(1.0)
    for hold in holds:
        hold.release()
    made.dispatch.pump()
    await asyncio.gather(*asked)


def test_a_waiting_call_that_is_cached_would_go_before_its_turn() -> None:
    counts = run(PLAIN, SESSIONS, both_full)
    assert counts[("ahead", "less", "more")] == 1, "the one that is cached"
    assert counts[("ahead", "equal", "equal")] == 1, "the stranger"


def test_least_served_goes_by_what_the_shadow_remembers() -> None:
    least = structs.replace(PLAIN, sessions=SessionsPolicy(order="least_served"))
    counts = run(PLAIN, least, both_full)
    assert counts[("ahead", "more", "less")] == 1, "the session that was served before goes later"


def test_the_call_is_as_it_was() -> None:
    async def scenario(made: Shadowed) -> None:
        call = made.turn(*ROOT, session=0)
        before = copy(call)
        await made.read(call)
        assert call == before, "no session of the shadow's is written into it"

    run(PLAIN, SESSIONS, scenario)


def test_calls_that_leave_the_queue_are_waited_for_no_more() -> None:
    async def scenario(made: Shadowed) -> None:
        for prefix in (ROOT, (*ROOT, 9)):
            await made.read(made.turn(*prefix))
        holds = [engine.hold(80_000, 0, made.loop.time(), "default") for engine in made.dispatch.fleet]
        asked = asyncio.create_task(made.read(made.turn(*ROOT, 9, 10)))
        await asyncio.sleep(1.0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        for hold in holds:
            hold.release()
        memory = made.dispatch.session_shadow
        assert memory is not None
        assert memory._memory is not None
        assert not memory._memory._kept

    run(PLAIN, SESSIONS, scenario)


def test_it_is_there_only_where_the_policies_differ_in_sessions() -> None:
    shadow = Shadow(SESSIONS, lambda _: None)
    shadow.beside(SESSIONS)
    assert shadow.sessions is None
    shadow.beside(PLAIN)
    first = shadow.sessions
    assert first is not None
    shadow.apply(structs.replace(SESSIONS, sessions=SessionsPolicy(order="arrival")), 0.0)
    shadow.beside(PLAIN)
    assert shadow.sessions is first, "it goes on with what it remembers"
    assert first._memory is not None
    assert first._memory.policy.order == "arrival"
    shadow.beside(shadow.snapshot.policy)
    assert shadow.sessions is None


def test_a_shadow_without_sessions_remembers_none() -> None:
    shadow = Shadow(PLAIN, lambda _: None)
    shadow.beside(SESSIONS)
    assert shadow.sessions is not None
    shadow.sessions.arrive(a_call(prefix=ROOT), 0.0)
    shadow.sessions.left(a_call(prefix=ROOT))
    assert (shadow.sessions._memory, shadow.bugs) == (None, 0)


def test_a_stranger_would_leave_room_to_a_session_that_is_expected_back() -> None:
    async def scenario(made: Shadowed) -> None:
        await made.read(made.turn(*ROOT))
        home = made.engine(int((await made.read(made.turn(*ROOT, 9)))[1:]))
        other = made.engine(1 - int(home.id[1:]))
        hold = other.hold(
            10_000, 500_000, made.loop.time(), "default"
        )  # so the engine of the session is the better one
        await made.read(made.turn(20, 21, 22, tokens=65_000))
        hold.release()

    counts = run(PLAIN, SESSIONS, scenario)
    assert counts == {("engine", "chosen", "chosen"): 2, ("engine", "chosen", "another"): 1}


def test_a_bug_in_it_costs_no_call() -> None:
    async def main() -> None:
        made = Shadowed(PLAIN, SESSIONS)
        choice = Choice(made.engine(0), 1, 0, 1.0)
        shadow = made.dispatch.session_shadow
        assert shadow is not None
        shadow.granted(None, choice, (), 0.0, None, frozenset())  # type: ignore[arg-type]
        assert (made.shadow.bugs, len(made.bugs)) == (1, 1)
        call = made.turn(*ROOT)
        with await made.dispatch.ask(call) as grant:
            await grant.move(frozenset((grant.engine.id,)))
        assert made.shadow.counts()[("engine", "chosen", "chosen")] == 1, "one that lost its engine is not compared"

    vtime.run(main())
