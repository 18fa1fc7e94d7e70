"""Load of the comparison, and the counts of its outcomes: two kinds of call, one target each.

Open loop: every side gets the same list of calls at the same intended times, whatever it answers; a call is in time
from its *intended* time, and one that is refused or never answered is not. Calls that are still open when none of them
could be in time any more are given up: it changes no count, and saves waiting for a long queue to drain.
Prompts are drawn from a few common words at random, so no two have a prefix in common that a cache could use.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from loadtest.clients.client import Answer, chat, exchange
from loadtest.lab.vllm.real_vllm import MODEL
from loadtest.report.stats import quantile

WORDS = "the of and in to was is for as on with by he at from his an were are which it one had be but has not who"
Show = Callable[[float], None]  # told the share of the time that has passed


class CallKind(msgspec.Struct, frozen=True, kw_only=True):
    """Kind of call. Sizes in words and tokens; `within` seconds to its first token, or to its last."""

    name: str  # the traffic class that it asks for
    words: int
    output: int
    within: float
    first_token: bool

    def in_time(self, answer: Answer) -> bool:
        """Whether it was answered whole, and met its target."""
        came = answer.first_event if self.first_token else answer.finished
        return answer.outcome == "ok" and came - answer.intended <= self.within


INTERACTIVE = CallKind(name="interactive", words=20, output=32, within=1.0, first_token=True)
BATCH = CallKind(name="batch", words=500, output=128, within=30.0, first_token=False)
KINDS = (INTERACTIVE, BATCH)


class ScheduledCall(msgspec.Struct, frozen=True):
    """A call to send `at` seconds after the start."""

    at: float
    kind: CallKind
    prompt: str


class KindOutcomes(msgspec.Struct, kw_only=True):
    """Outcomes of the calls of one kind. `ends`: outcomes, one for each call. Times in seconds; of a call that never
    got a first token `ttfts` has how long it had waited when it was given up, and nothing where it was refused."""

    offered: int = 0
    in_time: int = 0
    tokens: int = 0  # read and written for calls that were in time
    ends: Counter[str] = msgspec.field(default_factory=Counter)
    ttfts: list[float] = msgspec.field(default_factory=list)

    @property
    def share(self) -> float:
        """In time, of those offered."""
        return self.in_time / self.offered if self.offered else 0.0


class Side(msgspec.Struct, kw_only=True):
    """Way to the engine under the load of `seconds`. `lag`: of our own sending, p99, in seconds."""

    name: str
    seconds: float
    kinds: dict[str, KindOutcomes]
    lag: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens of calls in time, over the seconds in which the calls were offered."""
        return sum(counted.tokens for counted in self.kinds.values()) / self.seconds


def plan(rate: float, seconds: float, seed: int) -> list[ScheduledCall]:
    """Poisson arrivals of `rate` calls/s; each is of one kind or the other at even odds."""
    rng = random.Random(seed)  # noqa: S311 - a load, not a secret
    planned: list[ScheduledCall] = []
    at = rng.expovariate(rate)
    while at < seconds:
        kind = rng.choice(KINDS)
        planned.append(ScheduledCall(at, kind, prompt(kind, rng)))
        at += rng.expovariate(rate)
    return planned


def prompt(kind: CallKind, rng: random.Random) -> str:
    """Words nobody has asked before."""
    return " ".join(rng.choices(WORDS.split(), k=kind.words))


async def open_loop(url: str, planned: list[ScheduledCall], seconds: float, show: Show) -> list[Answer]:
    """Send every call at its time; their answers, once all have ended or none could be in time any more."""
    loop = asyncio.get_running_loop()
    host, port = _address(url)
    requests = [_request(host, port, call.kind, call.prompt) for call in planned]
    answers = [Answer() for _ in planned]
    begin = loop.time() + 0.2
    end = begin + seconds + max(kind.within for kind in KINDS)
    async with asyncio.TaskGroup() as group:
        watcher = loop.create_task(_watch(begin, end, show))
        calls: set[asyncio.Task[None]] = set()
        for call, request, answer in zip(planned, requests, answers, strict=True):
            answer.intended = begin + call.at
            if answer.intended > loop.time():
                await asyncio.sleep(answer.intended - loop.time())
            task = group.create_task(exchange(host, port, request, answer, limit=end - loop.time()))
            calls.add(task)
            task.add_done_callback(calls.discard)
        while calls:
            await asyncio.wait(calls)
    watcher.cancel()
    return answers


