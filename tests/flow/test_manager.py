"""Sidecar's manager in virtual time: resident models, losses on the way, and the cost of faults.

Two of the models fit on one GPU at a time. Whatever a test does, in the end no GPU has ever held more than it has, no
two engines have started, slept or woken on one GPU at once, and nothing is left of engines that have ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import wraps
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from gateway.shared.protocol import Demand, DemandReport
from loadtest.engine.true_memory import TrueMemory
from loadtest.lab.residency import residents
from loadtest.lab.residency.machine import Listing, Machine
from loadtest.lab.residency.residents import Model
from loadtest.lab.residency.site import GIB, Site, counted, file
from loadtest.simulate import vtime
from sidecar.core.inventory import Size
from sidecar.core.lifecycle import FIRST_REST
from sidecar.core.model_state import LEAST_TURN, MOST_TURN, TURN, ModelState
from sidecar.core.profile import Profile
from sidecar.residency.engine_memory import FILES_EVERY
from sidecar.residency.orders import Refused

MODEL = Model(weights=6 * GIB, claim=11 * GIB)
START = 13.22  # seconds of a start, a sleep and a wake of MODEL at level 1
SLEEP = 0.845
WAKE = 0.837
GPU = 24 * GIB

Body = Callable[[], Coroutine[Any, Any, None]]


def virtual(test: Body) -> Callable[[], None]:
    """Run a test in virtual time."""

    @wraps(test)
    def run() -> None:
        vtime.run(test())

    return run


@asynccontextmanager
async def site(
    names: str = "abc", *totals: int, gateways: int = 1, sound: bool = True, hot: float = 0.0, **fields: str
) -> AsyncIterator[Site]:
    """Models of these names; `fields`: what their profiles have besides. `sound`: nothing is left over in the end."""
    gpus = totals or (GPU,)
    models = dict.fromkeys(names, MODEL)
    async with Site(file(names, len(gpus), **fields), models, *gpus, gateways=gateways, hot=hot) as made:
        yield made
        if sound:
            await asyncio.sleep(20.0)
            assert made.left_over() == []
            assert made.machine.overlaps == []
    assert made.machine.held == {}


async def used(made: Site, *names: str) -> None:
    """One call after the other, and a second between them."""
    for name in names:
        answer = await made.gateways[0].call(name, 0.5)
        assert answer.ending == "served"
        await asyncio.sleep(1.0)


def test_a_turn_is_five_times_a_switch_within_bounds_unless_it_is_told() -> None:
    quick = ModelState("a", Profile(model_path="/m"), 0.0)
    assert quick.max_starvation == MOST_TURN, "a start takes a minute"
    quick.times.loaded(0.3, {}, Size())
    quick.times.took("sleep", 0.2)
    assert quick.max_starvation == LEAST_TURN
    assert ModelState("a", Profile(model_path="/m", max_starvation=7.0), 0.0).max_starvation == 7.0


# -- room -------------------------------------------------------------------------------------------------------------


@virtual
async def test_a_call_starts_its_model_and_is_answered_as_soon_as_it_serves() -> None:
    async with site() as made:
        answer = await made.gateways[0].call("a", 1.0)
        assert (answer.ending, answer.waited) == ("served", pytest.approx(START, abs=0.1))
        assert made.state() == "a running, b stopped, c stopped"


@virtual
async def test_the_least_recently_used_makes_room_and_sleeps() -> None:
    async with site(b="sleep: {level: 2}") as made:
        await used(made, "a", "b", "a", "c")
        assert made.state() == "a running, b sleeping, c running"
        assert made.entry("b").level == 2
        await used(made, "b")
        assert made.state() == "a sleeping, b running, c running"
        assert made.entry("a").level == 1


@virtual
async def test_a_single_use_does_not_make_it_warmer_than_one_that_is_used_again_and_again() -> None:
    async with site() as made:
        await used(made, "a", "b", "a", "b", "a", "c", "b")
        assert made.state() == "a running, b running, c sleeping"


@virtual
async def test_one_that_cannot_sleep_is_stopped_to_make_room() -> None:
    async with site(a="sleep: null") as made:
        await used(made, "a", "b", "c")
        assert made.state() == "a stopped, b running, c running"


@virtual
async def test_neither_the_busy_nor_the_pinned_makes_room() -> None:
    async with site("abcd", a="pin: true") as made:
        await made.until("a", "running")
        busy = asyncio.ensure_future(made.gateways[0].call("b", 40.0))
        await made.until("b", "running")
        waiting = asyncio.ensure_future(made.gateways[0].call("c", 1.0))
        await asyncio.sleep(15.0)
        assert made.state() == "a running, b running, c stopped, d stopped"
        assert not [line for _, line in made.log if line.endswith("for c")]
        assert (await busy).ending == "served"
        assert (await waiting).ending in ("served", "refused")
        await made.gateways[0].call("c", 1.0)
        assert made.state() == "a running, b sleeping, c running, d stopped"
        a, b, _, d = (made.report(name) for name in "abcd")
        assert (a.gpus, b.gpus, d.gpus) == ((0,), (0,), ())
        assert a.held > b.held > d.held == 0


@virtual
async def test_one_that_was_loaded_for_calls_is_not_given_up_before_they_reach_it() -> None:
    async with site("abc", 12 * GIB, a="max_starvation: 5s", b="max_starvation: 5s", c="max_starvation: 5s") as made:
        gateway = made.gateways[0]
        gateway.late = 0.2
        answers = await asyncio.gather(*(gateway.call(name, 2.0) for name in "abcabc"))
        assert {answer.ending for answer in answers} == {"served"}
        assert sum(counted(made, "ready").values()) == 3


@pytest.mark.slow
@virtual
async def test_two_models_that_are_never_idle_make_room_for_one_that_starves() -> None:
    async with site() as made:
        gateway = made.gateways[0]

        async def steady(name: str, after: float) -> None:
            await asyncio.sleep(after)
            while made.now < 250.0:
                assert (await gateway.call(name, 3.0)).ending == "served"

        calls = [asyncio.ensure_future(steady(name, after)) for name in "ab" for after in (0.0, 1.5)]
        await asyncio.sleep(60.0)
        answer = await gateway.call("c", 1.0, 200.0)
        assert answer.ending == "served"
        assert answer.waited <= 60.0 + 3.0 + SLEEP + START + 2.0
        await asyncio.gather(*calls)


@virtual
async def test_one_that_sleeps_is_not_moved_for_calls_that_have_ended_since_they_were_told_of() -> None:
    async with site("abc", 14 * GIB, 14 * GIB, a="gpus: [0]", b="gpus: [1]") as made:
        gateway = made.gateways[0]
        await used(made, "c", "a", "b")  # on GPU 0, where `a` has put it to sleep
        assert made.state() == "a running, b running, c sleeping"
        await gateway.call("a", 2 * START)
        answer = await gateway.call("c", 1.0)  # `a` had a call for so long, by the last report, that it seems endless
        assert answer.ending == "served"
        assert answer.waited <= SLEEP + WAKE + 1.0
        assert made.state() == "a sleeping, b running, c running"


@virtual
async def test_one_that_sleeps_moves_where_calls_do_not_end() -> None:
    async with site("abc", 14 * GIB, 14 * GIB, a="gpus: [0]", b="gpus: [1]") as made:
        gateway = made.gateways[0]
        await used(made, "c", "a", "b")
        long = asyncio.ensure_future(gateway.call("a", 100.0))
        await asyncio.sleep(1.0)
        answer = await gateway.call("c", 1.0)
        assert answer.ending == "served"
        assert START < answer.waited <= 2 * START + 2.0, "no longer than twice what it would have waited at best"
        assert made.state() == "a running, b sleeping, c running"
        assert (await long).ending == "served"


@virtual
async def test_a_prediction_comes_true() -> None:
    async with site() as made:
        await used(made, "a", "b", "c", "a")  # each has been started, and one has slept and woken
        for name in ("b", "c"):
            foreseen = made.manager.orders.ensure(name).ready_in
            began = made.now
            assert foreseen is not None
            took = await made.until(name, "running") - began
            assert took - 1.0 <= foreseen <= took + 4.5
            await asyncio.sleep(5.0)


@virtual
async def test_an_engine_across_two_gpus_gets_both_or_none() -> None:
    async with site("ab", GPU, 12 * GIB, a="tensor_parallel: 2", b="gpus: [1]") as made:
        await used(made, "b")
        assert made.machine.held == {1000: {1: 11 * GIB}}
        await used(made, "a")
        assert made.state() == "a running, b sleeping"
        assert made.entry("a").gpus == (0, 1)
        await used(made, "b")
        assert made.state() == "a sleeping, b running"


@virtual
async def test_a_small_gpu_beside_a_large_one_makes_no_model_unusable() -> None:
    async with site("ab", 2 * GIB, GPU) as made:
        await used(made, "a", "b")
        assert made.state() == "a running, b running"
        assert (made.entry("a").gpus, made.entry("b").gpus) == ((1,), (1,))


@virtual
async def test_one_that_fits_nowhere_says_so_of_the_largest_gpu() -> None:
    async with site("a", 2 * GIB, 8 * GIB) as made:
        assert (await made.gateways[0].call("a", 1.0)).ending == "refused"
        assert made.report("a").message.endswith(f"the GPU has {8 * GIB}")


@virtual
async def test_one_whose_files_were_missing_can_be_had_soon_after_they_are_here() -> None:
    async with site("ab") as made:
        made.engines.models["a"] = msgspec.structs.replace(MODEL, broken="there is no folder or file /m/a")
        await made.restart()
        assert (await made.gateways[0].call("a", 1.0)).ending == "refused"
        made.engines.models["a"] = MODEL
        await asyncio.sleep(FILES_EVERY + 2.0)
        assert (await made.gateways[0].call("a", 1.0)).ending == "served"
        assert sum("cannot be run" in line for _, line in made.log) == 1


@virtual
async def test_a_report_is_made_at_once_however_long_a_model_may_starve_beside_other_processes() -> None:
    async with site("a", a="max_starvation: 30d") as made:
        made.machine.others_take(1, 0, 20 * GIB)
        await asyncio.sleep(2.0)
        began = time.process_time()
        told = made.report("a")
        assert (told.ready_in, told.why) == (None, "no_memory")
        assert time.process_time() - began < 1.0, "seconds of the machine's own time"
        made.machine.others_take(1, 0, 0)


def share(weights: float, claim: float) -> Model:
    """A model of which half of the larger GPU is claimed there, and as much of the smaller."""
    true = TrueMemory(rest=int((claim - 1) * GIB), context=GIB)
    return Model(weights=int(weights * GIB), claim=int(claim * GIB), true=true)


@virtual
async def test_it_is_started_with_the_share_of_the_gpu_where_it_is() -> None:
    models = {"a": share(6, 12), "b": share(6, 20), "c": share(20, 40)}
    async with Site(file("abc", 2), models, 24 * GIB, 48 * GIB) as made:
        for name, gpu, part in (("a", 0, 12 / 23.25), ("b", 1, 20 / 47.25)):
            await used(made, name)
            entry = made.entry(name)
            assert entry.gpus == (gpu,)
            assert entry.size.share == pytest.approx(part, abs=0.002)
        await used(made, "c")
        assert made.entry("c").gpus == (1,)
        assert made.state() == "a running, b sleeping, c running"
        assert made.left_over() == []


@virtual
async def test_an_engine_across_unequal_gpus_is_sized_for_the_smaller() -> None:
    text = file("a", 3, a="tensor_parallel: 2")
    async with Site(text, {"a": share(6, 12)}, 24 * GIB, 48 * GIB, 40 * GIB) as made:
        await used(made, "a")
        assert list(made.entry("a").sizes) == [24 * GIB, 40 * GIB]
        total = min((24, 48, 40)[gpu] for gpu in made.entry("a").gpus) * GIB
        assert made.entry("a").size.share == pytest.approx(12 * GIB / (total - 768 * 1024**2), abs=0.002)


@virtual
async def test_models_on_cpu_take_no_room() -> None:
    cpu = "engine: {device: cpu}"
    text = file("abc", 1, a=f"{cpu}, sleep: null", b=f"{cpu}, sleep: null")
    models = {"a": Model(weights=0, claim=0), "b": Model(weights=0, claim=0), "c": MODEL}
    async with Site(text, models, 12 * GIB) as made:
        await asyncio.gather(*(made.gateways[0].call(name, 1.0) for name in "abc"))
        assert made.state() == "a running, b running, c running"
        assert made.left_over() == []


@virtual
async def test_a_model_that_cannot_be_run_harms_no_other() -> None:
    broken = "there is no folder or file /srv/models/a: correct model_path"
    models = {"a": msgspec.structs.replace(MODEL, broken=broken), "b": MODEL}
    async with Site(file("ab"), models, GPU) as made:
        refused = await made.gateways[0].call("a", 1.0)
        told = made.report("a")
        assert (refused.ending, told.why, told.last_error) == ("refused", "error", broken)
        assert told.message == "there is no folder or file a: correct model_path", "callers learn no folder of ours"
        await used(made, "b")
        made.engines.models["a"] = MODEL  # whoever has mended it says so
        made.manager.orders.ensure("a")
        await made.until("a", "running")
        assert made.left_over() == []


# -- gateways ---------------------------------------------------------------------------------------------------------


@virtual
async def test_models_that_are_always_wanted_take_turns_in_proportion_to_what_a_switch_costs() -> None:
    """Switching takes a sixth of the time at most, and no call waits a minute where it costs two seconds."""
    async with site("ab", 16 * GIB) as made:
        await used(made, *"abababab")  # what a switch takes is measured by then
        loop, waits = asyncio.get_running_loop(), []
        end, before = loop.time() + 300.0, sum(counted(made, "woken").values())

        async def call(name: str) -> None:
            while loop.time() < end:
                began = loop.time()
                assert (await made.gateways[0].call(name, 0.8)).ending == "served"
                waits.append(loop.time() - began)

        await asyncio.gather(*(call("a") for _ in range(8)), call("b"))
        switch = max(made.entry(name).wake_seconds[0] + made.entry(name).sleep_seconds for name in "ab")
        assert max(waits) < 1.5 * TURN * switch + 0.8 < 20.0
        switches = sum(counted(made, "woken").values()) - before
        assert 10 < switches < 300.0 / (TURN * (SLEEP + WAKE))
        assert made.entry("a").max_starvation == pytest.approx(TURN * switch)
        assert made.left_over() == []


@virtual
async def test_models_in_turn_do_not_thrash() -> None:
    """Three on memory for two, the worst that there is for LRU: no more loads than fit one after the other."""
    async with Site(file("abc"), dict.fromkeys("abc", MODEL), 26 * GIB, look_every=5.0) as made:
        calls = []
        for number in range(60):
            calls.append(asyncio.ensure_future(made.gateways[0].call("abc"[number % 3], 1.0, 60.0)))
            await asyncio.sleep(1.5)
        await asyncio.gather(*calls)
        loads = counted(made, "ready").total() + counted(made, "woken").total()
        assert loads / made.now < 1.0 / (SLEEP + WAKE)


@virtual
async def test_models_in_turn_are_woken_and_not_started() -> None:
    """Three on two GPUs with memory for one awake and two asleep, each call as soon as the last has ended."""
    async with Site(file("abc", 2), dict.fromkeys("abc", MODEL), 14 * GIB, 14 * GIB) as made:
        for name in "abc":
            await made.gateways[0].call(name, 0.4)
        waits = [(await made.gateways[0].call(name, 0.4)).waited for name in "abc" * 10]
        assert sum(waited <= 2.1 for waited in waits) >= 24


@virtual
async def test_a_call_that_comes_during_the_drain_keeps_its_model() -> None:
    async with site(gateways=2) as made:
        await used(made, "a", "b")
        made.gateways[1].cut = True  # it cannot hear of the drain, so it goes on calling
        ordered = asyncio.ensure_future(made.gateways[0].call("c", 1.0))
        await asyncio.sleep(1.0)
        assert made.state() == "a running/drain, b running, c stopped/start"
        call = asyncio.ensure_future(made.gateways[1].call("a", 3.0))
        await asyncio.sleep(0.1)
        made.gateways[1].cut = False
        assert (await call).ending == "served"
        assert (await ordered).ending == "served"
        assert counted(made, "slept") == {"b": 1}


@virtual
async def test_a_drain_waits_for_every_gateway_and_for_a_silent_one_ten_seconds() -> None:
    async with site(gateways=2) as made:
        await used(made, "a", "b")
        await asyncio.sleep(1.0)
        made.gateways[1].cut = True
        began = made.now
        answer = await made.gateways[0].call("c", 1.0)
        assert answer.ending == "served"
        assert 9.0 <= answer.waited - START - SLEEP <= 10.5
        assert made.now - began == pytest.approx(answer.waited + 1.0)


@virtual
async def test_what_a_silent_gateway_has_sent_is_not_cut_off() -> None:
    async with site("ab", 12 * GIB, gateways=2) as made:
        long = asyncio.ensure_future(made.gateways[1].call("a", 60.0))
        await made.until("a", "running")
        await asyncio.sleep(1.0)
        made.gateways[1].cut = True
        await asyncio.sleep(20.0)
        made.manager.orders.ensure("b")
        assert (await long).ending == "served"
        await made.until("b", "running")


@virtual
async def test_what_a_silent_gateway_sends_during_the_drain_is_not_cut_off_either() -> None:
    async with site(gateways=2) as made:
        await used(made, "a", "b")
        made.gateways[1].cut = True
        ordered = asyncio.ensure_future(made.gateways[0].call("c", 1.0))
        await asyncio.sleep(8.0)
        late = asyncio.ensure_future(made.gateways[1].call("a", 20.0))
        await asyncio.sleep(4.0)  # it does not count any more, and the engine says that it is busy
        assert made.state() == "a running/drain, b running, c stopped/start"
        assert (await late).ending == (await ordered).ending == "served"
        assert counted(made, "slept") == {"b": 1}


@virtual
async def test_one_that_dies_while_it_makes_room_gives_it_only_once_its_memory_is_back() -> None:
    async with site(gateways=2) as made:
        await used(made, "a", "b")
        made.gateways[1].cut = True
        made.manager.orders.ensure("c")
        await asyncio.sleep(2.0)
        made.machine.faults.kept = 30.0
        made.engines.all["a"].kill()
        made.machine.faults.kept = 0.0
        await made.until("c", "running")
        assert counted(made, "out_of_memory") == {}


@virtual
async def test_an_answer_to_a_report_from_before_the_drain_does_not_end_it() -> None:
    async with site(gateways=0) as made:
        for name in "ab":
            made.manager.orders.ensure(name)
            await made.until(name, "running")
        early = made.manager.report("sidecar", "boot", "").sequence
        said = DemandReport(gateway="g", boot="boot", sequence=early, demands=(Demand(profile="a", withdrawn=True),))
        made.manager.heard(said)
        made.manager.orders.ensure("c")
        await asyncio.sleep(2.0)
        made.manager.heard(said)
        await asyncio.sleep(2.0)
        assert made.state() == "a running/drain, b running, c stopped/start"
        late = made.manager.report("sidecar", "boot", "").sequence
        made.manager.heard(msgspec.structs.replace(said, sequence=late))
        await made.until("a", "sleeping", 2.0)


# -- idle -------------------------------------------------------------------------------------------------------------


@virtual
async def test_the_idle_sleep_then_stop_and_use_puts_it_off() -> None:
    async with site(a="sleep: {after: 30s}, stop_after: 100s", b="stop_after: 20s") as made:
        await used(made, "a", "b")
        last = made.now - 1.5 - START  # of a
        await asyncio.sleep(15.0)
        await used(made, "b")
        used_at = made.now - 1.0
        assert await made.until("a", "sleeping") == pytest.approx(last + 30.0 + SLEEP, abs=1.0)
        assert await made.until("b", "stopped") == pytest.approx(used_at + 20.0, abs=1.5)
        assert await made.until("a", "stopped") == pytest.approx(last + 100.0, abs=1.5)


# -- out of memory and failures ---------------------------------------------------------------------------------------


@virtual
async def test_out_of_memory_evicts_one_more_and_that_once() -> None:
    async with site("abc", 36 * GIB) as made:
        await used(made, "a", "b")
        made.machine.faults.oom = 1
        await made.gateways[0].call("c", 1.0)
        assert made.state() == "a sleeping, b running, c running"
        assert counted(made, "taught") == {"c": 1}
        assert counted(made, "failed") == {}


@pytest.mark.slow
@virtual
async def test_out_of_memory_again_and_again_is_given_up_until_somebody_asks() -> None:
    async with site("abc", 36 * GIB) as made:
        await used(made, "a", "b")
        made.machine.faults.oom = 50
        call = await made.gateways[0].call("c", 1.0, 1000.0)
        assert call.ending == "refused"
        await asyncio.sleep(100.0)
        assert 0 < counted(made, "taught")["c"] + counted(made, "out_of_memory")["c"] <= 8
        assert made.entry("c").lifecycle.failures == 0
        made.machine.faults.oom = 0
        made.manager.orders.ensure("c")
        await made.until("c", "running")


@virtual
async def test_failed_starts_are_repeated_at_growing_intervals_and_given_up_after_five() -> None:
    async with site("a") as made:
        made.machine.faults.fail_start = 5
        made.manager.orders.ensure("a")
        await asyncio.sleep(400.0)
        starts = [at for at, _ in made.engines.starts]
        pauses = [later - earlier - START for earlier, later in pairwise(starts)]
        assert pauses == [pytest.approx(wait, abs=0.2) for wait in (10.0, 20.0, 40.0, 80.0)]
        assert made.report("a").why == "error"
        made.manager.orders.ensure("a")
        await made.until("a", "running")


@virtual
async def test_a_call_starts_again_what_has_failed_too_often_once_it_has_rested() -> None:
    async with site("a") as made:
        made.machine.faults.fail_start = 5
        refused = await made.gateways[0].call("a", 1.0, 1000.0)
        assert (refused.ending, made.report("a").why) == ("refused", "error")
        assert refused.retry_after == pytest.approx(FIRST_REST, abs=5.0)
        assert len(made.engines.starts) == 5
        assert "not tried for" in made.report("a").message
        await asyncio.sleep(refused.retry_after + 2.0)
        assert len(made.engines.starts) == 5, "nobody wants it"
        assert (await made.gateways[0].call("a", 1.0)).ending == "served"


@pytest.mark.slow
@virtual
async def test_one_that_dies_soon_after_each_start_is_not_started_all_the_time() -> None:
    async with site("a", sound=False) as made:
        asked = asyncio.ensure_future(_asks_again(made, 3600.0))
        while made.now < 3600.0:
            await asyncio.sleep(0.5)
            engine = made.engines.all.get("a")
            if engine is not None and engine.serves:
                await asyncio.sleep(5.0)
                engine.kill()
        await asked
        assert 10 <= len(made.engines.starts) <= 20


async def _asks_again(made: Site, until: float) -> None:
    """A caller who comes back for its model as long as that is refused, or has been cut off."""
    while made.now < until:
        answer = await made.gateways[0].call("a", 10.0, 600.0)
        await asyncio.sleep(max(1.0, answer.retry_after or 0.0))


@virtual
async def test_what_was_to_be_stopped_where_it_sleeps_is_not_stuck_where_there_is_no_room_for_it() -> None:
    async with site("abcd", 14 * GIB, 14 * GIB, gateways=2, a="gpus: [0]", b="gpus: [1]") as made:
        gateway = made.gateways[0]
        await used(made, "c", "a", "b")  # on GPU 0, where `a` has put it to sleep
        long = asyncio.ensure_future(gateway.call("a", 300.0))
        await asyncio.sleep(1.0)
        made.gateways[1].cut = True  # it cannot hear that `b` drains, and sends it a call
        moved = asyncio.ensure_future(gateway.call("c", 1.0, 200.0))
        while made.entry("b").lifecycle.pending is None:
            await asyncio.sleep(0.05)
        assert made.state() == "a running, b running/drain, c sleeping/stop, d stopped"
        late = asyncio.ensure_future(made.gateways[1].call("b", 20.0))
        await asyncio.sleep(0.1)
        made.gateways[1].cut = False
        await asyncio.sleep(2.0)
        assert made.entry("c").lifecycle.pending is None
        assert (await late).ending == "served"
        assert (await moved).ending == "served"
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)


@virtual
async def test_a_killed_engine_is_told_at_once_and_started_again() -> None:
    async with site("a") as made:
        call = asyncio.ensure_future(made.gateways[0].call("a", 60.0))
        await made.until("a", "running")
        made.engines.all["a"].kill()
        killed = made.now
        assert (await call).ending == "broken"
        await asyncio.sleep(0.01)
        assert made.gateways[0].models["a"].state == "error"
        assert await made.until("a", "running") - killed == pytest.approx(10.0 + START, abs=0.5)


@virtual
async def test_a_hung_engine_is_found_and_ended() -> None:
    async with site("a") as made:
        for moment in (0.5, 3.0, 6.0):
            made.manager.orders.ensure("a")
            await made.until("a", "running")
            await asyncio.sleep(moment)
            made.engines.all["a"].hung = True
            hung = made.now
            while made.entry("a").lifecycle.state.value == "running":
                await asyncio.sleep(0.1)
            assert made.now - hung <= 15.1
        await made.until("a", "running")


@virtual
async def test_a_failed_wake_is_a_cold_start() -> None:
    async with site() as made:
        await used(made, "a", "b", "c")
        made.machine.faults.fail_wake = 1
        answer = await made.gateways[0].call("a", 1.0)
        assert answer.ending == "served"
        assert answer.waited >= 10.0 + START
        assert counted(made, "ready")["a"] == 2


@virtual
async def test_one_that_does_not_fall_asleep_or_keeps_its_memory_is_ended() -> None:
    for fault in ("fail_sleep", "keep_asleep"):
        async with site() as made:
            await used(made, "a", "b")
            setattr(made.machine.faults, fault, 1)
            answer = await made.gateways[0].call("c", 1.0)
            assert answer.ending == "served"
            assert counted(made, "failed") == {"a": 1}
            assert counted(made, "slept") == {}


@virtual
async def test_the_memory_of_a_neighbour_that_ends_is_not_taken_for_its_own() -> None:
    async with site() as made:
        await used(made, "a", "b")
        made.machine.faults.keep_asleep = 1
        made.manager.orders.give("a", "sleep")
        await asyncio.sleep(0.5)
        made.engines.all["b"].kill()
        await asyncio.sleep(8.0)
        assert counted(made, "slept") == {}
        assert counted(made, "failed") == {"a": 1, "b": 1}
        await asyncio.sleep(60.0)  # both are there again


@virtual
async def test_memory_that_does_not_come_back_puts_the_gpu_in_quarantine_until_it_does() -> None:
    async with site("ab", 12 * GIB) as made:
        await used(made, "a")
        made.machine.faults.kept = 60.0
        made.manager.orders.give("a", "stop")
        stopped = await made.until("a", "stopped")
        await asyncio.sleep(0)
        assert made.manager.gpus()[0].refused
        made.machine.faults.kept = 0.0
        made.manager.orders.ensure("b")
        assert await made.until("b", "running") - stopped == pytest.approx(60.0 - 5.0 + START, abs=1.5)
        assert made.manager.gpus()[0].refused == ""


@pytest.mark.parametrize(
    ("listing", "processes"), [("own", None), ("host", None), ("none", None), ("none", {1: 0})]
)  # NVML may tell a pid without its bytes
def test_a_neighbour_that_starts_meanwhile_puts_no_gpu_in_quarantine(
    listing: Listing, processes: dict[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine takes seconds to end, and what starts beside it fills the GPU faster than it gives back."""
    monkeypatch.setattr(residents, "EXIT", 5.0)
    if processes is not None:
        gpu = Machine._gpu
        monkeypatch.setattr(
            Machine, "_gpu", lambda self, index: msgspec.structs.replace(gpu(self, index), processes=processes)
        )

    async def run() -> None:
        async with site("abc", 80 * GIB) as made:
            made.machine.listing = listing
            await used(made, "a", "c")
            made.manager.orders.give("c", "sleep")
            await made.until("c", "sleeping")
            made.manager.orders.ensure("b")
            await asyncio.sleep(2.0)
            made.manager.orders.give("a", "stop")
            await made.until("a", "stopped")
            await asyncio.sleep(0)
            assert made.manager.gpus()[0].refused == ""
            await made.until("b", "running")
            assert [(await made.gateways[0].call(name, 0.5)).ending for name in "ca"] == ["served"] * 2

    vtime.run(run())


