"""Rows about residency in virtual time: models that take turns on too little memory. One function a row."""

from __future__ import annotations

import asyncio
from statistics import fmean

from loadtest.lab.residency.residents import Model
from loadtest.lab.residency.site import GIB, Site, counted, file
from loadtest.lab.rows import OnProgress, Row
from loadtest.report.stats import quantile
from loadtest.simulate import vtime

MODEL = Model(weights=6 * GIB, claim=11 * GIB)  # 13.2 s to start; sleeps in 0.84 s and wakes in 0.84 s
ROOM = 26 * GIB  # of each GPU: two models awake and others asleep
PATIENCE = 60.0  # seconds that a caller waits
TURNS = "abc"
ONE = 14 * GIB  # for one of them awake and two asleep
SHORT = 0.4  # seconds of a call
QUICK = 2.5  # seconds of a call that had to wake its model
FASTEST = 60.0 / 1.68  # loads a minute: 1.68 s to make room for a model and to wake it


def turns(progress: OnProgress, scale: float) -> list[Row]:
    """Three models in turn, one call after the other, on memory for two: the worst there is for LRU."""
    count = int(600 * scale)

    async def whole() -> tuple[list[float], float]:
        async with Site(file(TURNS), dict.fromkeys(TURNS, MODEL), ROOM, look_every=5.0) as site:
            calls = []
            for number in range(count):
                call = site.gateways[0].call(TURNS[number % len(TURNS)], 1.0, PATIENCE)
                calls.append(asyncio.ensure_future(call))
                progress("turns", number / count)
                await asyncio.sleep(1.5)
            answers = await asyncio.gather(*calls)
            loads = counted(site, "ready").total() + counted(site, "woken").total()
            return [answer.waited for answer in answers], loads / site.now * 60

    waits, loads = vtime.run(whole())
    return [
        Row(
            name="turns",
            what="3 models in turn on room for 2: loads a minute",
            value=f"{loads:.1f}",
            baseline=f"mean wait {fmean(waits):.1f} s, p99 {quantile(waits, 0.99):.1f} s",
            milestone=f"<= {FASTEST:.1f}",
            met=loads <= FASTEST,
        )
    ]


def rounds(progress: OnProgress, scale: float) -> list[Row]:
    """Three models in turn on a GPU each for two of them, every call as soon as the last has ended: by one caller, who
    has loaded each once before."""
    count = len(TURNS) * max(3, int(30 * scale))

    async def whole() -> list[float]:
        async with Site(file(TURNS, 2), dict.fromkeys(TURNS, MODEL), ONE, ONE) as site:
            for name in TURNS:
                await site.gateways[0].call(name, SHORT)
            waits = []
            for number in range(count):
                waits.append((await site.gateways[0].call(TURNS[number % len(TURNS)], SHORT)).waited)
                progress("rounds", (number + 1) / count)
            return waits

    waits = vtime.run(whole())
    quick = sum(waited + SHORT <= QUICK for waited in waits)
    return [
        Row(
            name="rounds",
            what=f"3 models in turn, no pause, on two GPUs with room for one each: calls ended within {QUICK:g} s",
            value=f"{quick} of {count}",
            baseline=f"longest {max(waits) + SHORT:.1f} s; the first load of each before",
            milestone=">= 7 of 9",
            met=9 * quick >= 7 * count,
        )
    ]
