"""Storm of faults on a machine with models: minutes in virtual time, from a seed.

What must hold meanwhile: a call ends within its patience and what its engine needs; it is cut off only where its
engine was harmed; nothing is sent to an engine that does not serve, but by a gateway that was told nothing. What must
hold afterwards is `Site.left_over`.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from loadtest.engine.vllm_lines import VLLM_LINES, line
from loadtest.lab.residency.callers import CallOutcome, ModelCallers
from loadtest.lab.residency.machine import MachineFaults
from loadtest.lab.residency.site import Site
from sidecar.residency.orders import Refused

FORGIVEN = 15.0  # seconds after it was cut off for which a gateway may be wrong
HANG = 30.0  # seconds for which a call may hang with its engine: until that is found out, and it is ended
ORDERS = ("sleep", "stop", "off", "on", "ensure")
KINDS = (
    "kill", "kill", "kill", "hang", "fail_start", "fail_wake", "fail_sleep", "keep_asleep", "oom", "cut", "driver",
    "kept", "slow", "copy", *ORDERS,
)  # fmt: skip
MORE_KINDS = (
    *KINDS,
    *("fail_line", "changed", "hang_start", "silent_start", "others", "others"),
    *("restart", "crash", "hang_wake", "hang_sleep"),
)
OTHERS = 7  # the process that takes GPU memory and is no engine's


class Storm(msgspec.Struct):
    """Outcome of the storm: `answers` by ending; `wrong`: calls for which something did not hold; `events` by kind."""

    answers: Counter[str] = msgspec.field(default_factory=Counter)
    wrong: list[str] = msgspec.field(default_factory=list)
    events: Counter[str] = msgspec.field(default_factory=Counter)


async def storm(
    site: Site,
    seed: int,
    *,
    events: int = 100,
    seconds: float = 600.0,
    rate: float = 0.5,
    patience: float = 60.0,
    orders: bool = False,
    of: Sequence[str] = KINDS,
) -> Storm:
    """Cause `events` faults of the kinds `of` at random moments, with `rate` calls a second. `orders`: operators give
    orders as well. Afterwards the faults are over, every call has ended, and the site is quiet for a while."""
    rng = random.Random(seed)  # noqa: S311 # repeatable, not secret
    found = Storm()
    kinds = [kind for kind in of if orders or kind not in ORDERS]
    moments = sorted(rng.uniform(0.0, seconds) for _ in range(events))
    blind = {gateway.name: -FORGIVEN for gateway in site.gateways}
    begin = site.now
    calls = asyncio.ensure_future(_traffic(site, rng, found, blind, begin + seconds, rate, patience))
    for moment in moments:
        await asyncio.sleep(max(0.0, begin + moment - site.now))
        kind = rng.choice(kinds)
        found.events[kind] += 1
        if kind in ("restart", "crash"):
            await site.restart(killed=kind == "crash")
        else:
            _harm(site, kind, rng, blind)
    await calls
    _calm(site)
    await asyncio.sleep(120.0)
    return found


def _harm(site: Site, kind: str, rng: random.Random, blind: dict[str, float]) -> None:
    faults, loop = site.machine.faults, asyncio.get_running_loop()
    name = rng.choice(list(site.manager.entries))
    lasts = rng.uniform(1.0, 20.0)
    if kind in ("kill", "hang"):
        living = [engine for engine in site.engines.all.values() if engine.alive_now]
        if living and kind == "kill":
            rng.choice(living).kill()
        elif living:
            rng.choice(living).hung = True
    elif kind == "cut":
        gateway = rng.choice(site.gateways)
        gateway.cut = True
        blind[gateway.name] = max(blind[gateway.name], site.now + lasts)
        loop.call_later(lasts, setattr, gateway, "cut", False)
    elif kind == "copy":
        for gateway in site.gateways:
            gateway.copies.add(name)
            loop.call_later(3 * lasts, gateway.copies.discard, name)
    elif kind in ("driver", "kept", "slow"):
        value, calm = {"driver": ("it hangs", ""), "kept": (lasts, 0.0), "slow": (rng.uniform(0.0, 2.0), 0.0)}[kind]
        setattr(faults, kind, value)
        loop.call_later(lasts, setattr, faults, kind, calm)
    elif kind in ORDERS:
        give(site, name, kind)
    elif kind == "others":
        gpu = rng.randrange(len(site.machine.totals))
        site.machine.others_take(OTHERS + gpu, gpu, int(rng.uniform(0.0, 0.6) * site.machine.totals[gpu]))
        loop.call_later(10 * lasts, site.machine.others_take, OTHERS + gpu, gpu, 0)
    elif kind == "fail_line":
        faults.fail_line = line(rng.choice(VLLM_LINES.other_causes))
        faults.fail_start += 1
    elif kind == "silent_start":
        faults.silent = rng.uniform(60.0, 240.0)
        faults.silent_start += 1
    else:
        setattr(faults, kind, getattr(faults, kind) + 1)


def give(site: Site, name: str, what: str) -> bool:
    """An order of a person; False: it is refused."""
    try:
        if what == "ensure":
            site.asked.append((site.now, name))
            site.manager.orders.ensure(name)
        else:
            site.manager.orders.give(name, what)  # type: ignore[arg-type] # one of its words
    except Refused:
        return False
    return True


def _calm(site: Site) -> None:
    site.machine.faults = MachineFaults()
    for gpu in range(len(site.machine.totals)):
        site.machine.held.pop(OTHERS + gpu, None)
    for gateway in site.gateways:
        gateway.cut = False
    for name, entry in site.manager.entries.items():
        if entry.off:
            site.manager.orders.give(name, "on")


async def _traffic(
    site: Site, rng: random.Random, found: Storm, blind: dict[str, float], ends: float, rate: float, patience: float
) -> None:
    async def one(gateway: ModelCallers, name: str, seconds: float) -> None:
        began = site.now
        try:
            async with asyncio.timeout(patience + seconds + HANG):
                answer = await gateway.call(name, seconds, patience)
        except TimeoutError:
            found.answers["hangs"] += 1
            found.wrong.append(f"{began:.1f} s: a call of {name} hangs: {site.state()}")
            return
        found.answers[answer.ending] += 1
        why = _why(answer)
        if why and site.now >= blind[gateway.name] + FORGIVEN:
            found.wrong.append(f"{began:.1f} s: a call of {name} {why} at {site.now:.1f} s: {site.state()}")

    calls = []
    names = list(site.manager.entries)
    weights = [6, 4, 3, 1, 2, 2][: len(names)]
    while site.now < ends:
        name = rng.choices(names, weights)[0]
        calls.append(asyncio.ensure_future(one(rng.choice(site.gateways), name, rng.expovariate(1 / 3))))
        await asyncio.sleep(rng.expovariate(rate))
    await asyncio.gather(*calls)


def _why(answer: CallOutcome) -> str:
    """Reason why a call should not have ended so; empty: none."""
    if answer.ending == "astray":
        return "was sent to an engine that does not serve"
    return "was cut off by its sidecar" if answer.how == "SIGTERM" else ""
