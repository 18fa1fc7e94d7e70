"""Replays a recorded trace through a gateway and accounts for every request: `python -m loadtest.replay --help`.

Open loop: the times to send at are fixed up front, from the trace, and are kept whatever the answers do; the sender's
own lag is reported. With `--control` the gateway's counters are read before and after, and each outcome it counted
must be the one its client saw. Exit status 0: every request is accounted for; 1: not; 2: bad arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import random
import resource
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from loadtest.client import Answer, chat, exchange
from loadtest.processes import samples
from loadtest.trace import Arrival, TraceError, read

COUNTER = "weir_requests_total"
WORDS = "the of and in to was is for as on with by he at from his an were are which it one had be but has not who"
CHARACTERS_PER_TOKEN = 4.0
SETTLE = 10.0  # seconds for the gateway's counters to reach what clients saw
UNEXPLAINED = ("cut", "unanswered")
SEEN_AS = {"timed_out": "client_gone"}  # what the gateway calls it, where clients see something else


class Report(msgspec.Struct, kw_only=True):
    """What `--json` writes. Times in seconds."""

    requests: int
    seconds: float
    outcomes: dict[str, int]
    gateway: dict[str, int] | None
    unaccounted: list[str]
    prompt_tokens: int
    completion_tokens: int
    lag_p99: float
    ttft_p50: float
    ttft_p99: float
    peak_in_flight: int
    errors: list[str]


class Replay:
    """One run: what was planned, what came back."""

    def __init__(self, target: str, model: str, arrivals: list[Arrival], *, speed: float, limit: float) -> None:
        parts = urlsplit(target)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self.model = model
        self.arrivals = arrivals
        self.speed = speed
        self.limit = limit
        self.answers = [Answer() for _ in arrivals]
        self.finished = 0
        self.in_flight = 0
        self.peak = 0
        self._rng = random.Random(0)  # noqa: S311 - prompts, not secrets
        self._text = " ".join(self._rng.choices(WORDS.split(), k=100_000))

    def _request(self, arrival: Arrival) -> bytes:
        start = self._rng.randrange(len(self._text) // 2)  # a place of its own, so that no prefix is shared
        prompt = self._text[start : start + max(1, int(arrival.prompt_tokens * CHARACTERS_PER_TOKEN))]
        return chat(f"{self.host}:{self.port}", self.model, prompt, max_tokens=max(1, arrival.output_tokens))

    async def _one(self, arrival: Arrival, answer: Answer) -> None:
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        await exchange(self.host, self.port, self._request(arrival), answer, limit=self.limit)
        self.in_flight -= 1
        self.finished += 1

    async def run(self, progress: Progress) -> float:
        """Send everything at its time; the seconds it took until the last answer."""
        loop = asyncio.get_running_loop()
        bar = progress.add_task("replay", total=len(self.arrivals), flying=0)
        begin = loop.time() + 0.1
        async with asyncio.TaskGroup() as group:
            watcher = loop.create_task(self._watch(progress, bar))
            for arrival, answer in zip(self.arrivals, self.answers, strict=True):
                answer.intended = begin + arrival.at / self.speed
                await asyncio.sleep(max(0.0, answer.intended - loop.time()))
                group.create_task(self._one(arrival, answer))
        watcher.cancel()
        progress.update(bar, completed=self.finished, flying=0)
        return loop.time() - begin

    async def _watch(self, progress: Progress, bar: TaskID) -> None:
        while True:
            progress.update(bar, completed=self.finished, flying=self.in_flight)
            await asyncio.sleep(0.25)


def counters(control: str) -> dict[str, int]:
    """The gateway's calls ended so far, by outcome."""
    found: Counter[str] = Counter()
    for labels, value in samples(f"{control}/metrics", COUNTER):
        found[labels["outcome"]] += int(value)
    return dict(found)


async def settled(control: str, before: dict[str, int], wanted: dict[str, int]) -> dict[str, int]:
    """What the gateway has counted since `before`, once it is `wanted` or time is up."""
    loop = asyncio.get_running_loop()
    end = loop.time() + SETTLE
    while True:
        now = counters(control)
        delta = {name: now[name] - before.get(name, 0) for name in now if now[name] != before.get(name, 0)}
        if delta == wanted or loop.time() > end:
            return delta
        await asyncio.sleep(0.05)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


