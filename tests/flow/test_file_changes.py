"""Newer files of the sidecar in virtual time: what restarts, what does not, and what becomes of calls and engines.

The last test has random files at random moments, with calls and faults: whatever they were, afterwards each model is as
the last file has it, nothing is stuck, and nothing is left of the others.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

import pytest

from loadtest.lab.residency.callers import CallOutcome
from loadtest.lab.residency.faults import give
from loadtest.lab.residency.residents import Model
from loadtest.lab.residency.site import GIB, Site, counted
from loadtest.simulate import vtime
from sidecar.core.reload import CHANGED, GONE, NEW, RESTARTED

MODEL = Model(weights=6 * GIB, claim=11 * GIB)  # 13.2 s to start
GPU = 24 * GIB
OTHER = "flags: {max-num-seqs: 8}"  # needs another engine
SOFT = "stop_after: 1h, max_starvation: 5s, load_stall: 1m, warmup: {requests: 2}, sleep: {level: 2, after: 10m}"


def text(*gpus: int, **profiles: str) -> str:
    """A file; `profiles`: the fields of each by name, with another model than its own where they say which."""
    lines = [f"gpus: [{', '.join(map(str, gpus or (0,)))}]", "models:"]
    for name, fields in profiles.items():
        model = "" if "model_path" in fields else f"model_path: /m/{name}, "
        lines.append(f"  {name}: {{{model}{fields}}}")
    return "\n".join(lines).replace(", }", "}") + "\n"


def site(*totals: int, gateways: int = 1, **profiles: str):  # type: ignore[no-untyped-def] # of an async context manager
    gpus = totals or (GPU,)
    models = dict.fromkeys("abcd", MODEL)
    return Site(text(*range(len(gpus)), **profiles), models, *gpus, gateways=gateways, hot=0.0)


def clean(made: Site) -> None:
    assert made.left_over() == []
    assert made.machine.overlaps == []


def test_what_needs_no_other_engine_restarts_nothing() -> None:
    async def scene() -> None:
        async with site(a="", b="") as made:
            await made.gateways[0].call("a", 1.0)
            found = made.reload(text(a=SOFT, b=""))
            assert (found[CHANGED], found[RESTARTED], found[NEW], found[GONE]) == (("a",), (), (), ())
            await asyncio.sleep(100.0)
            assert (made.entry("a").lifecycle.state.value, made.entry("a").profile.stop_after) == ("running", 3600.0)
            await asyncio.sleep(600.0)
            assert made.entry("a").level == 2, "it sleeps by the new settings"
            assert counted(made, "ready") == {"a": 1}
            clean(made)

    vtime.run(scene())


def test_another_engine_comes_once_the_calls_of_this_one_have_ended() -> None:
    async def scene() -> None:
        async with site(a="", b="", gateways=2) as made:
            await made.gateways[0].call("a", 0.1)
            long = asyncio.ensure_future(made.gateways[1].call("a", 200.0))
            await asyncio.sleep(2.0)
            assert made.reload(text(a=OTHER, b=""))[RESTARTED] == ("a",)
            await asyncio.sleep(1.0)
            assert not made.gateways[0].serves("a"), "gateways send it nothing more"
            assert (await made.gateways[0].call("b", 1.0)).ending == "served", "others of its GPU move as ever"
            waits = asyncio.ensure_future(made.gateways[0].call("a", 1.0))
            assert (await long).ending == "served"
            assert (await waits).ending == "served"
            assert made.entry("a").profile.flags == {"max-num-seqs": 8}
            assert counted(made, "ready")["a"] == 2
            await asyncio.sleep(5.0)
            clean(made)

    vtime.run(scene())


def test_a_model_that_is_off_and_leaves_is_not_to_be_switched_on() -> None:
    async def scene() -> None:
        async with site(a="", b="") as made:
            await made.gateways[0].call("a", 0.1)
            running = asyncio.ensure_future(made.gateways[0].call("a", 10.0))
            await asyncio.sleep(2.0)
            made.manager.orders.give("a", "off")
            made.reload(text(b=""))
            told = made.report("a")
            assert (told.why, told.message) == ("draining", "the sidecar's file no longer has a")
            assert (await running).ending == "served"

    vtime.run(scene())


def test_calls_that_do_not_end_are_cut_off_after_ten_minutes() -> None:
    async def scene() -> None:
        async with site(a="", b="") as made:
            await made.gateways[0].call("a", 0.1)
            endless = asyncio.ensure_future(made.gateways[0].call("a", 5000.0))
            await asyncio.sleep(2.0)
            made.reload(text(b=""))
            await asyncio.sleep(590.0)
            assert "a" in made.manager.entries
            outcome = await endless
            assert (outcome.ending, outcome.how) == ("broken", "SIGTERM")
            await asyncio.sleep(5.0)
            assert list(made.manager.entries) == ["b"]
            clean(made)

    vtime.run(scene())


def test_one_that_sleeps_or_has_failed_has_its_new_settings_at_once() -> None:
    async def scene() -> None:
        async with site(a="", b="sleep: {after: 5s}") as made:
            made.machine.faults.fail_start = 1
            made.manager.orders.ensure("a")
            await made.gateways[0].call("b", 0.1)
            await made.until("b", "sleeping")
            made.reload(text(a="context_length: 10", b=OTHER))
            await asyncio.sleep(5.0)
            assert (await made.until("b", "stopped"), made.entry("b").profile.flags) != (0, {})
            assert made.entry("a").profile.context_length == 10
            assert not made.entry("a").lifecycle.last_error
            assert "b" not in counted(made, "failed")
            assert (await made.gateways[0].call("b", 0.1)).ending == "served"
            clean(made)

    vtime.run(scene())


def test_a_pinned_model_comes_back_at_once_and_another_when_it_is_wanted() -> None:
    async def scene() -> None:
        async with site(a="pin: true", b="") as made:
            await made.gateways[0].call("b", 0.1)
            await made.until("a", "running")
            await asyncio.sleep(2.0)  # until gateways have said that nothing waits any more
            made.reload(text(a=f"pin: true, {OTHER}", b=OTHER))
            await asyncio.sleep(60.0)
            assert counted(made, "ready") == {"a": 2, "b": 1}
            assert made.entry("b").lifecycle.state.value == "stopped"
            clean(made)

    vtime.run(scene())


def test_a_model_that_is_gone_takes_its_name_with_it_and_a_new_one_can_be_had() -> None:
    async def scene() -> None:
        async with site(a="", b="") as made:
            await made.gateways[0].call("a", 0.1)
            made.manager.lines("a", 1)
            found = made.reload(text(b="", c=""))
            assert (found[NEW], found[GONE]) == (("c",), ("a",))
            report = made.report("a")
            assert (report.ready_in, report.why, report.pending) == (None, "draining", "drain")
            await asyncio.sleep(10.0)
            assert sorted(made.gateways[0].models) == ["b", "c"]
            assert "a" not in made.manager.entries
            assert (await made.gateways[0].call("c", 0.1)).ending == "served"
            clean(made)

    vtime.run(scene())


def test_two_models_that_swap_their_names() -> None:
    async def scene() -> None:
        async with site(a="", b="") as made:
            for name in "ab":
                assert (await made.gateways[0].call(name, 0.1)).ending == "served"
            found = made.reload(text(a="model_path: /m/b", b="model_path: /m/a"))
            assert found[RESTARTED] == ("a", "b")
            await asyncio.sleep(0.1)  # until the gateway has heard of it
            for name in "ab":
                assert (await made.gateways[0].call(name, 0.1)).ending == "served"
            assert [made.entry(name).profile.model_path for name in "ab"] == ["/m/b", "/m/a"]
            assert counted(made, "ready") == {"a": 2, "b": 2}
            clean(made)

    vtime.run(scene())


def test_a_file_that_takes_back_the_one_before_keeps_the_engine() -> None:
    async def scene() -> None:
        async with site(a="", b="") as made:
            await made.gateways[0].call("a", 0.1)
            call = asyncio.ensure_future(made.gateways[0].call("a", 30.0))
            await asyncio.sleep(2.0)
            made.reload(text(b=""))
            await asyncio.sleep(2.0)
            assert not made.gateways[0].serves("a")
            made.reload(text(a="stop_after: 9m", b=""))
            await asyncio.sleep(2.0)
            assert made.gateways[0].serves("a")
            assert made.entry("a").profile.stop_after == 540.0
            assert (await call).ending == "served"
            assert counted(made, "ready") == {"a": 1}
            clean(made)

    vtime.run(scene())


def test_a_start_under_way_ends_and_the_next_has_the_new_settings() -> None:
    async def scene() -> None:
        async with site(a="", b="") as made:
            waits = asyncio.ensure_future(made.gateways[0].call("a", 0.1))
            await asyncio.sleep(5.0)
            made.reload(text(a=OTHER, b=""))
            made.reload(text(a=f"context_length: 9, {OTHER}", b=""))
            assert (await waits).ending == "served"
            assert made.entry("a").profile.context_length == 9
            assert counted(made, "ready") == {"a": 1}
            clean(made)

    vtime.run(scene())


@pytest.mark.parametrize("moment", [0.05, 0.3, 0.8])
@pytest.mark.parametrize("order", ["sleep", "stop"])
def test_a_newer_file_while_an_order_is_carried_out(order: str, moment: float) -> None:
    async def scene() -> None:
        async with site(a="", b="") as made:
            await made.gateways[0].call("a", 0.1)
            call = asyncio.ensure_future(made.gateways[0].call("a", 3.0))
            await asyncio.sleep(1.5)
            assert give(made, "a", order)
            await asyncio.sleep(moment)
            made.reload(text(a=OTHER, b=""))
            assert (await call).ending == "served"
            while made.entry("a").replaced:
                await asyncio.sleep(0.1)
            await asyncio.sleep(1.0)
            assert (await made.gateways[0].call("a", 0.1)).ending == "served"
            assert made.entry("a").profile.flags == {"max-num-seqs": 8}
            await asyncio.sleep(5.0)
            clean(made)

    vtime.run(scene())


def test_an_ensure_does_not_call_off_what_the_file_has_begun() -> None:
    async def scene() -> None:
        async with site(a="", b="") as made:
            await made.gateways[0].call("a", 0.1)
            call = asyncio.ensure_future(made.gateways[0].call("a", 30.0))
            await asyncio.sleep(2.0)
            made.reload(text(a=OTHER, b=""))
            await asyncio.sleep(1.0)
            report = made.manager.orders.ensure("a")
            assert (report.pending, report.ready_in) != ("drain", None)
            assert (await call).ending == "served"
            await made.until("a", "running")
            assert counted(made, "ready") == {"a": 2}
            clean(made)

    vtime.run(scene())


def test_more_models_than_a_report_holds_change_nothing() -> None:
    async def scene() -> None:
        async with site(a="", b="") as made:
            await made.gateways[0].call("a", 0.1)
            many = {f"m{number}": "model_path: /m/c" for number in range(255)}
            with pytest.raises(ValueError, match=r"there are 257, and a report holds 256$"):
                made.reload(text(**many))
            assert list(made.manager.entries) == ["a", "b"]
            assert made.manager.machine.config.models.keys() == {"a", "b"}

    vtime.run(scene())


# -- random files -----------------------------------------------------------------------------------------------------


def drawn(rng: random.Random) -> Mapping[str, str]:
    """Profiles of a random file, one of them at least."""
    names = rng.sample("abcd", rng.randint(1, 4))
    fields = ("", "", OTHER, SOFT, "pin: true", "sleep: null", "model_path: /m/d", "gpus: [1]", "stop_after: 20s")
    return {name: rng.choice(fields) for name in names}


async def changed_at_random(seed: int, files: int) -> None:
    rng = random.Random(seed)
    profiles = drawn(rng)
    outcomes: list[asyncio.Task[CallOutcome]] = []
    async with site(GPU, GPU, gateways=2, **profiles) as made:
        for _ in range(files):
            await asyncio.sleep(rng.choice((0.0, 0.01, 0.3, 2.0, 15.0, 40.0)))
            if rng.random() < 0.3:
                give(made, rng.choice(list(made.manager.entries)), rng.choice(("sleep", "stop", "ensure")))
            if rng.random() < 0.1:
                made.machine.faults.fail_start += 1
            for name in rng.sample("abcd", 2):
                call = rng.choice(made.gateways).call(name, rng.choice((0.1, 3.0, 20.0)), patience=60.0)
                if name in profiles:
                    outcomes.append(asyncio.ensure_future(call))
                else:
                    call.close()
            profiles = drawn(rng)
            made.reload(text(0, 1, **profiles))
        for answer in await asyncio.gather(*outcomes):
            assert answer.ending != "astray"
            assert (answer.ending, answer.how) != ("broken", "SIGTERM"), "a call was cut off"
        await asyncio.sleep(400.0)
        in_force = made.manager.machine.config.models
        assert {name: entry.profile for name, entry in made.manager.entries.items()} == in_force
        assert not [entry for entry in made.manager.entries.values() if entry.replaced or entry.leaving]
        clean(made)
        made.machine.faults.fail_start = 0
        for name in made.manager.entries:
            if "pin" not in str(profiles.values()):
                assert (await made.gateways[0].call(name, 0.1)).ending == "served", made.state()
    assert made.machine.held == {}


@pytest.mark.parametrize("seed", range(1))
def test_random_files_at_random_moments(seed: int) -> None:
    vtime.run(changed_at_random(seed, 15))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_many_random_files(seed: int) -> None:
    vtime.run(changed_at_random(seed, 60))
