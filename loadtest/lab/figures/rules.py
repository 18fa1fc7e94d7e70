"""Weir with no policy beside the rules of its rivals, on the same engines and loads, in virtual time.

    python -m loadtest.lab.figures.rules agents-tight agents-ample claude-code
    python -m loadtest.lab.figures.rules trace --trace FILE --speed 2 --seconds 600

Four simulated engines, an H100 with an 8B model each. The loads:

    agents-tight  20 sessions of 8 turns in a closed loop, prompts from 2,000 to 10,000 tokens, each turn 0.7 s after
                  the answer before (loadtest/load/agents.py); engines with 32,000 tokens of KV cache
    agents-ample  the same, engines with 64,000
    claude-code   sessions that begin with one of eight prompts of 20,000 tokens, tools' outputs in each turn, and
                  sub-agents; a quarter of a second or so to think
    trace         a recorded trace (Azure, BurstGPT, Mooncake) by its timestamps, --speed times faster

A rival's rule chooses an engine for each call, which is sent there at once (loadtest/simulate/rivals/). Nobody tries
again. Calls name no class, as those of most clients, but with --class: Weir puts long prompts into a class of their
own. TTFT and end to end count from sending, of calls that were answered. In time: within the targets of the class
`default`. Hits: cached over prompt tokens, as engines count them. Several seeds are added up.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from statistics import fmean

import msgspec
from rich.console import Console
from rich.table import Table

from loadtest.clients.retries import Clients
from loadtest.engine.engine_config import engine_config
from loadtest.engine.profile_file import profile_of
from loadtest.engine.sequence import BLOCK
from loadtest.lab.figures.runs import hits
from loadtest.load.agents import FIELDS, agents
from loadtest.load.arrivals import Arrivals, Rate
from loadtest.load.lengths import Length, LogNormal
from loadtest.load.plan import plan
from loadtest.load.scenario import of_trace, planned
from loadtest.load.workload import Kind, Planned, Prefix, Sessions, SubAgents, Workload
from loadtest.report.stats import quantile
from loadtest.simulate import vtime
from loadtest.simulate.inprocess import GatewayTarget, targets_of
from loadtest.simulate.memory_engine import MemoryEngine
from loadtest.simulate.rivals.router import Router
from loadtest.simulate.rivals.rules import RULES
from loadtest.simulate.run_records import FleetSample
from loadtest.simulate.simulated_client import ClientCall, Transport, Try
from loadtest.simulate.simulation import SimulationRun

PROFILE = "h100-8b"
ENGINES = 4
LONGEST = 131_072  # tokens of a prompt and its answer
TIMEOUT = 600.0  # seconds
WEIR = "weir"
CLAUDE = Kind(
    prompt=Length(log_normal=LogNormal(800, 1.0), least=50, most=10_000),
    output=Length(log_normal=LogNormal(150, 0.8), least=16, most=2_000),
    ignore_eos=True,
    prefix=Prefix(tokens=20_000, count=8),
    session=Sessions(
        turns=Length(geometric=20.0), think=0.25, spread=1.5, context=100_000,
        subagents=SubAgents(share=0.44, count=Length(constant=2), turns=Length(geometric=6.0)),
    ),
)  # fmt: skip
COLUMNS = ("rule", "hits", "TTFT mean", "p50", "p90", "p99", "end to end", "in time", "not answered", "CPU")
Given = argparse.Namespace


class RivalLoad(msgspec.Struct, frozen=True):
    """A load: its calls by seed, how long they are sent, and the tokens of an engine's cache, None: its profile's."""

    calls: Callable[[Given, int], Iterator[Planned]]
    seconds: Callable[[Given], float]
    cache: int | None = None


def claude(given: Given, seed: int) -> Iterator[Planned]:
    """Sessions that begin at --rate."""
    times = takewhile(lambda at: at < given.seconds, Arrivals(poisson=Rate(given.rate)).times(seed))
    return plan(Workload(mix=(CLAUDE,)), times, seed)


def traced(given: Given, seed: int) -> Iterator[Planned]:
    """The rows of the first --seconds."""
    scenario = of_trace(str(given.trace), speed=given.speed)
    return planned(msgspec.structs.replace(scenario, duration=given.seconds), seed=seed)


LOADS = {
    "agents-tight": RivalLoad(lambda given, seed: agents(seed), lambda given: 3600.0, 32_000),
    "agents-ample": RivalLoad(lambda given, seed: agents(seed), lambda given: 3600.0, 64_000),
    "claude-code": RivalLoad(claude, lambda given: given.seconds),
    "trace": RivalLoad(traced, lambda given: given.seconds),
}


def run(load: RivalLoad, side: str, given: Given, seed: int) -> list[Try]:
    """Every call of one run behind Weir, or behind a rule of RULES."""

    async def main() -> list[Try]:
        blocks, longest = (load.cache // BLOCK, load.cache // 2) if load.cache else (None, LONGEST)
        config = engine_config(profile_of(PROFILE), num_gpu_blocks=blocks, max_model_len=longest)
        engines = [
            MemoryEngine(msgspec.structs.replace(config, seed=seed * 100 + number), seed=number)
            for number in range(ENGINES)
        ]
        target: Transport = GatewayTarget(b"", engines, seed=seed) if side == WEIR else Router(engines, RULES[side]())
        calls = load.calls(given, seed)
        clients = Clients(retries=0, timeout=TIMEOUT)
        running = SimulationRun(
            engines, Renamed(target, given.named), calls, clients=clients, seed=seed, listener=LastTries(kept)
        )
        await running.until(load.seconds(given), grace=TIMEOUT)
        return kept

    kept: list[Try] = []
    return vtime.run(main())


class Renamed:
    """A target for calls that name another class, or none, as clients send them."""

    def __init__(self, target: Transport, class_name: str | None) -> None:
        self._target = target
        self._fields = FIELDS if class_name is None else FIELDS | {b"x-weir-class": class_name.encode()}

    def send(self, call: Planned, client_call: ClientCall, tried: Try) -> Callable[[], None]:
        return self._target.send(msgspec.structs.replace(call, fields=self._fields), client_call, tried)


class LastTries:
    """Listener that keeps the last try of each call, so that a run ends with its last one."""

    def __init__(self, kept: list[Try]) -> None:
        self._kept = kept

    def ended(self, client_call: ClientCall) -> None:
        self._kept.append(client_call.tried)

    def sampled(self, sample: FleetSample) -> None:
        """Nothing of it is shown."""


def row(tries: Sequence[Try]) -> list[str]:
    """The figures of one side."""
    target = targets_of(b"")["default"]
    good = [tried for tried in tries if tried.outcome == "ok"]
    first = [tried.first_token - tried.sent for tried in good]
    whole = [tried.finished - tried.sent for tried in good]
    in_time = sum(one <= target.ttft and end <= target.deadline for one, end in zip(first, whole, strict=True))
    if not good:
        return ["", *[""] * 5, "0", str(len(tries))]
    times = [fmean(first), *(quantile(first, share) for share in (0.5, 0.9, 0.99)), fmean(whole)]
    return [f"{100 * hits(good):.0f} %", *(f"{one:.2f}" for one in times), str(in_time), str(len(tries) - len(good))]


def main(argv: list[str] | None = None) -> int:
    """Print a table for each load; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.lab.figures.rules",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sides = (WEIR, *RULES)
    parser.add_argument("loads", nargs="+", choices=LOADS, metavar="LOAD", help=", ".join(LOADS))
    parser.add_argument("--rules", default=",".join(sides), help="rows, in this order (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="runs of each (default: 5), of a trace one")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="of the load `trace`")
    parser.add_argument("--speed", type=float, default=1.0, metavar="X", help="send the trace so many times faster")
    parser.add_argument("--seconds", type=float, default=600.0, help="of claude-code and trace (default: 600)")
    parser.add_argument("--rate", type=float, default=0.25, help="of claude-code: sessions that begin a second (0.25)")
    parser.add_argument("--class", dest="named", metavar="NAME", help="the class that calls name (default: none)")
    given = parser.parse_args(argv)
    rules = given.rules.split(",")
    if unknown := [name for name in rules if name not in sides]:
        parser.error(f"--rules: {unknown[0]!r} is not one of {', '.join(sides)}")
    if ("trace" in given.loads) != (given.trace is not None):
        parser.error("the load `trace` and --trace FILE go together")
    for name in given.loads:
        seeds = range(1, 2 if name == "trace" else given.seeds + 1)
        title = f"{name} {given.trace.name} x{given.speed:g}" if name == "trace" else name
        shown = Table(*COLUMNS, title=title)
        for side in rules:
            began = time.process_time()
            tries = [tried for seed in seeds for tried in run(LOADS[name], side, given, seed)]
            shown.add_row(side, *row(tries), f"{time.process_time() - began:.0f} s")
        Console(width=max(120, Console().width)).print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
