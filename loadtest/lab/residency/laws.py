"""Laws of the sidecar on random machines in virtual time, whatever its estimates miss and whatever goes wrong.

- No model has something pending that nobody does (`Site.wrong`).
- A call has whatever failed started again, within hours; what is refused for its size is too large.
- A start that failed for memory is not repeated at once in the same place with the same claim, but by a new sidecar.
- No start begins where less is free than its claim; no GPU is promised twice, and none is ever overfull.
- No engine that has calls is ended, but after it has failed itself or by order.
- Every call ends, and is sent to no engine that does not serve.
- In the end nothing is held by nobody.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import msgspec

from loadtest.lab.residency.faults import MORE_KINDS, storm
from loadtest.lab.residency.random_machine import RandomMachine, drawn
from loadtest.lab.residency.residents import TriedStart
from loadtest.lab.residency.site import GIB, Site
from loadtest.lab.seeds import explore
from loadtest.simulate import vtime
from sidecar.core.lifecycle import FIRST_REST

SECONDS = 400.0  # of faults
EVENTS = 25
RATE = 0.15  # calls a second
HAD_WITHIN = 2 * 3600.0  # seconds in which calls must have a model that failed
LOOK_EVERY = 0.5  # seconds


class MachineLife(msgspec.Struct, frozen=True):
    """Life of one machine: `wrong`: what broke a law, empty: nothing. `calls` by ending, `failures` of starts by kind,
    `starts` in all; `refused`: models that are too large."""

    seed: int
    wrong: tuple[str, ...] = ()
    calls: dict[str, int] = {}
    failures: dict[str, int] = {}
    starts: int = 0
    refused: int = 0


def repeated(starts: Iterable[TriedStart], asked: Iterable[float]) -> list[TriedStart]:
    """Starts of one model that failed for memory, and whose next was the same in the same place and failed so too,
    without anybody having `asked` for that. Where the GPU was full, the same claim is right once more is free."""
    return [
        before
        for before, after in pairwise(starts)
        if before.failed in MEMORY
        and after.failed in MEMORY
        and after.at < before.at + FIRST_REST
        and before.gpus == after.gpus
        and before.size.starts_as(after.size)
        and not (before.failed in FULL and after.free > before.left)
        and not any(before.at <= at <= after.at for at in asked)
    ]


FULL = frozenset(("free_memory_too_low", "oom"))  # the share was not there, or what is taken beside it
MEMORY = FULL | {"kv_too_small", "no_kv", "mamba_blocks"}


async def _lived(machine: RandomMachine, log: list[tuple[float, str]]) -> MachineLife:
    async with Site(
        machine.text,
        machine.models,
        *machine.totals,
        gateways=machine.gateways,
        host_memory=machine.host_memory,
        look_every=LOOK_EVERY,
        listing=machine.listing,
    ) as site:
        site.log = log
        found = await storm(site, machine.seed, events=EVENTS, seconds=SECONDS, rate=RATE, orders=True, of=MORE_KINDS)
        wrong = [*found.wrong]
        for name in machine.models:
            wrong += await had(site, machine, name, HAD_WITHIN)
        await asyncio.sleep(FIRST_REST)
        wrong += [*site.left_over(), *site.machine.overlaps, *site.machine.crowded, *site.machine.cut_off]
        for name in machine.models:
            starts = [each for each in site.engines.tried if each.profile == name]
            wrong += [
                f"{each.at:.1f} s: {name} failed with {each.failed} on GPU {each.gpus}, claiming "
                f"{each.size.claim / GIB:.2f} GiB, and was started so again"
                for each in repeated(starts, [at for at, each in site.asked if each == name])
            ]
        refused = sum(bool(entry.unusable) for entry in site.manager.entries.values())
    wrong += [f"process {pid} holds {held} in the end" for pid, held in site.machine.held.items()]
    full = zip(site.machine.most_used, machine.totals, strict=True)
    wrong += [f"{used} bytes of a GPU of {total} were taken" for used, total in full if used > total]
    return MachineLife(
        seed=machine.seed,
        wrong=tuple(wrong),
        calls=dict(found.answers),
        failures=dict(Counter(each.failed for each in site.engines.tried if each.failed)),
        starts=len(site.engines.tried),
        refused=refused,
    )


async def had(site: Site, machine: RandomMachine, name: str, within: float) -> list[str]:
    """Have a model by calls that come back when they are told to, `within` so many seconds; what is wrong with that."""
    until, gateway = site.now + within, site.gateways[0]
    while site.now < until:
        answer = await gateway.call(name, 1.0, 600.0)
        if answer.ending == "served":
            return []
        if site.entry(name).unusable and machine.too_large(name):
            return []
        await asyncio.sleep(max(5.0, answer.retry_after))
    why = site.report(name).message
    return [f"no call has {name} within {within:g} s ({why}): {site.state()}"]


def lived(seed: int, log: list[tuple[float, str]] | None = None) -> MachineLife:
    """The life of one seed's machine. Whatever it raises is wrong, and is told with its seed. `log` gets what the
    sidecar said."""
    try:
        return vtime.run(_lived(drawn(seed), [] if log is None else log))
    except Exception as error:  # whatever a seed raises is what was looked for
        return MachineLife(seed=seed, wrong=(f"the simulation failed: {error!r}",))


def lives(seeds: range) -> list[MachineLife]:
    """Lives of these seeds."""
    return [lived(seed) for seed in seeds]


def survey(seeds: range) -> int:
    """Look at the machines of these seeds, on every core, and name those on which a law was broken. The exit status."""
    found: list[MachineLife] = []
    for _, more in explore(seeds, os.cpu_count() or 1, lives):
        found += more
        print(f"\r{len(found)} of {len(seeds)} machines", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    calls = sum((Counter(life.calls) for life in found), Counter[str]())
    starts, failures = sum(life.starts for life in found), sum(sum(life.failures.values()) for life in found)
    broken = sorted((life.seed, life.wrong[0]) for life in found if life.wrong)
    for seed, wrong in broken:
        print(f"--machine {seed}: {wrong}")
    ends = ", ".join(f"{count} {ending}" for ending, count in calls.most_common())
    print(f"{starts} starts, {failures} failed; {calls.total()} calls: {ends}")
    print(f"{len(found)} random machines, a law was broken on {len(broken)}")
    return 1 if broken else 0


def replay(seed: int) -> int:
    """Print one seed's machine and all that its sidecar said. The exit status: 1 where a law was broken."""
    log: list[tuple[float, str]] = []
    machine, life = drawn(seed), lived(seed, log)
    totals = ", ".join(f"{total / GIB:.1f}" for total in machine.totals)
    print(f"{machine.text}GPUs of {totals} GiB; pids that NVML tells: {machine.listing}")
    print("\n".join(f"{name}: {model}" for name, model in machine.models.items()))
    print("\n".join(f"{at:9.1f} {line}" for at, line in log))
    print("\n".join(life.wrong) or "every law held")
    return 1 if life.wrong else 0
