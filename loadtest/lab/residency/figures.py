"""Rows about residency in virtual time: calls' waits for their models by rule of eviction, and the cost of faults.

One function per row. `eviction_runs.py` has the load and the rules.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from loadtest.lab.residency import copies as copies_runs
from loadtest.lab.residency.callers import CallOutcome
from loadtest.lab.residency.eviction_runs import MODEL, ROOM, WAITED, ResidencyRun, belady, loads_of, lru, run, zipf
from loadtest.lab.residency.faults import TEXT, TOTALS, models, storm
from loadtest.lab.residency.site import GIB, Site, file, opened
from loadtest.lab.rows import OnProgress, Row, percent
from loadtest.report.stats import quantile
from loadtest.simulate import vtime

PATIENCE = 60.0  # seconds of a caller that is told when to come back
TURNS = "abc"
ONE = 14 * GIB  # for one of them awake and two asleep
SHORT = 0.4  # seconds of a call
QUICK = 2.5  # seconds of a call that had to wake its model
ABOUT = 0.5  # seconds by which what is foretold may be off


def shares(seed: int, progress: OnProgress, scale: float) -> list[Row]:
    """Calls that waited for their model, and how long; ours between LRU and Belady."""
    rows = []
    for sleep, what, rate in ((True, "with sleep", 0.5), (False, "without sleep", 0.05)):
        planned = zipf(seed, rate, int(2000 * scale), 2.0)
        ours = run(planned, f"{what}, ours", progress, sleep=sleep)
        best = run(planned, f"{what}, Belady", progress, sleep=sleep, hot=0.0, warmth=belady(planned))
        plain = run(planned, f"{what}, LRU", progress, sleep=sleep, hot=0.0, warmth=lru)
        wide = run(planned, f"{what}, hot 10", progress, sleep=sleep, hot=10.0, warmth=lru)
        base = f"LRU {plain.words()}; Belady {best.words()}"
        rows += [
            Row(
                name="share",
                what=f"{what}: calls that waited for a load, mean wait, p99",
                value=ours.words(),
                baseline=base,
                target="<= LRU and <= 1.25 x Belady (share)",
                milestone="<= 1.05 x LRU",
                met=ours.share <= 1.05 * plain.share,
            ),
            Row(
                name="share",
                what=f"{what}: the mean wait over LRU's; loads a minute",
                value=f"{ours.mean / plain.mean:.2f}; {ours.loads / ours.seconds * 60:.1f}",
                baseline=f"LRU {plain.loads / plain.seconds * 60:.1f}, Belady {best.mean / plain.mean:.2f}; "
                f"LRU kept 10 x the load time {wide.mean / plain.mean:.2f}, {wide.loads / wide.seconds * 60:.1f}",
                target="<= 1",
                milestone="<= 1.05",
                met=ours.mean <= 1.05 * plain.mean,
            ),
        ]
    return rows


async def _in_turn(count: int, label: str, progress: OnProgress, *, sleep: bool) -> tuple[ResidencyRun, Counter[bool]]:
    """`count` calls, and of those that came back when they were told to, how many were served then."""
    back: Counter[bool] = Counter()

    async def caller(site: Site, name: str) -> CallOutcome:
        answer = await site.gateways[0].call(name, 1.0, PATIENCE)
        if answer.ending == "refused":
            await asyncio.sleep(answer.retry_after)
            again = await site.gateways[0].call(name, 1.0, PATIENCE)
            back[again.ending == "served"] += 1
        return answer

    fields = dict.fromkeys(TURNS, "" if sleep else "sleep: null")
    async with opened(file(TURNS, 1, **fields), dict.fromkeys(TURNS, MODEL), ROOM, look_every=5.0) as site:
        calls = []
        for number in range(count):
            calls.append(asyncio.ensure_future(caller(site, TURNS[number % len(TURNS)])))
            progress(label, number / count)
            await asyncio.sleep(1.5)
        answers = await asyncio.gather(*calls)
        return ResidencyRun(answers, loads_of(site), site.now), back


def turns(seed: int, progress: OnProgress, scale: float) -> list[Row]:
    """Three models in turn, one call after the other, on memory for two: the worst there is for LRU."""
    rows = []
    for sleep, what in ((True, "with sleep"), (False, "without sleep")):
        seen, back = vtime.run(_in_turn(int(600 * scale), f"in turn, {what}", progress, sleep=sleep))
        ends = Counter(answer.ending for answer in seen.answers)
        late = [answer for answer in seen.answers if answer.ending == "expired"]
        bound = 60.0 / (1.68 if sleep else 13.8)  # seconds of making room for one and having it
        loads = seen.loads / seen.seconds * 60
        kept = back[True] / back.total() if back else 1.0
        rows += [
            Row(
                name="turns",
                what=f"3 models in turn on room for 2, {what}: loads a minute",
                value=f"{loads:.1f}",
                baseline=f"mean wait {seen.mean:.1f} s, p99 {quantile(seen.waits, 0.99):.1f} s",
                target=f"<= {bound:.1f}: one after the other",
                milestone=f"<= {bound:.1f}",
                met=loads <= bound,
            ),
            Row(
                name="turns",
                what=f"the same: neither answered nor refused within {PATIENCE:g} s; Retry-After that came true",
                value=f"{len(late)}; {percent(kept)} of {back.total()}",
                baseline=", ".join(f"{end} {count}" for end, count in ends.most_common()),
                target="0; >= 80 %",
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
        async with opened(file(TURNS, 2), dict.fromkeys(TURNS, MODEL), ONE, ONE) as site:
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
            target=">= 7 of 9",
            milestone=">= 7 of 9",
            met=9 * quick >= 7 * count,
        ),
        Row(
            name="rounds",
            what=f"the same: waits that were foretold, within {ABOUT:g} s or a quarter",
            value=f"{true} of {len(held)}",
            baseline=f"off by {worst:.1f} s at worst",
            target=">= 80 %",
            milestone=">= 80 %",
            met=true >= 0.8 * len(held),
        ),
    ]


def wakes(seed: int, progress: OnProgress, scale: float) -> list[Row]:
    """What the manager adds to an engine's own wake time, where there is room."""

    async def whole() -> list[float]:
        async with opened(file("a"), {"a": MODEL}, ROOM) as site:
            gateway, added = site.gateways[0], []
            await gateway.call("a", 1.0)
            rng = random.Random(seed)  # noqa: S311 # a workload, no secrets
            for number in range(20):
                await asyncio.sleep(rng.uniform(3.0, 6.0))
                site.manager.orders.give("a", "sleep")
                await site.until("a", "sleeping")
                await asyncio.sleep(rng.uniform(0.0, 1.0))
                before = site.engines.all["a"].waking
                answer = await gateway.call("a", 1.0)
                added.append(answer.waited - (site.engines.all["a"].waking - before))
                progress("wakes", number / 20)
            return added

    added = vtime.run(whole())
    return [
        Row(
            name="wake",
            what="from a call to its engine, beyond the engine's own wake: longest of 20 (without sockets)",
            value=f"{max(added) * 1000:.1f} ms",
            target="<= 150 ms",
            milestone="<= 150 ms",
            met=max(added) <= 0.15,
        )
    ]


