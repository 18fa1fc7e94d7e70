"""Calls for models that are not awake, in virtual time: requests to sidecars, waits, and immediate refusals.

The gateway is the real one without its sockets. A sidecar is played by real messages: its reports go in as bytes, and
what it is asked arrives as HTTP requests on a transport in memory.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise
from typing import Any

import httpx
import msgspec
import pytest

from gateway.control.view import model_views
from gateway.core.engines.breaker import BreakerState, Ending
from gateway.core.engines.origin import engine_id
from gateway.core.policy.policy import FleetPolicy, Policy, SidecarsPolicy
from gateway.core.policy.traffic import TrafficClass
from gateway.core.request.call import Call
from gateway.core.request.outcome import Outcome, Refused
from gateway.core.request.record import Record
from gateway.core.sidecars.sidecar import STALE
from gateway.decider.loading import Configuration
from gateway.serve.assembly import Gateway
from gateway.shared.protocol import MAX_BYTES, CapacityReport, Demand, Ensured, ModelReport, encode
from gateway.shared.vllm.answers import EngineSample
from loadtest.simulate import vtime
from tests.calls import a_call

POLICY = Policy(
    classes={"default": TrafficClass(max_queue=1000)},
    service_tiers={},
    fleet=FleetPolicy(sidecars=SidecarsPolicy()),
)


class PlayedSidecar:
    """One machine with profiles of model `m`: ready `takes` seconds after it was asked. `answers` False: it is gone."""

    def __init__(self, world: World, name: str, port: int, takes: float, profiles: tuple[str, ...]) -> None:
        self.world = world
        self.name = name
        self.port = port
        self.takes = takes
        self.sequence = 0
        self.answers = True
        self.does = True  # what it agrees to
        self.asked: list[tuple[float, str]] = []
        self.models = {
            profile: ModelReport(profile=profile, model="m", state="sleeping", ready_in=takes, context_length=4096)
            for profile in profiles
        }

    @property
    def control(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url(self, profile: str) -> str:
        return f"http://127.0.0.1:{self.port + 1 + list(self.models).index(profile)}"

    def say(self, profile: str = "", **fields: Any) -> dict[str, Demand]:
        """A report, in which these are the new fields of a profile."""
        if profile:
            self.models[profile] = msgspec.structs.replace(self.models[profile], **fields)
        self.sequence += 1
        report = CapacityReport(
            sidecar=self.name,
            boot="b",
            sequence=self.sequence,
            control=self.control,
            models=tuple(self.models.values()),
        )
        answer = self.world.gateway.sidecars.report(encode(report), local=True)
        assert (answer.boot, answer.sequence) == ("b", self.sequence)
        return {demand.profile: demand for demand in answer.demands}

    def running(self, profile: str) -> dict[str, Demand]:
        return self.say(profile, state="running", pending=None, url=self.url(profile), ready_in=0.0)

    def ensure(self, profile: str) -> httpx.Response:
        """An order that has come in."""
        self.asked.append((self.world.loop.time(), profile))
        if not self.answers:
            raise httpx.ConnectError("nobody listens")
        model = self.models[profile]
        if self.does and model.ready_in is not None and model.pending is None:
            self.models[profile] = model = msgspec.structs.replace(model, pending="wake")
            self.world.loop.call_later(self.takes, self.running, profile)
        return httpx.Response(200, content=streamed(encode(Ensured(model=model))))


async def streamed(body: bytes) -> AsyncIterator[bytes]:
    """As a body comes over a socket."""
    yield body


class World:
    """A gateway that hears sidecars, and has no other engine."""

    def __init__(self, policy: Policy = POLICY) -> None:
        self.loop = asyncio.get_running_loop()
        self.lines: list[str] = []
        self.gateway = Gateway(Configuration(policy), (), None, random.Random(1), say=self.say)
        self.gateway.waking.transport = httpx.MockTransport(self._answer)
        self.dispatch = self.gateway.dispatch
        self.sidecars: list[PlayedSidecar] = []

    def say(self, line: str) -> None:
        """Lines about engines have tests of their own."""
        if not line.startswith("engine "):
            self.lines.append(line)

    def sidecar(self, name: str = "a", takes: float = 3.0, profiles: tuple[str, ...] = ("p",)) -> PlayedSidecar:
        made = PlayedSidecar(self, name, 9000 + 100 * len(self.sidecars), takes, profiles)
        self.sidecars.append(made)
        made.say()
        return made

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(0.01)
        _, _, profile, order = request.url.path.split("/")
        assert (request.method, order) == ("POST", "ensure")
        sidecar = next(each for each in self.sidecars if each.port == request.url.port)
        return sidecar.ensure(profile)

    def call(self, within: float = 100.0, prompt_tokens: int = 100, **fields: Any) -> Call:
        now = self.loop.time()
        return a_call(arrived=now, deadline=now + within, prompt_tokens=prompt_tokens, **fields)

    async def use(self, call: Call, seconds: float = 0.1) -> tuple[str, float]:
        """One call to its record: the engine, and when it was granted."""
        record = Record(request_id=call.request_id, route=call.route.path)
        try:
            with await self.dispatch.ask(call) as grant:
                record.engine, at = grant.engine.id, self.loop.time()
                await asyncio.sleep(seconds)
                return grant.engine.id, at
        finally:
            self.gateway.recorder.observe(record)

    def start(self, *calls: Call, seconds: float = 0.1) -> list[asyncio.Task[tuple[str, float]]]:
        return [asyncio.create_task(self.use(call, seconds)) for call in calls]

    async def refused(self, call: Call) -> Refused:
        with pytest.raises(Refused) as refused:
            await self.use(call)
        return refused.value


def virtual(scenario: Callable[[World], Awaitable[None]], policy: Policy = POLICY) -> None:
    """Run it, and see that nothing is left."""

    async def main() -> None:
        world = World(policy)
        problems: list[str] = []
        world.loop.set_exception_handler(lambda _, context: problems.append(str(context)))
        await scenario(world)
        dispatch = world.dispatch
        assert not any(dispatch.left_over().values())
        assert all(engine.ledger.in_flight == 0 for engine in world.gateway.fleet)
        assert not world.gateway.engines.retired
        assert (
            set(world.gateway.engines.clients)
            == set(world.gateway.fleet.engines)
            == set(world.gateway.telemetry._watchers)
        )
        await world.gateway.aclose()
        assert problems == []
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not dispatch.left_over()["a timer"]
        assert isinstance(world.loop, vtime.VirtualLoop)
        assert world.loop.timers == []

    vtime.run(main())


# -- holding ----------------------------------------------------------------------------------------------------------


def test_a_hundred_calls_wait_for_one_order_and_go_with_the_report() -> None:
    async def scenario(world: World) -> None:
        sidecar = world.sidecar(takes=3.0)
        tasks = world.start(*(world.call(prompt_tokens=40) for _ in range(100)))
        await asyncio.sleep(1.0)
        (demand,) = sidecar.say().values()
        assert (demand.waiting, demand.in_flight, demand.idle, demand.withdrawn) == (100, 0, 0.0, True)
        done = await asyncio.gather(*tasks)
        assert {at for _, at in done} == {3.01}, "with the very report that says that it runs"
        assert sidecar.asked == [(0.01, "p")]
        assert world.gateway.waking.models == ()
        assert world.dispatch.sidecars.waking == {}
        (demand,) = sidecar.say().values()
        assert (demand.waiting, demand.in_flight, demand.idle, demand.withdrawn) == (0, 0, 0.0, False)
        await asyncio.sleep(5.0)
        assert sidecar.say()["p"].idle == pytest.approx(5.0)

    virtual(scenario)


def test_what_operators_see_of_a_wait_has_the_time_until_the_model_is_ready() -> None:
    async def scenario(world: World) -> None:
        world.sidecar(takes=8.0)
        waiting = world.start(world.call(), world.call())
        await asyncio.sleep(1.0)
        (model,) = model_views(world.dispatch, world.loop.time())
        assert (model.queued_calls, model.engines) == (2, [])
        assert model.wait_s == pytest.approx(8.0, abs=1.1)
        assert model.wait_s_by_class == {"default": pytest.approx(7.0, abs=0.1)}
        await asyncio.gather(*waiting)
        (model,) = model_views(world.dispatch, world.loop.time())
        assert model.wait_s_by_class == {"default": 0.0}, "it is awake"

    virtual(scenario)


def test_a_call_that_cannot_wait_so_long_is_told_when_and_the_model_is_made_ready_for_its_return() -> None:
    async def scenario(world: World) -> None:
        sidecar = world.sidecar(takes=7.0)
        refused = await world.refused(world.call(within=6.0))
        assert (refused.outcome, refused.status, refused.retry_after) == (Outcome.MODEL_UNAVAILABLE, 503, 7.0)
        assert "(7.0 s until its model is ready), and its deadline is 6.0 s" in refused.message
        assert world.loop.time() == 0.0
        await asyncio.sleep(1.0)
        assert sidecar.say()["p"].idle == 1.0, "it was wanted, though nobody waits"
        refused = await world.refused(world.call(ttft_by=5.0))
        assert refused.outcome is Outcome.MODEL_UNAVAILABLE, "its first token would be late"
        await asyncio.sleep(3.0)
        sidecar.say("p", ready_in=3.0)
        assert (await world.refused(world.call(within=2.0))).retry_after == pytest.approx(3.0)
        await asyncio.sleep(3.1)
        assert (await world.use(world.call(within=1.0)))[1] == pytest.approx(7.1)
        assert len(sidecar.asked) == 1

    virtual(scenario)


def test_a_call_waits_for_its_model_whatever_it_is_held_for() -> None:
    """No answer of the model has been seen, so nothing is known of its length."""

    async def scenario(world: World) -> None:
        sidecar = world.sidecar(takes=3.0)
        call = world.call(within=120.0, ttft_by=60.0, output_tokens=4091)
        waiting = world.start(call)
        await asyncio.sleep(1.0)
        sidecar.say("p", ready_in=4.0)  # it takes longer
        assert (await waiting[0])[1] == pytest.approx(3.0, abs=0.02)

    virtual(scenario)


def test_what_nobody_can_have_ready_is_refused_in_the_sidecars_words() -> None:
    async def scenario(world: World) -> None:
        sidecar = world.sidecar()
        sidecar.say("p", ready_in=None, why="no_memory", message="every resident is busy", retry_in=12.0)
        refused = await world.refused(world.call())
        assert (refused.outcome, refused.reason, refused.retry_after) == (Outcome.MODEL_UNAVAILABLE, "no_memory", 12.0)
        assert "every resident is busy" in refused.message
        assert sidecar.asked == []
        assert world.gateway.fleet.models == {}, "it cannot be had"
        sidecar.say("p", why="error", message="it fails", retry_in=None)
        refused = await world.refused(world.call())
        assert (refused.reason, refused.retry_after, refused.retry) == ("model_unavailable", None, False)
        sidecar.say("p", why="draining", message="it was withdrawn by hand", retry_in=None)
        refused = await world.refused(world.call())
        assert (refused.reason, refused.retry_after) == ("model_unavailable", 5.0)
        told = await world.refused(world.call(model="x"))
        assert (told.outcome, told.retry_after) == (Outcome.NO_ENGINE, 1.0), "another sidecar may have it"
        await asyncio.sleep(STALE)
        sidecar.say()
        assert (await world.refused(world.call(model="x"))).outcome is Outcome.NOT_FOUND, "all that are there have said"
        world.gateway.apply(Configuration(POLICY))
        assert (await world.refused(world.call(model="x"))).outcome is Outcome.NOT_FOUND, "a reload is no beginning"

    virtual(scenario)


def test_what_is_switched_off_is_refused_for_good_and_calls_that_wait_for_it_too() -> None:
    async def scenario(world: World) -> None:
        sidecar = world.sidecar(takes=30.0)
        (waiting,) = world.start(world.call())
        await asyncio.sleep(1.0)
        sidecar.say("p", pending=None, ready_in=None, why="off", message="p is off")
        with pytest.raises(Refused, match="has switched the model 'm' off"):
            await waiting
        asked = len(sidecar.asked)
        refused = await world.refused(world.call())
        assert (refused.outcome, refused.reason, refused.code) == (
            Outcome.MODEL_UNAVAILABLE, "model_off", "model_off",
        )  # fmt: skip
        assert (refused.retry_after, refused.retry) == (None, False)
        assert len(sidecar.asked) == asked, "no sidecar is asked for it"
        assert "m" not in world.gateway.fleet.models
        await asyncio.sleep(30.0)

    virtual(scenario)


def test_calls_are_told_when_the_prediction_moves_out_of_their_reach() -> None:
    async def scenario(world: World) -> None:
        sidecar = world.sidecar(takes=10.0)
        sidecar.say("p", ready_in=4.0)
        short, long = world.start(world.call(within=8.0), world.call(within=50.0))
        await asyncio.sleep(1.0)
        sidecar.say("p", ready_in=3.0)
        await asyncio.sleep(1.0)
        assert not short.done(), "it is as was foretold"
        sidecar.say("p", ready_in=8.0)
        await asyncio.sleep(0.0)
        with pytest.raises(Refused, match=r"8\.0 s until its model is ready"):
            await short
        assert world.loop.time() == 2.0
        assert (await long)[1] == pytest.approx(10.01)

    virtual(scenario)


def test_calls_are_told_when_it_cannot_be_had_after_all() -> None:
    async def scenario(world: World) -> None:
        sidecar = world.sidecar()
        (task,) = world.start(world.call())
        await asyncio.sleep(1.0)
        sidecar.say("p", pending=None, ready_in=None, why="no_memory", message="something took the memory")
        with pytest.raises(Refused, match="something took the memory"):
            await task
        sidecar.say("p", ready_in=3.0)
        await asyncio.sleep(5.0)

    virtual(scenario)


def test_a_deadline_that_passes_while_it_is_made_ready_is_said_with_the_time_that_is_left() -> None:
    async def scenario(world: World) -> None:
        sidecar = world.sidecar(takes=10.0)
        sidecar.say("p", ready_in=2.0)
        (task,) = world.start(world.call(ttft_by=4.0))
        await asyncio.sleep(1.0)
        sidecar.say("p", ready_in=2.9)
        with pytest.raises(Refused) as refused:
            await task
        assert refused.value.outcome is Outcome.MODEL_UNAVAILABLE
        await asyncio.sleep(10.0)

    virtual(scenario)


def test_a_call_that_leaves_withdraws_its_demand() -> None:
    async def scenario(world: World) -> None:
        sidecar = world.sidecar()
        sidecar.does = False
        tasks = world.start(world.call(), world.call())
        await asyncio.sleep(0.5)
        assert sidecar.say()["p"].waiting == 2
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert sidecar.say()["p"].waiting == 0
        await asyncio.sleep(3.0)
        assert world.gateway.waking.models == ()
        assert len(sidecar.asked) == 1

    virtual(scenario)


def test_without_prediction_a_call_waits_until_its_deadline() -> None:
    async def scenario(world: World) -> None:
        world.sidecar(takes=7.0)
        refused = await world.refused(world.call(within=6.0))
        assert (refused.outcome, world.loop.time()) == (Outcome.MODEL_UNAVAILABLE, 6.0)
        await asyncio.sleep(2.0)

    virtual(scenario, msgspec.structs.replace(POLICY, deadlines="run"))


def test_what_no_engine_of_the_model_would_hold_is_not_waited_for() -> None:
    async def scenario(world: World) -> None:
        sidecar = world.sidecar()
        sidecar.say("p", kv_tokens=100)
        assert (await world.refused(world.call())).outcome is Outcome.TOO_LARGE
        sidecar.say("p", kv_tokens=None)
        assert (await world.use(world.call()))[1] == pytest.approx(3.01)
        assert sidecar.asked == [(0.01, "p")]

    virtual(scenario)


def test_a_full_queue_refuses_as_ever() -> None:
    async def scenario(world: World) -> None:
        world.sidecar()
        tasks = world.start(*(world.call() for _ in range(3)))
        await asyncio.sleep(0.0)
        assert [type(task.exception()) for task in tasks if task.done()] == [Refused]
        assert len([task for task in await asyncio.gather(*tasks, return_exceptions=True) if type(task) is tuple]) == 2

    virtual(scenario, msgspec.structs.replace(POLICY, classes={"default": TrafficClass(max_queue=2)}))


# -- who is asked -----------------------------------------------------------------------------------------------------


def test_who_is_ready_soonest_is_asked_and_alone() -> None:
    async def scenario(world: World) -> None:
        slow, fast = world.sidecar("a", takes=8.0), world.sidecar("b", takes=2.0)
        assert (await world.use(world.call()))[0] == engine_id(fast.url("p"))
        assert (slow.asked, len(fast.asked)) == ([], 1)
        assert slow.say()["p"].waiting == 0

    virtual(scenario)


def test_who_does_not_answer_is_passed_over() -> None:
    async def scenario(world: World) -> None:
        gone, other = world.sidecar("a", takes=2.0), world.sidecar("b", takes=4.0)
        gone.answers = False
        assert (await world.use(world.call())) == (engine_id(other.url("p")), pytest.approx(4.02))
        assert (len(gone.asked), len(other.asked)) == (1, 1)
        assert world.lines == ["sidecar a was asked for 'p': nobody listens"]

    virtual(scenario)


def test_who_does_not_answer_is_asked_again_ever_more_rarely() -> None:
    async def scenario(world: World) -> None:
        sidecar = world.sidecar(takes=2.0)
        sidecar.answers = False
        (task,) = world.start(world.call(within=30.0))
        for _ in range(9):
            await asyncio.sleep(1.0)
            sidecar.say()
        sidecar.answers = True
        assert (await task)[1] == pytest.approx(17.6, abs=0.1)
        gaps = [later - sooner for (sooner, _), (later, _) in pairwise(sidecar.asked)]
        assert gaps == pytest.approx([0.5, 1.0, 2.0, 4.0, 8.0], abs=0.05)
        assert len(world.lines) == 1

    virtual(scenario)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (500, "it answered 500"),
        (302, "it answered 302"),
        (b"nonsense", "JSON is malformed"),
        (b" " * (MAX_BYTES + 1), f"an answer of more than {MAX_BYTES} bytes"),
        (encode(Ensured(model=ModelReport(profile="x", model="m", state="running"))), "an answer about 'x'"),
        (None, "TimeoutError"),
    ],
)
def test_an_answer_that_makes_no_sense_is_none(answer: int | bytes | None, said: str) -> None:
    async def scenario(world: World) -> None:
        sidecar = world.sidecar()
        asked = []

        async def respond(request: httpx.Request) -> httpx.Response:
            asked.append(request.headers["authorization"])
            if answer is None:
                await asyncio.sleep(60.0)
            status, body = (200, answer) if isinstance(answer, bytes) else (answer or 504, b"")
            return httpx.Response(status, headers={"location": "http://127.0.0.1:1"}, content=streamed(body))

        world.gateway.waking.transport = httpx.MockTransport(respond)
        world.gateway.apply(Configuration(POLICY, {}, ("the-token-of-both",)))
        (task,) = world.start(world.call(within=30.0))
        await asyncio.sleep(3.2)
        assert said in world.lines[0]
        assert asked[0] == "Bearer the-token-of-both"
        assert world.gateway.waking.results["failed"] == len(asked) - (answer is None and len(asked) > 1)
        sidecar.running("p")
        await task

    virtual(scenario)


def test_who_agrees_and_does_nothing_is_asked_again_ever_more_rarely() -> None:
    async def scenario(world: World) -> None:
        sidecar = world.sidecar()
        sidecar.does = False
        (task,) = world.start(world.call(within=30.0))
        for _ in range(14):
            await asyncio.sleep(1.0)
            sidecar.say()
        assert [round(at) for at, _ in sidecar.asked] == [0, 1, 3, 7]
        sidecar.does = True
        sidecar.say()
        assert (await task)[1] == pytest.approx(18.1, abs=0.2)

    virtual(scenario)


def test_the_next_is_tried_when_one_says_that_it_cannot() -> None:
    async def scenario(world: World) -> None:
        first, second = world.sidecar("a", takes=2.0), world.sidecar("b", takes=5.0)
        first.models["p"] = msgspec.structs.replace(first.models["p"], ready_in=None, why="no_memory")
        (task,) = world.start(world.call())
        assert (await task) == (engine_id(second.url("p")), pytest.approx(5.02)), "at once"
        assert (len(first.asked), len(second.asked)) == (1, 1)
        assert world.gateway.waking.results == {"awake": 0, "begun": 1, "cannot": 1, "failed": 0}

    virtual(scenario)


def test_calls_are_told_at_once_when_the_only_one_says_that_it_cannot() -> None:
    async def scenario(world: World) -> None:
        sidecar = world.sidecar()
        sidecar.models["p"] = msgspec.structs.replace(
            sidecar.models["p"], ready_in=None, why="no_memory", message="full"
        )
        assert "full" in (await world.refused(world.call())).message
        assert world.loop.time() == 0.01

    virtual(scenario)


def test_one_that_gives_up_what_it_has_begun_is_asked_again_with_that_report() -> None:
    async def scenario(world: World) -> None:
        sidecar = world.sidecar(takes=8.0)
        (task,) = world.start(world.call())
        await asyncio.sleep(2.5)
        sidecar.say("p", pending=None)
        await asyncio.sleep(0.1)
        assert [at for at, _ in sidecar.asked] == [0.01, pytest.approx(2.51)]
        await task
        await asyncio.sleep(3.0)

    virtual(scenario)


def test_an_answer_that_it_runs_opens_nothing_before_the_report() -> None:
    async def scenario(world: World) -> None:
        sidecar = world.sidecar()
        sidecar.does = False
        (task,) = world.start(world.call())
        sidecar.models["p"] = msgspec.structs.replace(sidecar.models["p"], state="running", ready_in=0.0)
        await asyncio.sleep(0.5)
        assert not task.done()
        assert not world.gateway.fleet.engines
        sidecar.running("p")
        assert (await task)[1] == 0.5

    virtual(scenario)


def test_with_every_engine_gone_a_sidecar_starts_it_elsewhere() -> None:
    async def scenario(world: World) -> None:
        first, second = world.sidecar("a"), world.sidecar("b", takes=2.0)
        first.running("p")
        assert (await world.use(world.call()))[0] == engine_id(first.url("p"))
        assert second.asked == []
        engine = world.gateway.fleet.engines[engine_id(first.url("p"))]
        engine.down()
        world.gateway.engines.changed(engine)
        assert (await world.use(world.call()))[0] == engine_id(second.url("p"))
        assert (first.asked, len(second.asked)) == ([], 1)

    virtual(scenario)


def test_what_waits_for_an_engine_that_goes_away_has_another_made_ready() -> None:
    async def scenario(world: World) -> None:
        first, second = world.sidecar("a"), world.sidecar("b", takes=2.0)
        first.say("p", max_concurrency=1)
        first.running("p")
        running, waiting = world.start(world.call(), world.call(), seconds=3.0)
        await asyncio.sleep(1.0)
        assert second.asked == []
        first.say("p", pending="stop", ready_in=None, why="draining")
        assert (await waiting) == (engine_id(second.url("p")), pytest.approx(3.01))
        assert (await running)[0] == engine_id(first.url("p"))

    virtual(scenario)


def test_two_that_have_it_awake_share_the_calls() -> None:
    async def scenario(world: World) -> None:
        for name in "ab":
            world.sidecar(name).running("p")
        engines = [engine for engine, _ in await asyncio.gather(*world.start(*(world.call() for _ in range(20))))]
        assert sorted(map(engines.count, set(engines))) == [10, 10]

    virtual(scenario)


# -- engines come and go ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pending", ["drain", "sleep", "stop"])
def test_an_engine_that_is_to_sleep_gets_nothing_more_and_what_runs_there_ends(pending: str) -> None:
    async def scenario(world: World) -> None:
        sidecar = world.sidecar(profiles=("p", "q"))
        sidecar.running("p")
        (running,) = world.start(world.call(), seconds=2.0)
        await asyncio.sleep(1.0)
        demand = sidecar.say("p", pending=pending, ready_in=5.0)["p"]
        assert (demand.withdrawn, demand.in_flight) == (True, 1)
        (held,) = world.start(world.call())
        await running
        demand = sidecar.say()["p"]
        assert (demand.withdrawn, demand.in_flight) == (True, 0)
        sidecar.say("p", state="sleeping", pending=None)
        assert (await held)[0] == engine_id(sidecar.url("q")), "the other profile is ready sooner"
        (engine,) = [engine for engine in world.gateway.fleet if engine.draining]
        assert engine.health.up, "a sleeping engine answers its health checks"
        sidecar.running("p")
        assert not engine.draining

    virtual(scenario)


def test_an_engine_that_is_gone_is_forgotten_once_its_last_call_has_ended() -> None:
    async def scenario(world: World) -> None:
        sidecar = world.sidecar()
        sidecar.running("p")
        (running,) = world.start(world.call(), seconds=2.0)
        await asyncio.sleep(1.0)
        sidecar.say("p", state="stopped", url="", ready_in=30.0)
        assert [engine.draining for engine in world.gateway.fleet] == [True]
        await running
        assert world.gateway.fleet.engines == world.gateway.engines.clients == {}
        assert "m" in world.gateway.fleet.models, "it can be had"

    virtual(scenario)


def test_a_silent_sidecar_keeps_its_engines_and_has_nothing_else_to_offer() -> None:
    async def scenario(world: World) -> None:
        sidecar = world.sidecar(profiles=("p", "q"))
        sidecar.models["q"] = msgspec.structs.replace(sidecar.models["q"], model="n")
        sidecar.does = False
        sidecar.running("p")
        (held,) = world.start(world.call(model="n", within=60.0))
        assert set(world.gateway.fleet.models) == {"m", "n"}
        await asyncio.sleep(9.9)
        assert not held.done()
        await asyncio.sleep(0.2)
        with pytest.raises(Refused) as refused:
            await held
        assert (refused.value.outcome, world.loop.time()) == (Outcome.NO_ENGINE, pytest.approx(10.1))
        assert (await world.refused(world.call(model="n"))).outcome is Outcome.NO_ENGINE, "known, and silent"
        assert set(world.gateway.fleet.models) == {"m"}
        assert (await world.use(world.call()))[0] == engine_id(sidecar.url("p"))
        sidecar.say()
        assert set(world.gateway.fleet.models) == {"m", "n"}

    virtual(scenario)


def test_a_silent_sidecar_is_forgotten_one_day_and_so_are_its_dead_engines() -> None:
    async def scenario(world: World) -> None:
        sidecar = world.sidecar()
        sidecar.running("p")
        await asyncio.sleep(700.0)
        (engine,) = world.gateway.fleet
        engine.down()
        await asyncio.sleep(61.0)
        assert world.gateway.fleet.engines == {}
        assert world.dispatch.sidecars.sidecars == {}
        assert (await world.refused(world.call())).outcome is Outcome.NOT_FOUND

    virtual(scenario)


def test_what_its_sidecar_says_of_an_engine_is_believed_until_it_tells_itself() -> None:
    async def scenario(world: World) -> None:
        sidecar = world.sidecar()
        sidecar.say("p", kv_tokens=5000, max_concurrency=7, priorities=True)
        sidecar.running("p")
        (engine,) = world.gateway.fleet
        assert engine.priorities
        assert (engine.ledger.capacity, engine.ledger.slots, engine.health.up) == (5000, 7, True)
        assert world.gateway.fleet.context("m") == 4096
        sidecar.say("p", kv_tokens=6000)
        assert engine.ledger.capacity == 6000
        engine.sampled(EngineSample(running=0, waiting=0, kv_usage=0.0, capacity_tokens=9000), 0.0)
        sidecar.say("p", kv_tokens=7000)
        assert engine.ledger.capacity == 9000

    virtual(scenario)


def test_engines_of_a_sidecar_have_the_roles_that_it_reports() -> None:
    async def scenario(world: World) -> None:
        sidecar = world.sidecar(profiles=("p", "q"))
        sidecar.say("p", transfer="nixl", role="prefill")
        sidecar.say("q", transfer="nixl")
        sidecar.running("p")
        demands = sidecar.running("q")
        assert [demands[profile].copy for profile in ("p", "q")] == [True, False], "nobody else is there to answer"
        fleet = world.gateway.fleet
        reader, writer = (fleet.engines[engine_id(sidecar.url(profile))] for profile in ("p", "q"))
        assert [engine.transfers.answers for engine in (reader, writer)] == [False, True]
        assert fleet.serving("m") == fleet.readers("m") == (reader, writer)
        assert {engine.transfers.group for engine in fleet} == {"nixl@a"}
        sidecar.say("p", role="both")
        assert reader.transfers.answers, "a role that changes while it runs"
        sidecar.say("q", transfer="")
        assert fleet.readers("m") == (reader,)

    virtual(scenario)


def test_an_engine_that_has_slept_begins_anew() -> None:
    async def scenario(world: World) -> None:
        sidecar = world.sidecar()
        sidecar.running("p")
        (engine,) = world.gateway.fleet
        engine.remember((1, 2), 300, 0.0)
        engine.ledger.excess = 500
        for _ in range(5):
            engine.breaker.ended(engine.breaker.sent(0.0), Ending.FAILURE, 0.0)
        assert engine.breaker.state is BreakerState.OPEN
        sidecar.say("p", state="sleeping")
        sidecar.running("p")
        assert (engine.cache.leading((1, 2)), engine.ledger.excess) == (0, 0)
        assert engine.breaker.state is BreakerState.CLOSED, "what it failed before is over"

    virtual(scenario)


def test_a_gateway_that_ends_asks_nobody_any_more() -> None:
    async def scenario(world: World) -> None:
        world.sidecar()
        tasks = world.start(world.call())
        await asyncio.sleep(0.005)
        world.dispatch.refuse_waiting()
        await asyncio.wait(tasks)
        assert [type(task.exception()) for task in tasks] == [Refused]
        assert world.gateway.waking.models == ("m",)

    virtual(scenario)


def test_an_operators_drain_outlasts_what_the_sidecar_says() -> None:
    async def scenario(world: World) -> None:
        sidecar = world.sidecar()
        sidecar.running("p")
        (engine,) = world.gateway.fleet
        world.gateway.engines.drain(engine, True)
        sidecar.say("p", pending="drain")
        world.gateway.engines.drain(engine, False)
        assert engine.draining, "its sidecar is about to put it to sleep"
        world.gateway.engines.drain(engine, True)
        sidecar.running("p")
        assert engine.draining
        world.gateway.engines.drain(engine, False)
        assert not engine.draining

    virtual(scenario)


def test_a_reload_that_allows_less_sends_engines_away_and_one_that_names_them_keeps_them() -> None:
    async def scenario(world: World) -> None:
        sidecar = world.sidecar()
        sidecar.running("p")

        def apply(**fields: Any) -> None:
            fleet = msgspec.structs.replace(POLICY.fleet, **fields)
            world.gateway.apply(Configuration(msgspec.structs.replace(POLICY, fleet=fleet)))

        apply(sidecars=SidecarsPolicy(allow=("10.0.0.0/8",)))
        assert world.gateway.fleet.engines == {}
        assert any("not in a network of fleet.sidecars.allow" in line for line in world.lines)
        apply()
        assert list(world.gateway.fleet.engines) == [engine_id(sidecar.url("p"))]
        apply(sidecars=None)
        assert world.gateway.fleet.engines == {}
        assert world.dispatch.sidecars.sidecars == {}
        apply()
        sidecar.say()
        assert (await world.use(world.call()))[0] == engine_id(sidecar.url("p"))

    virtual(scenario)
