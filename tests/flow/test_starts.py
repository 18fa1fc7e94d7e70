"""Laws of a start, in virtual time: one that makes progress is never ended before `load_timeout`, one without is ended
within `load_stall` and a look, and its GPUs are free again then."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

import msgspec
import pytest

from loadtest.lab.residency.residents import Model
from loadtest.lab.residency.site import GIB, Site, counted, file
from loadtest.simulate import vtime
from sidecar.core.engine_records import Unusable
from sidecar.core.inventory import Size
from sidecar.core.start_progress import Look, StartProgress
from sidecar.process.engine_api import ApiError
from sidecar.process.start_evidence import LOOK_EVERY, ready
from sidecar.residency import engine_memory

LARGE, SMALL = Model(weights=6 * GIB, claim=20 * GIB), Model(weights=6 * GIB, claim=20 * GIB)
GPUS = (24 * GIB, 24 * GIB)
STALL, LIMIT = 300.0, 3600.0


def two() -> str:
    return file("ab", 2, a="tensor_parallel: 2", b="sleep: null")


async def ended(made: Site, name: str) -> float:
    """Until its start has failed: when."""
    while not counted(made, "failed")[name]:
        await asyncio.sleep(0.5)
    return asyncio.get_running_loop().time()


def test_a_start_that_hangs_and_says_so_every_minute_gives_its_gpus_back() -> None:
    async def scenario() -> None:
        async with Site(two(), {"a": LARGE, "b": SMALL}, *GPUS) as made:
            made.machine.faults.hang_start = 1
            made.manager.orders.ensure("a")
            waiting = asyncio.ensure_future(made.gateways[0].call("b", 1.0, 1000.0))
            began = asyncio.get_running_loop().time()
            at = await ended(made, "a") - began
            # Its last words that were new: that it waits, a minute after the GPUs began to wait for each other.
            assert 60.0 + STALL <= at <= 60.0 + 5.0 + STALL + LOOK_EVERY
            error = made.entry("a").lifecycle.last_error
            assert "300.0 s of them without progress (the last, 6" in error
            assert "No available shared memory broadcast block" in error
            assert (await waiting).ending == "served", "the GPUs are free for others"

    vtime.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "served"), [(3000.0, True), (4000.0, False)])
def test_a_download_without_a_line_goes_on_until_load_timeout(seconds: float, served: bool) -> None:
    async def scenario() -> None:
        async with Site(two(), {"a": LARGE, "b": SMALL}, *GPUS) as made:
            faults = made.machine.faults
            faults.silent_start, faults.silent = 1, seconds
            made.manager.orders.ensure("a")
            began = asyncio.get_running_loop().time()
            if served:
                await made.until("a", "running", within=seconds + 60.0)
                assert asyncio.get_running_loop().time() - began == pytest.approx(seconds + 20.0, abs=10.0)
            else:
                assert await ended(made, "a") - began == pytest.approx(LIMIT, abs=1.0)

    vtime.run(scenario())


@pytest.mark.parametrize("less", [True, False])
def test_a_model_that_comes_with_its_start_is_started_anew_with_what_it_needs(less: bool) -> None:
    async def scenario() -> None:
        async with Site(file("ab", 1), dict.fromkeys("ab", Model(weights=6 * GIB, claim=11 * GIB)), *GPUS[:1]) as made:
            known, here = made.engines.size, [False]
            guess = 22 * GIB if less else 11 * GIB

            async def size(profile: str, *on: Any, unified: bool) -> Size:
                found = await known(profile, *on, unified=unified)
                if here[0] or profile == "b":
                    return found
                return msgspec.structs.replace(found, claim=guess, start_needs=guess, guessed=True)

            made.engines.size = size  # type: ignore[method-assign] # as if its files were not here
            await engine_memory.size(made.manager.machine, made.entry("a"))
            call = asyncio.ensure_future(made.gateways[0].call("a", 1.0, 1000.0))
            await asyncio.sleep(8.0)
            here[0] = True
            assert (await call).ending == "served"
            assert made.entry("a").size.claim == 11 * GIB
            assert counted(made, "taught") == ({"a": 1} if less else {})
            assert counted(made, "failed") == {}
            assert (await made.gateways[0].call("b", 1.0)).ending == "served"
            assert made.state() == "a running, b running", "both have room"

    vtime.run(scenario())


def test_files_that_cannot_be_used_in_the_middle_of_a_download_end_no_start() -> None:
    async def scenario() -> None:
        async with Site(file("a", 1), {"a": Model(weights=6 * GIB, claim=11 * GIB)}, *GPUS[:1]) as made:
            entry = made.entry("a")

            async def size(*_: Any, unified: bool) -> Size:
                raise Unusable("it is cut off")

            entry.size = msgspec.structs.replace(entry.size, guessed=True)
            entry.sizes = {}
            made.engines.size = size  # type: ignore[method-assign] # as if one file were half there
            assert (await made.gateways[0].call("a", 1.0)).ending == "served"

    vtime.run(scenario())


class _Never:
    """API of an engine that never gets ready."""

    served_name = "m"

    async def health(self) -> None:
        await asyncio.sleep(0.01)
        raise ApiError("refused", "/health: nobody listens")


@pytest.mark.parametrize("seed", range(10))
def test_any_start_ends_within_a_look_of_its_stall_and_not_before(seed: int) -> None:
    """Signs come at random times and by every way that there is, until they come no more."""
    rng = random.Random(seed)
    stall = rng.choice((1.0, 20.0, STALL))
    look_every = min(LOOK_EVERY, stall / 4)
    gaps = [rng.uniform(0.0, 0.9 * stall - look_every) for _ in range(rng.randrange(30))]

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        progress = StartProgress(loop.time(), stall)
        grown = [0]
        signs = [loop.time()]

        async def get_on() -> None:
            for number, gap in enumerate(gaps):
                await asyncio.sleep(gap)
                signs.append(loop.time())
                if rng.random() < 0.5:
                    grown[0] += 1
                else:
                    progress.wrote(f"Loading: {number + 1}/{len(gaps)}", loop.time())

        async def look() -> None:
            await asyncio.sleep(rng.uniform(0.0, 0.01))
            progress.looked(Look(gpu=grown[0]), loop.time())

        getting_on = asyncio.ensure_future(get_on())
        dead: asyncio.Future[None] = loop.create_future()
        waits = partial(ready, progress=progress, limit=LIMIT, clock=loop.time, dead=dead, look=look)
        began = loop.time()
        with pytest.raises(ApiError) as caught:
            await waits(_Never())  # type: ignore[arg-type] # as much of an EngineApi as is asked
        took, last = loop.time() - began, signs[-1] - began
        assert caught.value.kind == "timeout"
        assert min(LIMIT, last + stall) <= took + 1e-6
        assert took <= min(LIMIT, last + stall + 2 * look_every) + 0.1
        assert getting_on.done() or took == pytest.approx(LIMIT, abs=0.1)
        getting_on.cancel()

    vtime.run(scenario())
