"""Batch work beside people who wait: a day's traffic at 60 % of capacity, with batches and without.

    python -m loadtest.lab.figures.batches FILE

FILE is Azure's recorded hour of conversations (2023), and not part of this repository; without it WEIR_TRACES names the
folder that has it:

    curl -LO https://raw.githubusercontent.com/Azure/AzurePublicDataset/master/data/AzureLLMInferenceTrace_conv.csv

A day is not recorded there. The hour stands for one: its calls come at between 0.4 and 1.6 times their mean rate, as a
day's do. It is stretched until the mean offers `--load` times the capacity of one simulated engine; of each three calls
one is taken, by each seed another. They are of the class `interactive`, and stream. Clients try twice more.

Batches have the same lengths, and never end: `--in-flight` lines wait or run, each sent as the gateway's batch runner
does it, with the same rule for what is sent again. The whole gateway runs in virtual time, with POLICY.

    used     tokens of the calls that were answered, prompt and output, over the capacity: the most that the engine does
             of these calls for closed-loop clients, without a gateway
    ttft     seconds from a call's first sending to its first token, over all its tries; a call that is never answered
             counts as longer than any other
    KV       mean share of the engine's KV cache in use

Exit status 0: measured; 1: with --gate, a target is missed, or something was left over; 2: bad arguments, or no trace.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path

import msgspec

from gateway.batches.line_call import LineCall
from gateway.batches.site import BatchSite
from gateway.core.batches.results import again_in
from gateway.core.policy.batches import BatchesPolicy
from gateway.core.quantile import nearest_rank
from gateway.core.request.routes import ROUTES
from gateway.core.request.tenants import ANONYMOUS
from gateway.shared.storage import Storage
from loadtest.clients.retries import Clients
from loadtest.lab.figures.runs import an_engine, tokens
from loadtest.lab.rows import Row, collect_seldom, percent, report, terminal
from loadtest.load.plan import plan
from loadtest.load.trace import Arrival, TraceError, read
from loadtest.load.workload import Kind, Planned, Workload
from loadtest.simulate import vtime
from loadtest.simulate.inprocess import GatewayTarget
from loadtest.simulate.rivals.load import RoundRobin
from loadtest.simulate.rivals.router import Router
from loadtest.simulate.run_records import RunResult
from loadtest.simulate.simulated_client import Try
from loadtest.simulate.simulation import SimulationRun

TRACE = "azure_llm_2023_conv.csv"
POLICY = """
classes:
  interactive: {weight: 8, strict: true, ttft: 2s, deadline: 60s}
  default: {}
  batch: {deadline: 24h, headroom: 15%}
