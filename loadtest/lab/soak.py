"""Soak test in real time, with everything at once: `python -m loadtest.lab.soak --help`.

A gateway and simulated engines in processes, three times the load they can carry, clients that leave, a policy that is
saved every two seconds (every third time with a mistake), an engine killed every thirty, and in between engines that
fail in the ways that `loadtest/engine/faults.py` knows. In the end everything is counted three times: by the clients,
the metrics and the log. What was late is told by what it met.

Exit status 0: all counts agree and nothing is left; 1: not so; 2: bad arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from loadtest.clients.retries import Clients
from loadtest.lab.figures.runs import MIX, Setting, in_time
from loadtest.lab.realtime import Loop, Sockets
from loadtest.lab.rows import percent, terminal
from loadtest.lab.soak_site import BLOCKS, Met, SoakSite
from loadtest.load.plan import poisson
from loadtest.load.workload import Planned
from loadtest.processes import samples, until
from loadtest.simulate.inprocess import targets_of
from loadtest.simulate.simulated_client import ClientCall, Try
from loadtest.simulate.simulation import SimulationRun

ENGINES = 3
SWEEP = (16, 24)  # clients an engine, of whom the best are the capacity
OVERLOAD = 3.0
LEAVES = 0.1  # of all clients
DRAINED = 20.0  # seconds for what is open at the end
CAUSES = ("kills", "cancels", "reloads", "faults")
AWAY = ("left", "timed_out", "unfinished")  # clients that do not hear how their call ends


class Tagged:
    """Sends every try under an id of its own."""

    def __init__(self, url: str) -> None:
        self._sockets = Sockets([url])
        self.tries: dict[str, Try] = {}

    def send(self, call: Planned, client_call: ClientCall, tried: Try) -> Callable[[], None]:
        id = f"soak-{len(self.tries)}"
        self.tries[id] = tried
        fields = call.fields | {b"x-request-id": id.encode()}
        return self._sockets.send(msgspec.structs.replace(call, fields=fields), client_call, tried)


def cause(tried: Try, record: dict[str, Any], met: Sequence[Met]) -> str:
    """What an admitted try that was not in time has met, the nearest first."""
    during = [each for each in met if each.since <= tried.finished and each.until >= tried.sent]
    own = [each.what for each in during if each.engine == record.get("engine")]
    cut = tried.outcome != "ok"
    if cut and own:
        return f"answer cut: {own[-1]}"
    if cut:
        return "answer cut"
    if record.get("attempts", 0) > 1:
        return "moved to another engine"
    return f"engine was {own[-1]}" if own else "another engine failed" if during else "nothing"


async def _run(site: SoakSite, options: argparse.Namespace, rate: float) -> tuple[Tagged, list[tuple[int, int]], int]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)  # noqa: S101 # `main` made it
    loop.begin()
    targets = targets_of(b"")
    patience = {name: target.deadline for name, target in targets.items()}
    leaves = 0.0 if "cancels" in options.without else LEAVES
    target = Tagged(site.gateway.url)
    states = [site.state()]
    run = SimulationRun([], target, poisson(MIX, rate, options.seconds, options.seed), seed=options.seed,
              clients=Clients(patience=patience, leaves=leaves))  # fmt: skip
    chaos: list[Callable[[], Coroutine[Any, Any, None]]] = [site.kills, site.reloads, site.faults]
    tasks = [loop.create_task(each()) for each in chaos if each.__name__ not in options.without]
    loop.call_at(options.seconds / 2, lambda: states.append(site.state()))
    result = await run.until(options.seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.to_thread(until, site.settled, DRAINED)
    states.append(site.state())
    return target, states, result.calls


def report(site: SoakSite, target: Tagged, states: list[tuple[int, int]], calls: int) -> Iterator[Table | str]:
    """The tables; a line of text is something wrong."""
    targets, records = targets_of(b""), site.records()
    counted: Counter[str] = Counter()
    for labels, value in samples(f"{site.gateway.control}/metrics", "weir_requests_total"):
        counted[labels["outcome"]] += int(value)
    logged = Counter(record["outcome"] for record in records.values())
    told = Counter(tried.outcome for tried in target.tries.values() if tried.outcome not in AWAY)
    heard = Counter(
        records[id]["outcome"] for id, tried in target.tries.items() if tried.outcome not in AWAY and id in records
    )
    counts = Table(
        "outcome",
        "clients",
        "log, of those",
        "log, all",
        "metrics",
        title=f"{len(target.tries)} tries of {calls} calls",
    )
    for name in sorted(counted.keys() | logged.keys() | told.keys()):
        counts.add_row(name, str(told[name]), str(heard[name]), str(logged[name]), str(counted[name]))
    yield counts
    if counted != logged:
        yield "the metrics have not counted what the log has"
    if len(records) != site.log.read_bytes().count(b"\n"):
        yield "a request id is in the log more than once"
    for id, tried in target.tries.items():
        seen = records.get(id, {}).get("outcome")
        if tried.outcome not in AWAY and seen != tried.outcome:
            yield f"{id}: its client saw {tried.outcome}, the log says {seen}"
    late = Table("class", "admitted", "not in time", "answers late", "by what they met")
    for name in targets:
        own = [(id, tried) for id, tried in target.tries.items() if tried.class_name == name and tried.upstream]
        own = [(id, tried) for id, tried in own if tried.outcome not in ("left", "unfinished")]
        bad = [(tried, cause(tried, records.get(id, {}), site.met)) for id, tried in own if not in_time(tried, targets)]
        whole = sum(tried.outcome == "ok" for tried, _ in bad)
        if own:
            by = ", ".join(f"{why} {count}" for why, count in Counter(why for _, why in bad).most_common())
            late.add_row(name, str(len(own)), percent(len(bad) / len(own)), percent(whole / len(own)), by)
    yield late
    gateway = Table("gateway", "descriptors", "memory", "held, in flight")
    for when, (descriptors, memory) in zip(("at first", "in the middle", "at the end"), states, strict=True):
        held = "nothing" if site.gateway.idle() else "something"
        gateway.add_row(when, str(descriptors), f"{memory / 1024:.0f} MiB", held if when == "at the end" else "")
    yield gateway
    if not site.gateway.idle():
        yield f"the gateway still holds something {DRAINED:g} s after its last client left"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Exits with status 2 where it cannot be understood."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.lab.soak",
        description="A gateway under three times the load, while engines die and fail, clients leave and the policy is "
        "saved again and again; everything is counted by clients, metrics and log, and lateness is told by its cause.",
    )
    parser.add_argument("--seconds", type=float, default=480.0, help="how long (default: 480)")
    parser.add_argument("--without", default="", metavar="LIST", help=f"leave some out: {', '.join(CAUSES)}")
    parser.add_argument("--seed", type=int, default=1, help="of the traffic (default: 1)")
    given = parser.parse_args(argv)
    given.without = [name for name in given.without.split(",") if name]
    if given.seconds <= 0.0 or not set(given.without) <= set(CAUSES):
        parser.error(f"--seconds is more than 0, and --without has some of: {', '.join(CAUSES)}")
    return given


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; the exit status."""
    options = arguments(argv)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # a try is a connection
    console = terminal()
    capacity = Setting(engines=ENGINES, blocks=BLOCKS, sweep=SWEEP, warm=20.0, measured=30.0, known={}).saturated()
    console.print(f"{ENGINES} engines, {OVERLOAD * capacity.calls:.1f} calls/s, {options.seconds:g} s")
    with tempfile.TemporaryDirectory() as folder:
        site = SoakSite(Path(folder), ENGINES, options.seed)
        try:
            with asyncio.Runner(loop_factory=Loop) as runner:
                found = runner.run(_run(site, options, OVERLOAD * capacity.calls))
            told = list(report(site, *found))
        finally:
            site.close()
    for each in told:
        console.print(f"[red]{each}[/]" if isinstance(each, str) else each)
    return 1 if any(isinstance(each, str) for each in told) else 0


if __name__ == "__main__":
    sys.exit(main())
