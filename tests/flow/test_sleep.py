"""Sleep of engines in virtual time: host memory, residues, containers, and level 2 that went wrong.

Whatever a test does, host memory is never booked beyond its bound, and nothing stays booked for an engine that has
ended: `Site` looks at that all the while.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import wraps
from typing import Any

import msgspec
import pytest

from loadtest.engine import memory_stages
from loadtest.engine.true_memory import TrueMemory
from loadtest.lab.residency.machine import Listing
from loadtest.lab.residency.residents import Model
from loadtest.lab.residency.site import GIB, Site, counted, file
from loadtest.simulate import vtime
from sidecar.core.lifecycle import WAKE
from sidecar.residency.orders import Refused
from sidecar.residency.sleep_steps import LATE, UNSURE

MODEL = Model(weights=6 * GIB, claim=11 * GIB)
GPU = 24 * GIB

Body = Callable[..., Coroutine[Any, Any, None]]


def virtual(test: Body) -> Callable[..., None]:
    """Run a test in virtual time."""

    @wraps(test)
    def run(*arguments: object, **named: object) -> None:
        vtime.run(test(*arguments, **named))

    return run


@asynccontextmanager
async def site(
    models: Mapping[str, Model],
    *totals: int,
    host_memory: int = 1 << 50,
    listing: Listing = "own",
    **fields: str,
) -> AsyncIterator[Site]:
    """These models on one GPU or more, and nothing left over in the end; `fields`: see `file`."""
    gpus = totals or (GPU,)
    text = file("".join(models), len(gpus), **fields)
    async with Site(text, models, *gpus, host_memory=host_memory, hot=0.0) as made:
        made.machine.listing = listing
        yield made
        await asyncio.sleep(20.0)
        assert made.left_over() == []
        assert made.machine.overlaps == []


def three(model: Model = MODEL) -> dict[str, Model]:
    """Of which two fit on a GPU."""
    return dict.fromkeys("abc", model)


def kept(residue: float, grows: float = 0.0) -> Model:
    """A model that keeps so many GiB asleep, and `grows` more with each sleep."""
    true = TrueMemory(rest=8 * GIB, context=GIB, residue=int(residue * GIB), grows=int(grows * GIB))
    return Model(weights=6 * GIB, claim=11 * GIB, true=true)


async def used(made: Site, *names: str) -> None:
    """One call after the other, and a second between them."""
    for name in names:
        answer = await made.gateways[0].call(name, 0.5)
        assert answer.ending == "served"
        await asyncio.sleep(1.0)


async def put_to_sleep(made: Site, *names: str) -> None:
    """By hand, one after the other."""
    for name in names:
        made.manager.orders.give(name, "sleep")
        await made.until(name, "sleeping")


async def wakes(made: Site, name: str) -> None:
    """Wait until it is being woken."""
    async with asyncio.timeout(60.0):
        while made.entry(name).lifecycle.pending is not WAKE:  # no event tells it
            await asyncio.sleep(0.05)


def said(made: Site, words: str) -> list[str]:
    return [line for _, line in made.log if words in line]


# -- host memory ------------------------------------------------------------------------------------------------------


@virtual
async def test_two_gpus_that_evict_at_once_do_not_count_on_the_same_host_memory() -> None:
    gpus = {"a": "gpus: [0]", "b": "gpus: [1]", "c": "gpus: [0]", "d": "gpus: [1]"}
    async with site(dict.fromkeys("abcd", MODEL), 12 * GIB, 12 * GIB, host_memory=7 * GIB, **gpus) as made:
        await used(made, "a", "b")
        await asyncio.sleep(5.0)
        await asyncio.gather(*(made.gateways[0].call(name, 0.5) for name in "cd"))
        assert made.state() == "a sleeping, b sleeping, c running, d running"
        assert sorted(made.entry(name).level for name in "ab") == [1, 2]
        assert made.manager.machine.host_total == 6 * GIB


@virtual
async def test_an_engine_keeps_its_host_memory_when_it_has_woken() -> None:
    model = msgspec.structs.replace(MODEL, keeps_pinned=True)
    async with site(three(model), host_memory=7 * GIB) as made:
        await used(made, "a", "b")
        await put_to_sleep(made, "a")
        await used(made, "a")
        assert (made.entry("a").level, made.manager.machine.host_total) == (0, 6 * GIB)
        await put_to_sleep(made, "b", "a")
        assert (made.entry("a").level, made.entry("b").level) == (1, 2)
        made.manager.orders.give("a", "stop")
        await made.until("a", "stopped")
        assert made.manager.machine.host_total == 0


@virtual
async def test_less_host_memory_by_a_newer_file_ends_those_that_sleep_in_it_the_coldest_first() -> None:
    async with site(dict.fromkeys("abc", MODEL)) as made:
        await used(made, "a", "b")
        await put_to_sleep(made, "a", "b")
        await used(made, "c")
        assert made.manager.machine.host_total == 12 * GIB
        made.reload(made.text, host_memory=7 * GIB)
        await made.until("a", "stopped")
        assert made.state() == "a stopped, b sleeping, c running"
        assert made.manager.machine.host_total == 6 * GIB
        made.reload(made.text, host_memory=0)
        await made.until("b", "stopped")
        assert made.state() == "a stopped, b stopped, c running"


@virtual
async def test_what_it_really_took_of_host_memory_is_booked_and_remembered() -> None:
    model = msgspec.structs.replace(MODEL, pinned=22 / 15)
    async with site(three(model), host_memory=18 * GIB) as made:
        await used(made, "a", "b")
        await put_to_sleep(made, "a")
        assert made.manager.machine.host_total == pytest.approx(8.8 * GIB, rel=0.01)
        await put_to_sleep(made, "b")
        assert made.entry("b").level == 1, "6 GiB were booked for it, as its files say"
        await made.restart()
        await used(made, "b", "a")
        made.manager.orders.give("b", "stop")
        await made.until("b", "stopped")
        assert made.entry("b").size.host == pytest.approx(8.8 * GIB, rel=0.01)


@virtual
async def test_one_that_took_more_host_memory_than_there_is_ends_and_sleeps_otherwise_the_next_time() -> None:
    model = msgspec.structs.replace(MODEL, pinned=2.0)
    async with site(three(model), host_memory=10 * GIB) as made:
        await used(made, "a")
        made.manager.orders.give("a", "sleep")
        await made.until("a", "stopped")
        assert len(said(made, "a took 12.0 GiB of host memory asleep, 10.0 were left: it ends")) == 1
        assert made.manager.machine.host_total == 0
        await used(made, "a")
        await put_to_sleep(made, "a")
        assert made.entry("a").level == 2


@virtual
async def test_a_drain_in_vain_gives_back_what_was_booked() -> None:
    async with site(three(), host_memory=7 * GIB) as made:
        await used(made, "a", "b")
        waiting = asyncio.ensure_future(made.gateways[0].call("c", 0.5))
        while made.manager.machine.host_total == 0:  # virtual time
            await asyncio.sleep(0.001)
        made.engines.all["a"].requests = 1  # somebody calls it without a gateway
        await asyncio.sleep(14.9)
        assert made.manager.machine.host_total == 6 * GIB
        await asyncio.sleep(0.4)
        made.engines.all["a"].requests = 0
        assert (await waiting).ending == "served"


@virtual
async def test_an_engine_that_is_killed_gives_back_its_host_memory() -> None:
    async with site(three()) as made:
        await used(made, "a")
        await put_to_sleep(made, "a")
        assert made.manager.machine.host_total == 6 * GIB
        made.engines.all["a"].kill()
        await asyncio.sleep(1.0)
        assert made.manager.machine.host_total == 0
        await made.until("a", "running")


@virtual
async def test_an_engine_that_is_taken_over_has_its_host_memory() -> None:
    async with site(three(), host_memory=7 * GIB) as made:
        await used(made, "a", "b")
        await put_to_sleep(made, "a")
        await used(made, "a")
        await made.restart(killed=True)
        assert made.manager.machine.host_total == 6 * GIB
        await put_to_sleep(made, "b")
        assert made.entry("b").level == 2


# -- residue ----------------------------------------------------------------------------------------------------------


@virtual
async def test_an_engine_that_keeps_much_asleep_is_not_killed_and_its_residue_is_learnt() -> None:
    async with site(dict.fromkeys("ab", kept(6.5))) as made:
        await used(made, "a")
        await put_to_sleep(made, "a")
        assert counted(made, "failed") == {}
        assert made.entry("a").size.residue == int(6.5 * GIB)
        await made.restart()
        await used(made, "a")
        made.manager.orders.give("a", "stop")
        await made.until("a", "stopped")
        assert made.entry("a").size.residue == int(6.5 * GIB), "it is known before it sleeps"


@virtual
async def test_one_that_keeps_too_much_for_what_it_makes_room_for_ends() -> None:
    models = {"a": kept(6.5), "b": Model(weights=10 * GIB, claim=20 * GIB)}
    async with site(models) as made:
        await used(made, "a", "b")
        assert made.state() == "a stopped, b running"
        assert len(said(made, "a keeps 6.5 GiB asleep, which leaves too little for b: it ends")) == 1
        assert counted(made, "failed") == {}
        await used(made, "a", "b")
        assert len(said(made, "leaves too little")) == 1, "the plan knows by now"


@virtual
async def test_one_that_keeps_more_than_was_foreseen_and_not_too_much_sleeps_on() -> None:
    async with site({"a": kept(3.0), "b": MODEL, "c": MODEL}, 28 * GIB) as made:
        await used(made, "a", "b", "c")
        assert made.state() == "a sleeping, b running, c running"


@virtual
async def test_an_engine_whose_residue_has_doubled_is_stopped_instead() -> None:
    async with site({"a": kept(2.0, grows=1.0)}) as made:
        for residue in (2, 3, 4):
            await used(made, "a")
            await put_to_sleep(made, "a")
            assert made.entry("a").size.residue == residue * GIB
        assert len(said(made, "a is stopped instead of its next sleep: it kept 2.0 GiB at first and 4.0 now")) == 1
        await made.restart(killed=True)
        await used(made, "a")
        with pytest.raises(Refused, match=r"a keeps 4\.0 GiB asleep, twice what it kept at first"):
            made.manager.orders.give("a", "sleep")
        made.manager.orders.give("a", "stop")
        await made.until("a", "stopped")
        await used(made, "a")
        await put_to_sleep(made, "a")
        assert made.entry("a").size.residue == 2 * GIB


# -- a container ------------------------------------------------------------------------------------------------------


LISTINGS: tuple[Listing, ...] = ("host", "none", "own")


@pytest.mark.parametrize("listing", LISTINGS)
@virtual
async def test_a_sleep_that_gives_nothing_back_does_not_count_wherever_the_pids_are_from(listing: Listing) -> None:
    async with site(three(), listing=listing) as made:
        await used(made, "a", "b")
        made.machine.faults.keep_asleep = 1
        made.manager.orders.give("a", "sleep")
        await asyncio.sleep(20.0)
        assert counted(made, "slept") == {}
        assert counted(made, "failed") == {"a": 1}
        assert len(said(made, "its memory has not come back: 0.0 of 11.0 GiB of GPU 0")) == 1
        assert bool(made.manager.troubles()) is (listing != "own")


@pytest.mark.parametrize("listing", LISTINGS)
@virtual
async def test_models_take_turns_wherever_the_pids_are_from(listing: Listing) -> None:
    async with site(three(), listing=listing) as made:
        await used(made, "a", "b", "c", "a", "b")
        assert counted(made, "failed") == {}
        assert made.entry("c").size.residue == GIB
        await made.restart(killed=True)
        assert bool(made.manager.troubles()) is (listing != "own")
        await used(made, "c", "a")
        assert counted(made, "failed") == {}


@virtual
async def test_what_others_take_as_an_engine_falls_asleep_in_a_container_is_not_taken_for_its_own() -> None:
    """A neighbour that is late to wake takes its KV cache last."""
    async with site({"a": MODEL}, 80 * GIB, listing="host") as made:
        await used(made, "a")
        made.manager.orders.give("a", "sleep")
        await asyncio.sleep(0.5)
        made.machine.others_take(1, 0, 20 * GIB)
        await made.until("a", "sleeping", 20.0)
        assert counted(made, "failed") == {}
        made.machine.others_take(1, 0, 0)


@virtual
async def test_an_engine_that_is_taken_over_in_a_container_does_not_sleep_by_its_word_alone() -> None:
    async with site(three(), listing="host") as made:
        await used(made, "a")
        await made.restart(killed=True)
        made.machine.faults.keep_asleep = 1
        made.manager.orders.give("a", "sleep")
        await asyncio.sleep(20.0)
        assert (counted(made, "slept"), counted(made, "failed")) == ({}, {"a": 1})


# -- level 2 ----------------------------------------------------------------------------------------------------------


@virtual
async def test_a_model_that_answers_otherwise_after_level_2_is_not_put_there_again() -> None:
    async with site({"a": MODEL}, a="sleep: {level: 2}") as made:
        await used(made, "a")
        await put_to_sleep(made, "a")
        assert made.entry("a").level == 2
        made.machine.faults.fail_wake = 1
        made.manager.orders.ensure("a")
        await asyncio.sleep(60.0)
        await used(made, "a")
        assert len(said(made, "a does not sleep at level 2 any more")) == 1
        await made.restart()
        assert "once it has answered otherwise" in made.manager.troubles()[0]
        await put_to_sleep(made, "a")
        assert made.entry("a").level == 1


@virtual
async def test_a_failed_wake_from_level_1_forbids_nothing() -> None:
    async with site({"a": MODEL}) as made:
        await used(made, "a")
        await put_to_sleep(made, "a")
        made.machine.faults.fail_wake = 1
        made.manager.orders.ensure("a")
        await asyncio.sleep(60.0)
        assert made.entry("a").sleep_levels() == (1, 2)


@virtual
async def test_with_adapters_level_1_is_all_there_is_and_without_host_memory_it_stops() -> None:
    lora = "sleep: {level: 2, after: 30s}, flags: {enable-lora: true}"
    async with site({"a": MODEL, "b": MODEL}, host_memory=7 * GIB, a=lora, b=lora) as made:
        assert len(made.manager.troubles()) == 2
        await used(made, "a", "b")
        await put_to_sleep(made, "a")
        assert made.entry("a").level == 1
        with pytest.raises(Refused, match=r"b would fill 6\.0 GiB of host memory, 1\.0 are left"):
            made.manager.orders.give("b", "sleep")
        await asyncio.sleep(40.0)
        assert made.state() == "a sleeping, b stopped"
        assert len(said(made, "b is stopped instead of put to sleep: b would fill 6.0 GiB")) == 1


# -- steps that hang --------------------------------------------------------------------------------------------------


@virtual
async def test_where_the_memory_is_the_hosts_models_sleep_at_level_2_or_are_stopped() -> None:
    models = dict.fromkeys("abc", MODEL)
    text = file("abc", b="flags: {enable-lora: true}")
    async with Site(text, models, GPU, unified=True) as made:
        for name in "abcab":
            assert (await made.gateways[0].call(name, 1.0)).ending == "served"
            await asyncio.sleep(60.0)
        slept = [line for _, line in made.log if "goes to sleep" in line or "ends for" in line]
        assert slept
        assert all("at level 2" in line for line in slept if not line.startswith("b "))
        assert all("ends for" in line for line in slept if line.startswith("b "))
        assert not made.machine.host
        assert "level 1 would free nothing" in " ".join(made.manager.troubles())
        with pytest.raises(Refused, match="b has no level 2, and level 1 would free nothing"):
            made.manager.orders.give("b", "sleep")


@virtual
async def test_pools_of_host_memory_leave_less_to_those_that_sleep() -> None:
    pools = msgspec.structs.replace(MODEL, pools=20 * GIB)
    models = {"a": MODEL, "b": MODEL, "c": pools}
    async with site(models, host_memory=24 * GIB, a="flags: {enable-lora: true}") as made:
        assert (await made.gateways[0].call("a", 1.0)).ending == "served"
        made.manager.orders.give("a", "sleep")
        await made.until("a", "sleeping")
        assert (await made.gateways[0].call("c", 1.0)).ending == "served"
        await asyncio.sleep(1.0)
        assert made.manager.machine.host_room == 4 * GIB
        assert made.state().startswith("a stopped"), "its weights have no room beside the pools, and it has no level 2"
        await made.restart()
        assert made.manager.machine.host_room == 4 * GIB, "an engine that is taken over has its pools still"
        assert (await made.gateways[0].call("b", 1.0)).ending == "served"
        made.manager.orders.give("c", "stop")
        await made.until("c", "stopped")
        assert made.manager.machine.host_room == 24 * GIB
    async with site({"c": pools}, host_memory=16 * GIB) as made:
        refused = await made.gateways[0].call("c", 1.0)
        assert (refused.ending, made.engines.tried) == ("refused", [])
        assert "keep 20.0 GiB of host memory (KV offloading, cpu-offload-gb)" in made.report("c").message
        made.reload(made.text, host_memory=24 * GIB)
        await asyncio.sleep(1.0)
        assert (await made.gateways[0].call("c", 1.0)).ending == "served", "a newer file gives it what it needs"


@virtual
async def test_a_wake_that_hangs_is_ended_in_time_and_its_neighbour_is_served_meanwhile() -> None:
    async with site(three(), sleep="{level: 1}") as made:
        await used(made, "a", "b")
        await put_to_sleep(made, "a", "b")
        made.machine.faults.hang_wake = 1
        began, expected = made.now, UNSURE * made.entry("a").wake_seconds[0]
        waits = asyncio.ensure_future(made.gateways[0].call("a", 0.5))
        await wakes(made, "a")
        answer = await made.gateways[0].call("b", 0.5)
        assert answer.ending == "served"
        assert made.entry("a").lifecycle.pending is not None, "it hangs still"
        assert made.now < began + expected + LATE
        assert (await waits).ending == "served", "by the engine that is started in its place"
        (line,) = said(made, "waking from level 1 has taken")
        assert "it hangs" in line
        (ended,) = [when for when, each in made.log if each == line]
        assert ended <= began + expected + LATE + 1.0


@virtual
async def test_one_that_hangs_as_it_falls_asleep_is_ended_in_time() -> None:
    async with site(three(), sleep="{level: 1}") as made:
        await used(made, "a")
        made.machine.faults.hang_sleep = 1
        began, expected = made.now, UNSURE * made.entry("a").sleep_seconds
        made.manager.orders.give("a", "sleep")
        async with asyncio.timeout(expected + LATE + 20.0):
            while not said(made, "falling asleep at level 1 has taken"):  # see Site.until
                await asyncio.sleep(0.05)
        assert made.now <= began + expected + LATE + 1.0
        await used(made, "a")


@virtual
async def test_the_first_sleep_of_each_engine_is_not_expected_to_be_as_quick_as_later_ones() -> None:
    """The first sleep pins host memory: 14.3 s on an H200, where the same engine's later sleeps took 0.4 s."""
    async with site(three(), sleep="{level: 1}") as made:
        entry = made.entry("a")
        for _ in range(2):  # engines
            await used(made, "a")
            entry.size = msgspec.structs.replace(entry.size, weights=6 * GIB)
            learnt = entry.times.seen.sleep
            assert entry.sleep_seconds == pytest.approx(0.5 + 6 / 1.1)
            await put_to_sleep(made, "a")
            assert entry.times.seen.sleep == learnt, "that was the first"
            await used(made, "a")
            await put_to_sleep(made, "a")
            assert entry.sleep_seconds == entry.times.seen.sleep < 2.0
            made.manager.orders.give("a", "stop")
            await made.until("a", "stopped")


