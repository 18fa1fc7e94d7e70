"""Starts that fail for memory, in virtual time: each teaches, the next fits or the model says why it cannot be run."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from loadtest.engine.true_memory import TrueMemory
from loadtest.lab.residency.residents import Model, TriedStart
from loadtest.lab.residency.site import GIB, Site, counted, file
from loadtest.simulate import vtime
from sidecar.core.diagnosis import diagnosis
from sidecar.core.lifecycle import FIRST_REST
from tests.flow.test_manager import virtual

WEIGHTS, CLAIM, GPU = 6 * GIB, 12 * GIB, 24 * GIB  # the estimate: 10.5 GiB beside 1.5 GiB of KV cache


def model(rest: float = 10.5, context: float = 1.5, **more: Any) -> Model:
    """One that really needs so many GiB."""
    true = TrueMemory(rest=int(rest * GIB), context=int(context * GIB), **more)
    return Model(weights=WEIGHTS, claim=CLAIM, true=true)


def starts(made: Site, name: str) -> list[TriedStart]:
    return [each for each in made.engines.tried if each.profile == name]


def repeated(made: Site, name: str) -> list[TriedStart]:
    """Starts that failed for memory, and whose next was the same in the same place."""
    return [
        before
        for before, after in pairwise(starts(made, name))
        if before.failed not in ("", "memory_changed")
        and (before.gpus, after.at < before.at + FIRST_REST) == (after.gpus, True)
        and before.size.starts_as(after.size)
    ]


@pytest.mark.parametrize(
    ("really", "tries"),
    [
        (model(), 1),
        (model(rest=11.5), 2),  # 0.5 GiB are left for the cache
        (model(context=2.5), 2),
        (model(rest=14.0), 2),  # nothing is left
        (model(blocks=100), 2),
        (model(rest=11.5, blocks=100), 3),
        (model(rest=19.0, context=3.0), 4),  # nothing is left, twice, then too little
    ],
    ids=str,
)
def test_the_next_start_claims_what_the_last_has_told(really: Model, tries: int) -> None:
    async def run() -> None:
        async with Site(file("a"), {"a": really}, GPU) as made:
            answer = await made.gateways[0].call("a", 1.0)
            assert (answer.ending, len(starts(made, "a"))) == ("served", tries)
            assert counted(made, "taught")["a"] == tries - 1
            assert made.entry("a").lifecycle.failures == 0
            assert made.left_over() == []
            await made.restart()
            made.manager.orders.give("a", "stop")
            await made.until("a", "stopped")
            made.manager.orders.ensure("a")
            await made.until("a", "running")
            assert len(starts(made, "a")) == tries + 1, "it is still known"

    vtime.run(run())


@pytest.mark.parametrize(
    ("really", "tries", "context"),
    [
        ({}, 1, 31_744),
        ({"rest": 14.0}, 2, 24_576),
        ({"context": 72.0}, 2, 22_528),
        ({"rest": 14.0, "wording": 2}, 2, 20_480),  # an old vLLM tells tokens alone
        ({"beyond": 2 * GIB}, 2, 29_696),
        ({"longest": 8192}, 2, None),  # vLLM's own: it needs not be told
    ],
    ids=str,
)
def test_a_context_that_does_not_fit_is_shortened_and_again_by_what_a_start_tells(
    really: dict[str, Any], tries: int, context: int | None
) -> None:
    """Of a model for 131,072 tokens, whose KV cache is twice the GPU."""
    given = {"rest": 10.5, "context": 48.0, "tokens": 131_072} | really
    long = msgspec.structs.replace(model(**given), claim=int(58.5 * GIB), context=48 * GIB, own_context=131_072)

    async def run() -> None:
        async with Site(file("a"), {"a": long}, GPU) as made:
            answer = await made.gateways[0].call("a", 1.0)
            found = starts(made, "a")
            assert (answer.ending, len(found)) == ("served", tries)
            contexts = [each.size.context_length for each in found]
            assert len(set(contexts)) == len(contexts)
            assert contexts[-1] == context

    vtime.run(run())


@virtual
async def test_what_can_never_fit_is_not_tried_again_and_says_what_it_needs() -> None:
    async with Site(file("ab"), {"a": model(rest=23.0), "b": model()}, GPU) as made:
        refused = await made.gateways[0].call("a", 1.0)
        assert (refused.ending, made.report("a").why) == ("refused", "error")
        assert "needs" in made.report("a").message
        tries = len(starts(made, "a"))
        assert tries <= 4
        for _ in range(5):
            await asyncio.sleep(FIRST_REST)
            assert (await made.gateways[0].call("a", 1.0)).ending == "refused"
        assert len(starts(made, "a")) == tries
        assert (await made.gateways[0].call("b", 1.0)).ending == "served"
        made.engines.models["a"] = Model(weights=WEIGHTS, claim=CLAIM, true=TrueMemory(rest=CLAIM, context=GIB))
        made.manager.orders.ensure("a")  # somebody has installed another vLLM
        await made.until("a", "running")


@virtual
async def test_memory_taken_beside_the_share_is_left_free_the_next_time() -> None:
    really = model(beyond=2 * GIB)
    async with Site(file("ab"), {"a": Model(weights=WEIGHTS, claim=11 * GIB), "b": really}, GPU) as made:
        for name in "ab":
            assert (await made.gateways[0].call(name, 1.0)).ending == "served"
        assert counted(made, "taught")["b"] >= 1
        assert made.entry("b").size.beyond > 0
        assert made.state().startswith("a sleeping, b running")


@pytest.mark.slow
@virtual
async def test_what_takes_more_beside_its_least_share_than_the_gpu_has_is_refused_and_not_tried_again() -> None:
    async with Site(file("a"), {"a": model(beyond=2 * GIB, wording=5)}, 13 * GIB) as made:  # vLLM tells no numbers
        for _ in range(8):
            assert (await made.gateways[0].call("a", 1.0)).ending == "refused"
            await asyncio.sleep(FIRST_REST)
        tries = len(starts(made, "a"))
        assert tries <= 4
        assert "GiB beside them" in made.report("a").message
        await asyncio.sleep(10 * FIRST_REST)
        assert (await made.gateways[0].call("a", 1.0)).ending == "refused"
        assert len(starts(made, "a")) == tries
        made.engines.models["a"] = model()
        made.manager.orders.ensure("a")
        await made.until("a", "running")


@virtual
async def test_the_larger_gpu_is_taken_where_only_there_the_whole_context_fits() -> None:
    true = TrueMemory(rest=int(10.5 * GIB), context=16 * GIB, tokens=131_072)
    long = Model(weights=WEIGHTS, claim=int(26.5 * GIB), context=16 * GIB, own_context=131_072, true=true)
    models = {"a": long, "b": long, "c": model()}
    async with Site(file("abc", 2), models, GPU, 80 * GIB) as made:
        for name in "abc":
            assert (await made.gateways[0].call(name, 1.0)).ending == "served"
        placed = {each.profile: (each.gpus, each.size.context_length) for each in made.engines.tried}
        assert placed == {"a": ((1,), None), "b": ((1,), None), "c": ((0,), None)}
        made.machine.others_take(9, 1, 20 * GIB)
        for name in "ab":
            made.manager.orders.give(name, "stop")
            await made.until(name, "stopped")
        made.machine.others_take(9, 1, 60 * GIB)
        made.manager.orders.give("c", "stop")
        await made.until("c", "stopped")
        assert (await made.gateways[0].call("a", 1.0)).ending == "served"
        assert made.engines.tried[-1].gpus == (0,), "a part of its context, rather than nothing"


REFUSALS = [
    "api_server.py: error: unrecognized arguments: --no-such-flag",
    "ValueError: Total number of attention heads (30) must be divisible by tensor parallel size (4).",
]


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_start_that_is_refused_for_its_arguments_is_not_repeated_until_somebody_asks(refusal: str) -> None:
    async def run() -> None:
        async with Site(file("ab"), {"a": model(), "b": model()}, GPU) as made:
            made.machine.faults.refusal = refusal
            refused = await made.gateways[0].call("a", 1.0)
            await asyncio.sleep(2 * FIRST_REST)
            again = await made.gateways[0].call("a", 1.0)
            assert (refused.ending, again.ending, len(starts(made, "a"))) == ("refused", "refused", 1)
            told = made.report("a")
            assert told.why == "error"
            assert told.message == f"vLLM refuses its arguments: {refusal}. {diagnosis([refusal]).advice}"
            made.machine.faults.refusal = ""
            assert (await made.gateways[0].call("b", 1.0)).ending == "served"
            made.manager.orders.ensure("a")
            await made.until("a", "running")

    vtime.run(run())


@virtual
async def test_what_is_refused_after_the_arguments_were_read_is_tried_again() -> None:
    async with Site(file("a"), {"a": model()}, GPU) as made:
        made.machine.faults.fail_start, made.machine.faults.fail_line = 1, REFUSALS[1]
        assert (await made.gateways[0].call("a", 1.0)).ending == "served"
        assert len(starts(made, "a")) == 2


@virtual
async def test_gpus_that_cannot_be_read_for_a_time_leave_what_was_learnt() -> None:
    async with Site(file("a"), {"a": model(rest=14.0)}, GPU) as made:
        assert (await made.gateways[0].call("a", 1.0)).ending == "served"
        tries = len(starts(made, "a"))
        made.manager.orders.give("a", "stop")
        await made.until("a", "stopped")
        made.machine.faults.driver = "NVML: driver/library version mismatch"
        await made.restart()
        assert made.entry("a").unusable
        made.machine.faults.driver = ""
        await asyncio.sleep(10.0)
        assert (await made.gateways[0].call("a", 1.0)).ending == "served"
        assert len(starts(made, "a")) == tries + 1, "it is still known what it claims"


@virtual
async def test_a_gpu_that_is_smaller_for_cuda_than_is_known_gets_a_smaller_share() -> None:
    async with Site(file("a"), {"a": model(rest=13.0, context=1.0, hidden=GIB // 2)}, 16 * GIB) as made:
        assert (await made.gateways[0].call("a", 1.0)).ending == "served"
        assert made.lessons["a"].cuda == pytest.approx(15.5 * GIB, abs=GIB // 100)


@virtual
async def test_gpus_that_have_no_room_for_the_context_beside_the_least_share_are_not_tried_again() -> None:
    small = {"a": Model(weights=8 * GIB, claim=15 * GIB, true=TrueMemory(rest=10 * GIB, context=GIB, hidden=GIB // 2))}
    async with Site(file("a", 2), small, 16 * GIB, GPU) as made:
        for _ in range(3):
            assert (await made.gateways[0].call("a", 1.0)).ending == "served"
            made.manager.orders.give("a", "stop")
            await made.until("a", "stopped")
        assert [(each.gpus, each.failed) for each in starts(made, "a")] == [
            ((0,), "free_memory_too_low"),
            *[((1,), "")] * 3,
        ]


@virtual
async def test_memory_of_the_failed_start_itself_that_has_not_come_back_is_not_taken_by_others() -> None:
    async with Site(file("a"), {"a": model(beyond=2 * GIB)}, 13 * GIB) as made:
        made.machine.faults.kept = 20.0
        made.manager.orders.ensure("a")
        while len(starts(made, "a")) < 2:
            await asyncio.sleep(1.0)
        assert [each.failed for each in starts(made, "a")[:1]] == ["oom"]
        assert repeated(made, "a") == []


@virtual
async def test_who_holds_the_memory_is_told() -> None:
    async with Site(file("a"), {"a": model()}, GPU) as made:
        others = {7: {0: int(11.5 * GIB)}, 8: {0: 0}}
        asyncio.get_running_loop().call_later(1.0, made.machine.held.update, others)  # once it has begun to start
        await made.gateways[0].call("a", 1.0)
        told = [line for _, line in made.log if "less than desired" in line]
        assert told
        assert told[0].endswith("; process 7 holds 11.5 GiB of GPU 0")


@virtual
async def test_memory_that_another_gave_back_is_no_failure() -> None:
    async with Site(file("a"), {"a": model()}, GPU) as made:
        made.machine.faults.changed = 3
        assert (await made.gateways[0].call("a", 1.0)).ending == "served"
        life = made.entry("a").lifecycle
        assert (life.failures, life.starved, len(starts(made, "a"))) == (0, 0, 4)


@pytest.mark.parametrize("given", ["gpu_memory: 95%", ""], ids=["a share of the operator's", "auto"])
def test_a_share_that_ran_out_of_memory_is_answered_with_a_lower_one_to_try(given: str) -> None:
    async def run() -> None:
        async with Site(file("a", a=given), {"a": model(beyond=2 * GIB)}, 13 * GIB) as made:
            made.manager.orders.ensure("a")
            await made.until("a", "error")
            advised = [line for _, line in made.log if "leaves too little beside it: try gpu_memory: 84%" in line]
            assert bool(advised) is bool(given)

    vtime.run(run())


async def one_machine(seed: int) -> None:
    """Random models, estimated wrongly, on random GPUs; each is asked for in turn."""
    rng = random.Random(seed)
    totals = [rng.choice((16, 24, 40, 80)) * GIB for _ in range(rng.randint(1, 3))]
    models = {}
    for name in "abcd"[: rng.randint(1, 4)]:
        claim = rng.uniform(0.3, 0.9) * rng.choice(totals)
        weights, context = int(claim * rng.uniform(0.3, 0.7)), claim / 8
        true = TrueMemory(
            rest=int((claim - context) * rng.choice((0.9, 1.0, 1.1, 1.3, 1.8))),
            context=int(context * rng.choice((0.5, 1.0, 1.0, 2.0))),
            beyond=rng.choice((0, 0, GIB // 2, 2 * GIB)),
            blocks=rng.choice((None, None, 64)),
            hidden=rng.choice((0, GIB // 2)),
        )
        models[name] = Model(weights=weights, claim=int(claim), true=true)
    names = list(models)
    async with Site(file(names, len(totals)), models, *totals) as made:
        for name in names * 2:
            answer = await made.gateways[0].call(name, 1.0, 2000.0)
            report = made.report(name)
            assert answer.ending == "served" or report.message, f"{name} {answer}: {made.state()}"
        await asyncio.sleep(2 * FIRST_REST)
        for name in names:
            assert repeated(made, name) == []
        assert made.wrong == []
        for name, entry in made.manager.entries.items():
            assert entry.lifecycle.pending is None
            fits = models[name].true
            assert fits is not None
            if entry.unusable:
                assert fits.rest + fits.context > 0.9 * (max(totals) - fits.hidden) - fits.beyond, (
                    "it would have fitted"
                )


@pytest.mark.parametrize("seed", range(2))
def test_random_machines_with_wrong_estimates(seed: int) -> None:
    vtime.run(one_machine(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 50))
def test_many_random_machines_with_wrong_estimates(seed: int) -> None:
    vtime.run(one_machine(seed))