@pytest.mark.parametrize("kept", [0.0, 20.0])
@pytest.mark.parametrize("listing", ["host", "none"])
def test_in_a_container_what_neighbours_hold_is_not_waited_for_as_an_engine_dies(listing: Listing, kept: float) -> None:
    async def run() -> None:
        async with site("abc", 80 * GIB) as made:
            made.machine.listing = listing
            await used(made, "a", "b")
            made.machine.faults.kept = kept
            made.engines.all["a"].kill()
            await asyncio.sleep(7.0)
            made.machine.faults.kept = 0.0
            assert bool(made.manager.gpus()[0].refused) is (kept > 0)
            await asyncio.sleep(kept)
            assert (await made.gateways[0].call("c", 0.5)).ending == "served"

    vtime.run(run())


@virtual
async def test_while_the_driver_does_not_answer_nothing_is_started_and_what_runs_goes_on() -> None:
    async with site() as made:
        await used(made, "a")
        made.machine.faults.driver = "the driver does not answer"
        await asyncio.sleep(2.0)
        made.manager.orders.ensure("b")
        await asyncio.sleep(30.0)
        assert (await made.gateways[0].call("a", 1.0)).ending == "served"
        assert made.state() == "a running, b stopped, c stopped"
        assert "driver" in made.manager.gpus()[0].refused
        made.machine.faults.driver = ""
        await made.until("b", "running")


