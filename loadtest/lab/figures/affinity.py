"""Value of cache events: conversations that outgrow the engines' caches, routed with and without them.

    python -m loadtest.lab.figures.affinity --help

The whole gateway over simulated engines, in virtual time. Without events the gateway estimates what an engine has
cached by the calls that it has sent there and by the engine's memory. With events it also knows since when everything
used is cached. Events are handed over every EVERY seconds, as vLLM's come with its steps.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator

import msgspec
from rich.console import Console
from rich.table import Table

from gateway.core.engines.cache_age import CacheAge
from gateway.core.engines.fleet import Engine
from loadtest.clients.retries import Clients
from loadtest.engine.cache_log import CacheLog
from loadtest.lab.figures.runs import an_engine
from loadtest.load.lengths import Length, LogNormal
from loadtest.load.plan import poisson
from loadtest.load.workload import Kind, Planned, Prefix, Sessions
from loadtest.simulate import vtime
from loadtest.simulate.inprocess import GatewayTarget
from loadtest.simulate.memory_engine import MemoryEngine
from loadtest.simulate.run_records import RunResult
from loadtest.simulate.simulated_client import Try
from loadtest.simulate.simulation import SimulationRun

EVERY = 0.05  # seconds
ESTIMATE, EVENTS = "estimate", "events"


class ConversationLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Conversations that begin at `rate` per second on engines of so many KV `blocks`; `think`: the median of the
    seconds between two turns, log-normal with `sigma`. `warm` of the `seconds` are not counted."""

    what: str
    blocks: tuple[int, ...]
    rate: float
    think: float
    sigma: float
    said: int = 150
    seconds: float
    warm: float


SCENARIOS = {
    "busy": ConversationLoad(
        what="a busy hour: caches turn over in 15 s",
        blocks=(4096,) * 4, rate=1.8, think=40.0, sigma=1.2, seconds=1000.0, warm=300.0,
    ),
    "uneven": ConversationLoad(
        what="engines of 2,048 to 16,384 blocks: 10 to 40 s",
        blocks=(2048, 2048, 8192, 16_384), rate=1.5, think=40.0, sigma=1.2, seconds=1200.0, warm=400.0,
    ),
    "slow": ConversationLoad(
        what="people who come back after 10 minutes: 10 minutes and more",
        blocks=(16_384,) * 4, rate=0.15, think=600.0, sigma=1.0, said=200, seconds=14_400.0, warm=5000.0,
    ),
}  # fmt: skip


def calls(scenario: ConversationLoad, seed: int) -> Iterator[Planned]:
    """The first turns of conversations whose turns are far apart: log-normal, a few come late and some very late."""
    session = Sessions(turns=Length(geometric=8.5), think=scenario.think, spread=scenario.sigma)
    said = Length(log_normal=LogNormal(scenario.said), least=16)
    kind = Kind(class_name="interactive", prompt=said, output=Length(constant=256), prefix=Prefix(), session=session)
    return poisson((kind,), scenario.rate, scenario.seconds, seed)


class Events:
    """One simulated engine's cache events on their way to what the gateway knows of it."""

    def __init__(self, engine: Engine, memory: MemoryEngine) -> None:
        self._cache_age = engine.cache_age = CacheAge()
        self._cache_age.link(True)
        self._log = memory.engine.scheduler.blocks.log = CacheLog()
        self._loop = asyncio.get_running_loop()
        self._number = 0
        self._tell()

    def _tell(self) -> None:
        now = self._loop.time()
        batch = self._log.batch(now)
        if batch is not None:
            self._cache_age.take((b"", self._number.to_bytes(8), batch), now)
            self._number += 1
        self._loop.call_later(EVERY, self._tell)


def run(scenario: ConversationLoad, mode: str, seed: int) -> RunResult:
    """One scenario, by the estimate alone or with events too."""

    async def main() -> RunResult:
        engines = [an_engine(seed * 100 + number, blocks=blocks) for number, blocks in enumerate(scenario.blocks)]
        target = GatewayTarget(b"", engines, seed=seed)
        if mode == EVENTS:
            for engine, memory in zip(target.gateway.fleet, engines, strict=True):
                Events(engine, memory)
        clients = Clients(retries=0)
        return await SimulationRun(engines, target, calls(scenario, seed), clients=clients, seed=seed).until(
            scenario.seconds
        )

    return vtime.run(main())


def hits(tries: list[Try]) -> float:
    """Cached over prompt tokens, by the engines' own count."""
    return sum(tried.cached_tokens for tried in tries) / max(1, sum(tried.prompt_tokens for tried in tries))


def main(argv: list[str] | None = None) -> int:
    """Print the table; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.lab.figures.affinity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenarios", nargs="*", default=list(SCENARIOS), help=f"of {', '.join(SCENARIOS)} (all)")
    parser.add_argument("--seed", type=int, default=1, help="of traffic, engines and the gateway (1)")
    given = parser.parse_args(argv)
    if unknown := [name for name in given.scenarios if name not in SCENARIOS]:
        parser.error(f"there is no scenario {', '.join(unknown)}; one of {', '.join(SCENARIOS)}")
    table = Table("scenario", "believed by", "calls", "prefix hits", "ttft mean", "p50", "p90", "p99", "CPU")
    for name in given.scenarios:
        scenario = SCENARIOS[name]
        for mode in (ESTIMATE, EVENTS):
            began = time.process_time()
            tries = run(scenario, mode, given.seed).tries
            done = [tried for tried in tries if tried.outcome == "ok" and tried.sent >= scenario.warm]
            ttft = sorted(tried.first_byte - tried.sent for tried in done)
            times = [sum(ttft) / len(ttft), *(ttft[int(len(ttft) * share)] for share in (0.5, 0.9, 0.99))]
            cells = [f"{1000.0 * seconds:.0f} ms" for seconds in times]
            cpu = f"{time.process_time() - began:.0f} s"
            table.add_row(scenario.what, mode, str(len(done)), f"{hits(done):.1%}", *cells, cpu)
        table.add_section()
    Console(width=max(160, Console().width)).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
