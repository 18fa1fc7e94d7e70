"""Preloading in virtual time."""

from __future__ import annotations

import asyncio

from loadtest.lab.residency.residents import Model
from loadtest.lab.residency.site import GIB, Site, counted, file
from loadtest.simulate import vtime
from tests.flow.test_file_changes import OTHER, clean, site, text

MODEL = Model(weights=6 * GIB, claim=11 * GIB)  # 13.2 s to start; two fit on the GPU


def test_preloaded_models_start_in_the_files_order_while_there_is_room() -> None:
    async def scene() -> None:
        names = "dcab"
        every = dict.fromkeys(names, "preload: true, stop_after: 10m")
        async with Site(file(names, **every), dict.fromkeys(names, MODEL), 24 * GIB, hot=0.0) as made:
            await asyncio.sleep(60.0)
            assert [name for _, name in made.engines.starts] == ["d", "c"]
            missed = [f"{name} is not preloaded: others would have to make room" for name in "ab"]
            assert [line for _, line in made.log if "preloaded" in line] == missed
            assert made.manager.troubles() == tuple(missed)
            await asyncio.sleep(1200.0)
            assert made.state() == "d stopped, c stopped, a stopped, b stopped", "once, and nobody takes their place"
            assert len(made.engines.starts) == 2
            assert (await made.gateways[0].call("a", 1.0)).ending == "served"
            assert made.manager.troubles() == tuple(missed[1:])
            made.reload(file(names, **every | {"b": "stop_after: 10m"}))
            assert made.manager.troubles() == ()
            clean(made)

    vtime.run(scene())


def test_a_preloaded_model_that_was_awake_comes_back_with_new_settings_at_once() -> None:
    async def scene() -> None:
        async with site(a="preload: true", b="") as made:
            await made.until("a", "running")
            made.reload(text(a=f"preload: true, {OTHER}", b="preload: true"))
            await asyncio.sleep(60.0)
            assert counted(made, "ready") == {"a": 2, "b": 1}
            made.manager.orders.give("a", "stop")
            await asyncio.sleep(5.0)
            made.reload(text(a="preload: true, context_length: 9", b="preload: true"))
            await asyncio.sleep(60.0)
            assert counted(made, "ready")["a"] == 2, "it was stopped by hand"
            clean(made)

    vtime.run(scene())
