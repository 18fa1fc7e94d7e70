"""Rows about residency in virtual time: waits for models that take turns on too little memory. One function a row."""

from __future__ import annotations

import asyncio
from collections import Counter
from statistics import fmean

import msgspec

from loadtest.lab.residency.callers import CallOutcome
from loadtest.lab.residency.residents import Model
from loadtest.lab.residency.site import GIB, Site, counted, file
from loadtest.lab.rows import OnProgress, Row, percent
from loadtest.report.stats import quantile
from loadtest.simulate import vtime

MODEL = Model(weights=6 * GIB, claim=11 * GIB)  # 13.2 s to start; sleeps in 0.84 s and wakes in 0.84 s
ROOM = 26 * GIB  # of each GPU: two models awake and others asleep
WAITED = 0.01  # seconds: less is no load
PATIENCE = 60.0  # seconds of a caller that is told when to come back
TURNS = "abc"
ONE = 14 * GIB  # for one of them awake and two asleep
SHORT = 0.4  # seconds of a call
QUICK = 2.5  # seconds of a call that had to wake its model
ABOUT = 0.5  # seconds by which what is foretold may be off


class TurnsRun(msgspec.Struct):
    """Answers of one run, models that were loaded (started or woken) a minute, and which retries were served."""

    answers: list[CallOutcome]
    loads: float
    back: Counter[bool]

    @property
    def waits(self) -> list[float]:
        return [answer.waited for answer in self.answers]


async def _in_turn(count: int, label: str, progress: OnProgress, *, sleep: bool) -> TurnsRun:
    """Make `count` calls, and again each that was refused, once its Retry-After has passed."""
    back: Counter[bool] = Counter()

    async def caller(site: Site, name: str) -> CallOutcome:
        answer = await site.gateways[0].call(name, 1.0, PATIENCE)
        if answer.ending == "refused":
            await asyncio.sleep(answer.retry_after)
            again = await site.gateways[0].call(name, 1.0, PATIENCE)
            back[again.ending == "served"] += 1
        return answer

    fields = dict.fromkeys(TURNS, "" if sleep else "sleep: null")
    async with Site(file(TURNS, 1, **fields), dict.fromkeys(TURNS, MODEL), ROOM, look_every=5.0) as site:
        calls = []
        for number in range(count):
            calls.append(asyncio.ensure_future(caller(site, TURNS[number % len(TURNS)])))
            progress(label, number / count)
            await asyncio.sleep(1.5)
        answers = await asyncio.gather(*calls)
        loads = counted(site, "ready").total() + counted(site, "woken").total()
        return TurnsRun(answers, loads / site.now * 60, back)


def turns(seed: int, progress: OnProgress, scale: float) -> list[Row]:
    """Three models in turn, one call after the other, on memory for two: the worst there is for LRU."""
    rows = []
    for sleep, what in ((True, "with sleep"), (False, "without sleep")):
        seen = vtime.run(_in_turn(int(600 * scale), f"in turn, {what}", progress, sleep=sleep))
        ends = Counter(answer.ending for answer in seen.answers)
        late = [answer for answer in seen.answers if answer.ending == "expired"]
        bound = 60.0 / (1.68 if sleep else 13.8)  # seconds of making room for one and having it
        kept = seen.back[True] / seen.back.total() if seen.back else 1.0
        rows += [
            Row(
                name="turns",
                what=f"3 models in turn on room for 2, {what}: loads a minute",
                value=f"{seen.loads:.1f}",
                baseline=f"mean wait {fmean(seen.waits):.1f} s, p99 {quantile(seen.waits, 0.99):.1f} s",
                milestone=f"<= {bound:.1f}",
                met=seen.loads <= bound,
            ),
            Row(
                name="turns",
                what=f"the same: neither answered nor refused within {PATIENCE:g} s; Retry-After that came true",
                value=f"{len(late)}; {percent(kept)} of {seen.back.total()}",
                baseline=", ".join(f"{end} {count}" for end, count in ends.most_common()),
                milestone="0; >= 80 %",
                met=not late and kept >= 0.8,
            ),
        ]
    return rows


def rounds(seed: int, progress: OnProgress, scale: float) -> list[Row]:
    """Three models in turn on a GPU each for two of them, every call as soon as the last has ended: by one caller, who
    has loaded each once before; and whether what was foretold came true."""
    count = len(TURNS) * max(3, int(30 * scale))

    async def whole() -> list[CallOutcome]:
        async with Site(file(TURNS, 2), dict.fromkeys(TURNS, MODEL), ONE, ONE) as site:
            for name in TURNS:
                await site.gateways[0].call(name, SHORT)
            answers = []
            for number in range(count):
                answers.append(await site.gateways[0].call(TURNS[number % len(TURNS)], SHORT))
                progress("rounds", (number + 1) / count)
            return answers

    answers = vtime.run(whole())
    quick = sum(answer.waited + SHORT <= QUICK for answer in answers)
    held = [(answer.foretold, answer.waited) for answer in answers if answer.waited > WAITED]
    true = sum(abs(foretold - waited) <= max(ABOUT, waited / 4) for foretold, waited in held)
    worst = max((abs(foretold - waited) for foretold, waited in held), default=0.0)
    return [
        Row(
            name="rounds",
            what=f"3 models in turn, no pause, on two GPUs with room for one each: calls ended within {QUICK:g} s",
            value=f"{quick} of {count}",
            baseline=f"longest {max(answer.waited for answer in answers) + SHORT:.1f} s; the first load of each before",
            milestone=">= 7 of 9",
            met=9 * quick >= 7 * count,
        ),
        Row(
            name="rounds",
            what=f"the same: waits that were foretold, within {ABOUT:g} s or a quarter",
            value=f"{true} of {len(held)}",
            baseline=f"off by {worst:.1f} s at worst",
            milestone=">= 80 %",
            met=true >= 0.8 * len(held),
        ),
    ]
