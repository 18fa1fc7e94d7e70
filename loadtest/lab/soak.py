"""Everything at once in real time: `python -m loadtest.lab.soak --help`.

A gateway and simulated engines in processes, three times the load they can carry, clients that leave, a policy that is
saved every two seconds (every third time with a mistake), an engine killed every thirty, and in between engines that
fail in the ways that `loadtest/engine/faults.py` knows. In the end everything is counted three times: by the clients,
the metrics and the log. What was late is told by what it met.

Exit status 0: all counts agree and nothing is left; 1: not so; 2: bad arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from rich.table import Table

from loadtest.clients.retries import Clients
from loadtest.lab.figures.runs import MIX, PROFILE, Setting, in_time
from loadtest.lab.realtime import Loop, Sockets
from loadtest.lab.rows import percent, terminal
from loadtest.load.plan import poisson
from loadtest.load.workload import Planned
from loadtest.processes import Child, Gateway, samples, until
from loadtest.simulate.inprocess import targets_of
from loadtest.simulate.simulated_client import Life, Try
from loadtest.simulate.simulation import SimulationRun

ENGINES = 3
BLOCKS = 1024  # KV blocks of each: few calls at a time, so that two cores are enough for all of it
SWEEP = (16, 24)  # clients an engine, of whom the best are the capacity
OVERLOAD = 3.0
LEAVES = 0.1  # of all clients
RELOADS, KILLS, FAULTS = 2.0, 30.0, 7.0  # seconds between two
DOWN, FAULTY = 3.0, 3.0  # seconds
DRAINED = 20.0  # seconds for what is open at the end
CAUSES = ("kills", "cancels", "reloads", "faults")
POLICY = "version: 1\nlogging: {calls: 100%%}\nclasses:\n" + "\n".join((
    "  interactive: {weight: 8, ttft: 2s, deadline: 60s, max_queue: %d}",
    "  default: {weight: 4, ttft: 10s, deadline: 5m, max_queue: 512}",
    "  batch: {weight: 1, deadline: 1h, max_queue: 4096}",
))  # fmt: skip
SICK: tuple[dict[str, float], ...] = (
    {"errors": 0.2, "status": 503}, {"die_before_headers": 0.2}, {"slow": 3.0}, {"die_mid_stream": 0.1},
    {"truncate": 0.1}, {"error_mid_stream": 0.1}, {"garbage": 0.1}, {"errors": 0.2, "status": 429},
)  # fmt: skip
AWAY = ("left", "timed_out", "unfinished")  # clients that do not hear how their call ends


class Met(msgspec.Struct, frozen=True):
    """Something that befell an engine, from when to when, in seconds of the run."""

    what: str
    engine: str
    since: float
    until: float


class Tagged:
    """Sends every try under an id of its own."""

    def __init__(self, url: str) -> None:
        self._sockets = Sockets([url])
        self.tries: dict[str, Try] = {}

    def send(self, call: Planned, attempt: Life, tried: Try) -> Callable[[], None]:
        id = f"soak-{len(self.tries)}"
        self.tries[id] = tried
        fields = call.fields | {b"x-request-id": id.encode()}
        return self._sockets.send(msgspec.structs.replace(call, fields=fields), attempt, tried)


class SoakSite:
    """The processes, and what befalls them."""

    def __init__(self, folder: Path, engines: int, seed: int) -> None:
        self.met: list[Met] = []
        self._folder = folder
        self._seed = seed
        self._started = 0
        self._children = [self._engine(number, 0) for number in range(engines)]
        self.urls = [child.line(r"^ready (http://\S+)", 30.0) for child in self._children]
        self.file = folder / "policy.yaml"
        self.save(256)
        words = [word for url in self.urls for word in ("--engine", url)]
        self.log = folder / "calls.log"
        self.gateway = Gateway(folder / "gateway", *words, "--policy", str(self.file), "--log", str(self.log))

    def _engine(self, number: int, port: int) -> Child:
        self._started += 1
        argv = [sys.executable, "-m", "loadtest.engine", "--port", str(port), "--profile", PROFILE, "--seed",
                str(self._seed * 100 + self._started), "--num-gpu-blocks", str(BLOCKS)]  # fmt: skip
        return Child(f"engine-{number}", argv, self._folder / f"engine-{number}-{self._started}")

    def save(self, queue: int) -> None:
        """A policy; one with a mistake where there is no room in the queue at all."""
        self.file.write_text(POLICY % queue if queue else POLICY % 1 + "\nno_such_field: 1\n")

    def close(self) -> None:
        self.gateway.child.stop()
        for child in self._children:
            child.kill()

    async def kills(self) -> None:
        """SIGKILL for one engine after the other, which is back on its port after a moment."""
        for number in cycle(range(len(self.urls))):
            await asyncio.sleep(KILLS - DOWN)
            self._met("killed", number, DOWN)
            self._children[number].kill()
            await asyncio.sleep(DOWN)
            self._children[number] = self._engine(number, urlsplit(self.urls[number]).port or 0)

    async def reloads(self) -> None:
        """Policies that differ a little, and every third with a mistake."""
        for queue in cycle((255, 0, 256)):
            await asyncio.sleep(RELOADS)
            self.save(queue)

    async def faults(self) -> None:
        """Engines that fail for some seconds, each in turn and in every way in turn."""
        for number, sick in zip(cycle(reversed(range(len(self.urls)))), cycle(SICK), strict=False):
            await asyncio.sleep(FAULTS - FAULTY)
            if await asyncio.to_thread(_post, self.urls[number], sick):  # else it is dead just now
                self._met(next(iter(sick)), number, FAULTY)
                await asyncio.sleep(FAULTY)
                await asyncio.to_thread(_post, self.urls[number], {})

    def _met(self, what: str, number: int, seconds: float) -> None:
        now = asyncio.get_running_loop().time()
        self.met.append(Met(what, self.urls[number].partition("://")[2], now, now + seconds))

    def state(self) -> tuple[int, int]:
        """Open descriptors and resident memory (KiB) of the gateway."""
        process = Path(f"/proc/{self.gateway.child.process.pid}")
        own = next(int(line.split()[1]) for line in (process / "status").read_text().splitlines() if "VmRSS" in line)
        return len(list((process / "fd").iterdir())), own

    def records(self) -> dict[str, dict[str, Any]]:
        """The log's lines by request id."""
        return {line["request_id"]: line for line in map(json.loads, self.log.read_text().splitlines())}

    def settled(self) -> bool:
        """Whether nothing is held, and all that was counted is in the log."""
        return self.gateway.idle() and self.gateway.total("weir_requests_total") == self.log.read_bytes().count(b"\n")


def _post(url: str, faults: dict[str, float]) -> bool:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=5.0)
    try:
        connection.request("POST", "/_faults", json.dumps(faults), {"content-type": "application/json"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


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