async def closed_loop(
    url: str, kinds: Sequence[CallKind], in_flight: int, seconds: float, seed: int, show: Show
) -> float:
    """Calls per second that are answered well with `in_flight` at a time, of these kinds in turn."""
    loop = asyncio.get_running_loop()
    host, port = _address(url)
    rng = random.Random(seed)  # noqa: S311 - a load, not a secret
    begin = loop.time()
    end = begin + seconds
    times: list[float] = []

    async def client(number: int) -> None:
        while loop.time() < end:
            kind = kinds[number % len(kinds)]
            number += 1
            answer = Answer()
            await exchange(host, port, _request(host, port, kind, prompt(kind, rng)), answer, limit=60.0)
            if answer.outcome == "ok":
                times.append(answer.finished)
            else:
                await asyncio.sleep(0.1)

    watcher = loop.create_task(_watch(begin, end, show))
    async with asyncio.TaskGroup() as group:
        for number in range(in_flight):
            group.create_task(client(number))
    watcher.cancel()
    return sum(at <= end for at in times) / seconds


def side(name: str, planned: list[ScheduledCall], answers: list[Answer], seconds: float) -> Side:
    """Outcomes of the calls: every call once, by kind."""
    kinds = {kind.name: KindOutcomes() for kind in KINDS}
    for call, answer in zip(planned, answers, strict=True):
        counted = kinds[call.kind.name]
        counted.offered += 1
        counted.ends["given_up" if answer.outcome == "timed_out" else answer.outcome] += 1
        if answer.first_event:
            counted.ttfts.append(answer.first_event - answer.intended)
        elif answer.timed_out:
            counted.ttfts.append(answer.finished - answer.intended)
        if call.kind.in_time(answer):
            counted.in_time += 1
            counted.tokens += answer.prompt_tokens + answer.completion_tokens
    lags = [answer.sent - answer.intended for answer in answers if answer.sent]
    return Side(name=name, seconds=seconds, kinds=kinds, lag=quantile(lags, 0.99))


def save(path: Path, planned: list[ScheduledCall], answers: list[Answer]) -> None:
    """Write a JSON line for each call. Times are seconds after it was to be sent; negative: that did not happen."""
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as file:
        for call, answer in zip(planned, answers, strict=True):
            line: dict[str, object] = {"at": call.at, "class": call.kind.name, "outcome": answer.outcome}
            times = {"sent": answer.sent, "first_token": answer.first_event, "ended": answer.finished}
            line |= {name: round(at - answer.intended, 4) if at else -1 for name, at in times.items()}
            file.write(encode(line | {"in_time": call.kind.in_time(answer)}) + b"\n")


def together(sides: Sequence[Side]) -> list[Side]:
    """Rounds of one side as one, in order of first appearance; `lag` is the worst of them."""
    totals: dict[str, Side] = {}
    for side in sides:
        total = totals.setdefault(side.name, Side(name=side.name, seconds=0.0, kinds={}, lag=0.0))
        total.seconds += side.seconds
        total.lag = max(total.lag, side.lag)
        for name, counted in side.kinds.items():
            known = total.kinds.setdefault(name, KindOutcomes())
            known.offered += counted.offered
            known.in_time += counted.in_time
            known.tokens += counted.tokens
            known.ends += counted.ends
            known.ttfts += counted.ttfts
    return list(totals.values())


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "127.0.0.1", parts.port or 80


def _request(host: str, port: int, kind: CallKind, words: str) -> bytes:
    return chat(f"{host}:{port}", MODEL, words, max_tokens=kind.output, class_name=kind.name)


async def _watch(begin: float, end: float, show: Show) -> None:
    loop = asyncio.get_running_loop()
    while True:
        show((loop.time() - begin) / (end - begin))
        await asyncio.sleep(0.5)
