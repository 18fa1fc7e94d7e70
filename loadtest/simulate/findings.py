"""Findings of simulations in sentences: engines needed, capacity of each policy, whether prefill on other engines pays,
speed of the simulation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from gateway.shared.printable import printable
from loadtest.report.number_format import count, share
from loadtest.report.report import check
from loadtest.report.summary import summarise
from loadtest.simulate.jobs import Done


def kept(done: Done) -> bool:
    """Whether the SLO was kept: at its own rate, or at any rate of a search."""
    if done.capacity is not None:
        return done.capacity.kept > 0.0
    return all(not check(one.run.slos, one.run) for one in done.made)


def answers(done: Sequence[Done], *, traced: bool) -> Iterator[str]:
    """Yield lines on the number of engines needed, or on their capacity, for each policy and baseline. `traced`: rates
    of a search multiply the speed given for the trace."""
    groups: dict[str, list[Done]] = {}
    for one in done:
        groups.setdefault(one.cell.name.partition(", ")[0], []).append(one)
    for name, group in groups.items():
        group.sort(key=lambda one: one.cell.engines)
        if group[0].capacity is not None:
            yield from _capacities(printable(name), group, traced=traced)
        elif group[0].made and group[0].made[0].run.slos:
            yield _enough(printable(name), group)


def bills(done: Sequence[Done]) -> Iterator[str]:
    """Yield a line on the money of each run under a policy with providers."""
    for made in [made for one in done for made in one.made if made.money is not None]:
        said = f"{made.money:.2f} an hour at providers, {count(made.outside)} tokens in all"
        ended = "in time" if made.run.slos else "answered"
        yield f"{printable(made.run.name)}: {said}; {share(summarise(made.run).total.goodput)} of the calls {ended}"


def transfers(done: Sequence[Done]) -> Iterator[str]:
    """Yield a line on each run of `--prefill`, beside the same engines that exchange nothing, which come before it: by
    the calls in time where there is an SLO, else by the mean time of a whole answer, of no fewer calls."""
    for mixed, split in pairwise(done):
        if not split.cell.roles or split.capacity is not None or not (mixed.made and split.made):
            continue
        here, there = (summarise(one.made[0].run).total for one in (mixed, split))
        pays = there.e2e.mean < here.e2e.mean and there.ok >= here.ok
        words = [f"an answer takes {there.e2e.mean:.2f} s on average, {here.e2e.mean:.2f} without"]
        words.append(f"its first token {there.ttft.mean:.2f}, {here.ttft.mean:.2f}")
        words.append(f"one token at p99 {1e3 * there.tpot.p99:.0f} ms, {1e3 * here.tpot.p99:.0f}")
        if split.made[0].run.slos:
            pays = here.goodput < there.goodput
            words.insert(0, f"in time {there.goodput:.1%} of the calls, {here.goodput:.1%} without")
        said = "pays" if pays else "does not pay"
        yield f"{printable(split.cell.name)}: reading prompts elsewhere {said}: {'; '.join(words)}"


def _enough(name: str, group: Sequence[Done]) -> str:
    """Numbers of engines that keep the SLO."""
    offered = count(group[0].made[0].run.rate)
    good = [one.cell.engines for one in group if kept(one)]
    missed = [one for one in group if one.cell.engines not in good]
    if not good:
        most = group[-1]
        if len(group) == 1:
            do = "does" if most.cell.engines == 1 else "do"
            return f"{name}: {_engines(most.cell.engines)} {do} not keep the SLO at {offered}/s: {_why(most)}"
        return f"{name}: none of these numbers of engines keeps the SLO at {offered}/s; {_closest(most)}"
    said = f"{name}: {_engines(min(good))} {'is' if min(good) == 1 else 'are'} enough for the SLO at {offered}/s"
    below = [one for one in missed if one.cell.engines < min(good)]
    if below:
        said += f"; {_closest(below[-1])}"
    odd = [str(one.cell.engines) for one in missed if one.cell.engines > min(good)]
    return said + (f"; and yet it was missed with {', '.join(odd)}" if odd else "")


def _closest(one: Done) -> str:
    return f"with {one.cell.engines}: {_why(one)}"


def _why(one: Done) -> str:
    run = one.made[0].run
    return check(run.slos, run)[0]


def _capacities(name: str, group: Sequence[Done], *, traced: bool) -> Iterator[str]:
    for one in group:
        capacity = one.capacity
        assert capacity is not None  # noqa: S101 # of a search
        unit = " times the speed given" if traced else "/s"
        said = str(capacity).replace("/s", unit)
        each = "" if traced or not capacity.kept else f" ({count(capacity.kept / one.cell.engines)}/s an engine)"
        yield f"{name}, {_engines(one.cell.engines)}: {said}{each}"
    best = max(group, key=lambda one: one.cell.engines)
    wanted = 1.0 if traced else best.cell.scenario.rate
    if best.capacity is not None and best.capacity.kept and wanted:
        needed = math.ceil(wanted * best.cell.engines / best.capacity.kept)
        what = "the trace at the speed given" if traced else f"{count(wanted)}/s"
        yield f"{name}: {what} needs {_engines(needed)}, where each takes as much as one of {best.cell.engines} does"


def speed(done: Sequence[Done], wall: float) -> str:
    """Line that says how fast it was simulated, and in how much memory."""
    made = [simulated for one in done for simulated in one.made]
    calls, cpu = sum(one.calls for one in made), sum(one.cpu for one in made)
    seconds = sum(one.seconds for one in made)
    whole = f"{count(calls)} calls, {_long(seconds)} of virtual time, in {_long(wall)}"
    a_minute = [count(60.0 * calls / max(1e-9, time)) for time in (wall, cpu)]
    most = max((one.memory for one in made), default=0)
    return f"{whole}: {a_minute[0]} calls a minute, {a_minute[1]} a core, with at most {most / 1e6:.0f} MB"


def _long(seconds: float) -> str:
    for size, unit in ((86_400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2.0 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _engines(number: int) -> str:
    return f"{number} engine" if number == 1 else f"{number} engines"