def copies(seed: int, progress: OnProgress, _: float) -> list[Row]:
    """A hot model's copy that takes a cold one's place: calls served in time, with and without."""
    # Whole in a short look too: there the time before the first copy is awake would be most of it.
    calls = copies_runs.planned(seed, 1500)
    with_, without = (
        copies_runs.run(calls, f"copies, {'with' if each else 'without'}", progress, copies=each)
        for each in (True, False)
    )
    ratio = with_.goodput / without.goodput
    wakes = with_.woken / with_.seconds * 60
    return [
        Row(
            name="copies",
            what="Zipf calls, one hot model of four, two GPUs: calls served in time a second, with copies",
            value=f"{with_.goodput:.3f}, {ratio:.2f} x",
            baseline=f"without {without.goodput:.3f}; with: {with_.ends()}; without: {without.ends()}",
            target=">= 1.6 x",
            milestone=">= 1.6 x",
            met=ratio >= 1.6,
        ),
        Row(
            name="copies",
            what="the same: copies woken a minute; left over",
            value=f"{wakes:.2f}; {len(with_.left) + len(without.left)}",
            baseline=f"{with_.woken} woken, {with_.gave_place} gave their place back, in {with_.seconds / 60:.0f} min",
            target="<= 2; 0",
            milestone="<= 2; 0",
            met=wakes <= 2.0 and not with_.left and not without.left,
        ),
    ]


def faults(seed: int, progress: OnProgress, scale: float) -> list[Row]:
    """A hundred faults in ten minutes, several times over."""
    runs = max(1, round(5 * scale))
    ends: Counter[str] = Counter()
    wrong: list[str] = []
    left: list[str] = []

    async def whole(number: int) -> None:
        async with opened(TEXT, models(), *TOTALS, gateways=2) as site:
            found = await storm(site, seed + number)
            ends.update(found.answers)
            wrong.extend(found.wrong)
            left.extend((*site.left_over(), *site.machine.overlaps))
        left.extend(f"engine {pid} holds {held}" for pid, held in site.machine.held.items())

    for number in range(runs):
        vtime.run(whole(number))
        progress("faults", (number + 1) / runs)
    told = ", ".join(f"{end} {count}" for end, count in ends.most_common())
    return [
        Row(
            name="faults",
            what=f"{runs} x 100 faults in 10 minutes, {ends.total()} calls: lost or hanging; left over",
            value=f"{len(wrong)}; {len(left)}",
            baseline=f"{told}; broken: their engine was killed or had hung",
            target="0; 0",
            milestone="0; 0",
            met=not wrong and not left,
        )
    ]