@virtual
async def test_waking_takes_a_little_longer_than_measured_without_being_late() -> None:
    async with site(three(), sleep="{level: 1}") as made:
        await used(made, "a")
        await put_to_sleep(made, "a")
        made.entry("a").times.took("wake1", 0.5)
        await used(made, "a")
        assert said(made, "a is awake after 0.84 s")
        assert not said(made, "late to wake")


def test_a_wake_that_reads_the_disk_is_not_taken_for_a_hang_as_it_was_quicker_from_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Models that take turns push each other's files out of the page cache."""
    rate = 6 * GIB  # bytes a second

    def reads(weights: int, _level: int) -> float:
        return weights / rate

    monkeypatch.setattr(memory_stages, "wake_seconds", reads)

    async def run() -> None:
        nonlocal rate
        weights = 60 * GIB
        models = {"a": Model(weights=weights, claim=70 * GIB)}
        async with Site(file("a", a="sleep: {level: 2}"), models, 80 * GIB) as made:
            await used(made, "a")
            entry = made.entry("a")
            for rate in (6 * GIB, 6 * GIB, 3 * GIB // 4):
                await put_to_sleep(made, "a")
                entry.size = msgspec.structs.replace(entry.size, weights=weights, stored=weights)
                answer = await made.gateways[0].call("a", 0.5)
                assert answer.ending == "served"
                assert answer.waited == pytest.approx(weights / rate, abs=1.0)
                await asyncio.sleep(5.0)
            assert len(made.engines.tried) == 1

    vtime.run(run())


@virtual
async def test_what_is_late_to_wake_is_foretold_later_each_time() -> None:
    async with site(three(), sleep="{level: 1}") as made:
        await used(made, "a")
        await put_to_sleep(made, "a")
        made.machine.faults.hang_wake = 1
        waits = asyncio.ensure_future(made.gateways[0].call("a", 0.5))
        await wakes(made, "a")
        await asyncio.sleep(20.0)
        entry = made.entry("a")
        left = entry.ready_in(made.now, None)
        assert left is not None
        assert left >= 4.0, "a quarter of what it has taken, not at once"
        await waits
