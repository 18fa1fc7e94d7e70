"""Samples of targets' /metrics, once a second during a run: of engines, or of a gateway before them.

Only gauges that reports draw are kept, vLLM's and the gateway's. A server without metrics, or one that cannot be
reached, has no series. The client that sends the load asks for them: that costs a millisecond of a core a second and no
thread.
"""

from __future__ import annotations

import asyncio
import time

from gateway.shared.vllm.answers import KV_USAGE, RUNNING, WAITING, AnswerError, series_of
from loadtest.clients.answer import Answer
from loadtest.clients.sender import Body
from loadtest.clients.targets import Server
from loadtest.report.records import EngineSample

EVERY = 1.0  # seconds
PATIENCE = 5.0  # seconds
GIVEN_UP_AFTER = 3  # looks in vain
KV, BUSY, QUEUED = b"weir_engine_kv_usage_ratio", b"weir_engine_in_flight", b"weir_queued_calls"


def samples_of(text: bytes, at: float, repeat: int, engine: str) -> list[EngineSample]:
    """Read the samples in a page of metrics: of one vLLM, `engine` (of several data-parallel ranks: the KV usage of the
    fullest, the sums of requests), or of a gateway and the engines that it names."""
    try:
        series = series_of(text, frozenset((*KV_USAGE, RUNNING, WAITING, KV, BUSY, QUEUED)))
    except AnswerError:
        return []
    usage = next((series[name] for name in KV_USAGE if name in series), None)
    if usage is not None:
        running, waiting = (int(sum(value for _, value in series.get(name, ()))) for name in (RUNNING, WAITING))
        return [EngineSample(at, engine, max(value for _, value in usage), running, waiting, repeat)]
    if KV not in series:
        return []
    busy = {labels.get("engine"): int(value) for labels, value in series.get(BUSY, ())}
    named = [
        EngineSample(at, labels.get("engine", ""), used, busy.get(labels.get("engine"), 0), 0, repeat)
        for labels, used in series[KV]
    ]
    queued = sum(value for _, value in series.get(QUEUED, ()))
    return [*named, EngineSample(at, "", 0.0, 0, int(queued), repeat)]


async def watch(server: Server, engine: str, begin: float, repeat: int, samples: list[EngineSample], *,
                only_queue: bool = False) -> None:  # fmt: skip
    """Look once a second until cancelled, or until it is plain that there is nothing to see. `only_queue`: engines
    tell of themselves elsewhere."""
    request = server.address.request(b"GET", b"/metrics")
    missed = 0
    number = 0
    while missed < GIVEN_UP_AFTER:
        await asyncio.sleep(max(0.0, begin + number * EVERY - time.monotonic()))
        number = max(number + 1, int((time.monotonic() - begin) / EVERY) + 1)
        text, _ = await page(server, request)
        told = samples_of(text, max(0.0, time.monotonic() - begin), repeat, engine)
        missed = 0 if told else missed + 1
        samples += [sample for sample in told if not (only_queue and sample.engine)]


async def page(
    server: Server, request: bytes, *, patience: float = PATIENCE, answer: Answer | None = None
) -> tuple[bytes, str]:
    """The body of a 200 answer to a GET, or nothing and why. `answer` is filled in."""
    answer, heard = answer or Answer(), Body()
    exchange = server.send(request, answer, heard)
    await asyncio.wait({exchange.over}, timeout=patience)
    if not exchange.over.done():
        answer.timed_out = True
        exchange.failed("")
    server.done(exchange)
    ok = answer.outcome == "ok"
    return (heard.all, "") if ok else (b"", answer.why)