# -- orders -----------------------------------------------------------------------------------------------------------


@virtual
async def test_stop_while_it_starts_ends_it_for_good_however_often_it_is_said() -> None:
    async with site("a") as made:
        made.manager.orders.ensure("a")
        await asyncio.sleep(8.0)
        for _ in range(2):
            assert made.manager.orders.give("a", "stop").pending == "stop"
        await made.until("a", "stopped", 2.0)
        await asyncio.sleep(100.0)
        assert len(made.engines.starts) == 1


@virtual
async def test_stop_at_the_moment_it_gets_ready_ends_it_too() -> None:
    async with site("a") as made:
        made.machine.faults.slow = 0.1
        made.manager.orders.ensure("a")
        while not (made.engines.starts and made.engines.all["a"].serves):
            await asyncio.sleep(0.01)
        made.manager.orders.give("a", "stop")
        await made.until("a", "stopped", 2.0)


@virtual
async def test_orders_that_cannot_be_obeyed_say_why_and_change_nothing() -> None:
    async with site("ab", b="sleep: null") as made:
        with pytest.raises(Refused, match="is stopped, not running"):
            made.manager.orders.give("a", "sleep")
        await used(made, "a", "b")
        with pytest.raises(Refused, match="does not sleep"):
            made.manager.orders.give("b", "sleep")
        made.manager.orders.give("a", "sleep")
        with pytest.raises(Refused, match="has a drain under way"):
            made.manager.orders.give("a", "stop")
        with pytest.raises(KeyError):
            made.manager.orders.give("x", "stop")


@virtual
async def test_ended_with_or_without_its_engines() -> None:
    for end_engines in (False, True):
        made = Site(file("ab"), dict.fromkeys("ab", MODEL), GPU)
        await made.open()
        await used(made, "a")
        made.manager.orders.ensure("b")
        await asyncio.sleep(5.0)
        await made.close(end_engines=end_engines)
        assert len(made.machine.held) == (0 if end_engines else 1)
        assert made.engines.all["a"].alive_now is not end_engines