"""
EVERY = 3  # of so many calls one is taken
WARM = 60.0  # seconds
GRACE = 60.0  # seconds for what is under way at the end
SWEEP = (64, 96, 128)  # closed-loop clients
SATURATED = 400.0  # seconds of each
USED = 0.95
LONGER = 1.05
DEADLINE = b"%d" % (24 * 3600 * 1000)  # of a line, milliseconds


class DayRun(msgspec.Struct):
    """Outcome of one run. `used`: over the capacity; `ttft`: p50 and p99, seconds."""

    used: float
    ttft: tuple[float, float]
    kv: float
    lines: int


class BatchLines:
    """Lines in flight, as a `BatchRun` keeps them: so many that are sent wait or run, and no more are read ahead."""

    def __init__(self, target: GatewayTarget, in_flight: int) -> None:
        self.answered: list[tuple[float, int]] = []  # when, and tokens
        self._target = target
        gateway = target.gateway
        never = Storage(Path())  # whole answers are small, and stay in memory
        self._site = BatchSite(BatchesPolicy(), never, gateway.pipeline, gateway.bodies, print)
        self._seats = asyncio.Semaphore(in_flight)
        self._ahead = asyncio.Semaphore(in_flight)
        self._loop = asyncio.get_running_loop()

    async def run(self, calls: Iterable[Planned]) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for number, planned in enumerate(calls):
                await self._ahead.acquire()
                group.create_task(self._line(number, planned)).add_done_callback(lambda _: self._ahead.release())

    async def _line(self, number: int, planned: Planned) -> None:
        gateway, tries = self._target.gateway, 0
        account = gateway.current.snapshot.tenants.accounts[ANONYMOUS]
        wait: float | None = 0.0
        while wait is not None:
            await asyncio.sleep(wait)
            tries += 1
            id = f"batch_req_{number}_{tries}"
            fields = planned.fields | {b"x-request-id": id.encode(), b"x-weir-deadline-ms": DEADLINE}
            async with self._seats:
                self._target.records.open[id] = Try("batch", tries, self._loop.time(), self._loop.time())
                call = LineCall(self._site, ROUTES[planned.path], account, fields, planned.body)
                try:
                    answer = await call.answer
                finally:
                    call.close()
            wait = again_in(answer.status, answer.retry_after, answer.helps, tries)
        if answer.status == 200:
            usage = msgspec.json.decode(answer.body)["usage"]
            self.answered.append((self._loop.time(), usage["prompt_tokens"] + usage["completion_tokens"]))


def of_class(name: str, rows: Iterable[Arrival], seed: int) -> Iterable[Planned]:
    """The rows as calls of a class. Lines do not stream."""
    kind = Kind(class_name=name, prompt="trace", output="trace", ignore_eos=True, stream=name != "batch")
    return plan(Workload(mix=(kind,)), rows, seed)


def capacity(rows: list[Arrival], seed: int) -> float:
    """Tokens a second, the best of a sweep."""

    async def main(clients: int) -> float:
        engines, calls = [an_engine(seed)], of_class("interactive", cycle(rows), seed)
        run = SimulationRun(engines, Router(engines, RoundRobin()), calls, clients=Clients(), seed=seed, closed=clients)
        tries = (await run.until(SATURATED)).tries
        return sum(tokens(each) for each in tries if each.outcome == "ok" and each.finished >= WARM)

    return max(vtime.run(main(clients)) for clients in SWEEP) / (SATURATED - WARM)


def run(rows: list[Arrival], policy: str, in_flight: int, most: float, seed: int, left_over: list[str]) -> DayRun:
    """Run the day beside so many lines in flight, on an engine of capacity `most`."""
    ends = rows[-1].at

    async def main() -> tuple[RunResult, list[tuple[float, int]]]:
        engines = [an_engine(seed)]
        target = GatewayTarget(policy.encode(), engines, seed=seed)
        calls = of_class("interactive", rows, seed)
        simulation = SimulationRun(engines, target, calls, clients=Clients(), seed=seed)
        lines = BatchLines(target, in_flight)
        half = len(rows) // 2
        working = asyncio.ensure_future(lines.run(of_class("batch", cycle(rows[half:] + rows[:half]), seed + 1000)))
        result = await simulation.until(ends, grace=GRACE)
        working.cancel()
        await asyncio.wait({working})
        await asyncio.sleep(1.0)  # what was cancelled gives back what it holds
        left_over.extend(target.left_over())
        return result, lines.answered

    result, answered = vtime.run(main())
    calls: dict[float, float] = {}  # by their first sending
    for tried in result.tries:
        if tried.intended >= WARM:
            first = tried.first_byte - tried.intended if tried.outcome == "ok" else math.inf
            calls[tried.intended] = min(first, calls.get(tried.intended, math.inf))
    times = sorted(calls.values())
    done = [(each.finished, tokens(each)) for each in result.tries if each.outcome == "ok"] + answered
    return DayRun(
        used=sum(count for at, count in done if WARM <= at <= ends) / (ends - WARM) / most,
        ttft=(nearest_rank(times, 0.5), nearest_rank(times, 0.99)),
        kv=sum(sample.kv[0] for sample in result.samples) / len(result.samples),
        lines=len(answered),
    )


def measured(trace: list[Arrival], options: argparse.Namespace, policy: str, seed: int, left_over: list[str]) -> Row:
    """Row of one seed."""
    rows = trace[seed % EVERY :: EVERY]
    most = capacity(rows, seed)
    work = sum(row.prompt_tokens + row.output_tokens for row in rows)
    slower = work / options.load / most / rows[-1].at
    rows = [msgspec.structs.replace(row, at=row.at * slower) for row in rows]
    alone = run(rows, policy, 0, most, seed, left_over)
    beside = run(rows, policy, options.in_flight, most, seed, left_over)
    longer = beside.ttft[1] / alone.ttft[1]

    def told(done: DayRun) -> str:
        return f"{done.used:.3f}; {done.ttft[0]:.2f} s; {done.ttft[1]:.2f} s; {percent(done.kv)}"

    return Row(
        name=f"seed {seed}",
        what=f"{len(rows)} calls in {rows[-1].at:.0f} s, {beside.lines} lines: used; ttft p50; p99; KV",
        value=f"{told(beside)}: p99 x {longer:.3f}",
        baseline=told(alone),
        target=f"used >= {USED:g}, p99 <= x {LONGER:g}",
        milestone=f"used >= {USED:g}, p99 <= x {LONGER:g}",
        met=beside.used >= USED and longer <= LONGER,
    )


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line. Exits with status 2 where it cannot be understood."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.lab.figures.batches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    folder = os.environ.get("WEIR_TRACES", "")
    found = Path(folder) / TRACE if folder else None
    parser.add_argument("trace", nargs="?", type=Path, metavar="FILE", default=found, help="recorded; see above")
    parser.add_argument("--load", type=float, default=0.6, help="tokens offered over the capacity (default: 0.6)")
    parser.add_argument("--in-flight", type=int, default=256, help="lines that wait or run (default: 256)")
    parser.add_argument("--policy", type=Path, metavar="FILE", help="in place of POLICY")
    parser.add_argument("--seeds", type=int, default=3, help="the seeds from 1 on (default: 3)")
    parser.add_argument("--gate", action="store_true", help="exit with status 1 where a target is missed")
    options = parser.parse_args(argv)
    if options.trace is None:
        parser.error("no trace: name a file, or a folder in WEIR_TRACES; --help says where one can be had")
    return options


def main(argv: list[str] | None = None) -> int:
    """Measure and print; the exit status."""
    options = arguments(sys.argv[1:] if argv is None else argv)
    collect_seldom()
    left_over: list[str] = []
    try:
        policy = POLICY if options.policy is None else options.policy.read_text()
        trace = [row for row in read(options.trace) if row.prompt_tokens and row.output_tokens]
        rows = [measured(trace, options, policy, seed, left_over) for seed in range(1, options.seeds + 1)]
    except (OSError, TraceError, ValueError) as error:
        print(f"python -m loadtest.lab.figures.batches: {error}", file=sys.stderr)
        return 2
    summary = f"load {options.load:g}, {options.in_flight} lines in flight"
    return report(terminal(), rows, summary, wrong=left_over, details=None, gate=options.gate)


if __name__ == "__main__":
    sys.exit(main())