def reconcile(seen: dict[str, int], counted: dict[str, int] | None, requests: int) -> list[str]:
    """Why a request is not accounted for, one line each; empty where all are."""
    wrong = [f"{seen[name]} {name}: neither finished nor explained" for name in UNEXPLAINED if seen.get(name)]
    if sum(seen.values()) != requests:
        wrong.append(f"{requests} requests, {sum(seen.values())} ends")
    if counted is not None:
        wanted = as_counted(seen)
        for name in sorted(wanted.keys() | counted.keys()):
            if wanted.get(name, 0) != counted.get(name, 0):
                wrong.append(f"{name}: clients saw {wanted.get(name, 0)}, the gateway counted {counted.get(name, 0)}")
    return wrong


def as_counted(seen: dict[str, int]) -> dict[str, int]:
    named: Counter[str] = Counter()
    for name, count in seen.items():
        named[SEEN_AS.get(name, name)] += count
    return dict(named)


async def replay(run: Replay, control: str | None, progress: Progress) -> Report:
    """Replay, then reconcile with the gateway's own counters."""
    before = counters(control) if control else {}
    seconds = await run.run(progress)
    seen = dict(Counter(answer.outcome for answer in run.answers))
    counted = await settled(control, before, as_counted(seen)) if control else None
    good = [answer for answer in run.answers if answer.outcome == "ok"]
    sent = [answer for answer in run.answers if answer.sent]
    ttft = [answer.first_byte - answer.intended for answer in good]
    return Report(
        requests=len(run.answers),
        seconds=seconds,
        outcomes=seen,
        gateway=counted,
        unaccounted=reconcile(seen, counted, len(run.answers)),
        prompt_tokens=sum(answer.prompt_tokens for answer in run.answers),
        completion_tokens=sum(answer.completion_tokens for answer in run.answers),
        lag_p99=percentile([answer.sent - answer.intended for answer in sent], 0.99),
        ttft_p50=percentile(ttft, 0.5),
        ttft_p99=percentile(ttft, 0.99),
        peak_in_flight=run.peak,
        errors=sorted({answer.error[:300] for answer in run.answers if answer.error})[:10],
    )


def show(report: Report, console: Console) -> None:
    table = Table("outcome", "clients", "gateway", title=f"{report.requests} requests in {report.seconds:.1f} s")
    counted = report.gateway or {}
    for name in sorted(report.outcomes.keys() | counted.keys()):
        gateway = "-" if report.gateway is None else str(counted.get(name, 0))
        table.add_row(name, str(report.outcomes.get(name, 0)), gateway)
    console.print(table)
    console.print(
        f"tokens {report.prompt_tokens} read, {report.completion_tokens} generated; "
        f"first byte p50 {report.ttft_p50 * 1e3:.0f} ms, p99 {report.ttft_p99 * 1e3:.0f} ms from the intended time; "
        f"sender's lag p99 {report.lag_p99 * 1e3:.1f} ms; at most {report.peak_in_flight} in flight"
    )
    for error in report.errors:
        console.print(f"error seen: {error}", markup=False)
    for line in report.unaccounted:
        console.print(f"UNACCOUNTED {line}", markup=False)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.replay",
        description="Replay the first rows of a trace through a gateway and account for every request.",
    )
    parser.add_argument("--trace", type=Path, required=True, help="Azure LLM, BurstGPT (CSV) or Mooncake (JSONL)")
    parser.add_argument("--rows", type=int, default=2000, help="how many rows to send (default 2000)")
    parser.add_argument("--speed", type=float, default=20.0, help="times faster than recorded (default 20)")
    parser.add_argument("--target", required=True, metavar="URL", help="data port, e.g. http://127.0.0.1:8000")
    parser.add_argument("--control", metavar="URL", help="control port: compare with the gateway's own counters")
    parser.add_argument("--model", required=True, help="the model to name in each request")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds to wait for one answer (default 120)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    given = parser.parse_args(argv)
    if given.rows < 1 or given.speed <= 0 or given.limit <= 0:
        parser.error("--rows, --speed and --limit must be above 0")
    return given


def main(argv: list[str] | None = None) -> int:
    given = arguments(argv)
    console = Console()
    try:
        arrivals = list(islice(read(given.trace), given.rows))
    except (TraceError, OSError) as error:
        print(f"loadtest.replay: {error}", file=sys.stderr)
        return 2
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # one connection per request in flight
    run = Replay(given.target, given.model, arrivals, speed=given.speed, limit=given.limit)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, TextColumn("{task.fields[flying]} in flight"), console=console) as progress:
            report = uvloop.run(replay(run, given.control, progress))
    except (OSError, http.client.HTTPException) as error:
        print(f"loadtest.replay: the control port {given.control} did not answer: {error}", file=sys.stderr)
        return 1
    show(report, console)
    if given.json:
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2))
    return 1 if report.unaccounted else 0


if __name__ == "__main__":
    sys.exit(main())
