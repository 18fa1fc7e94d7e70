"""Samples of targets' /metrics, once a second during a run: of engines, or of a gateway before them.

Only gauges that reports draw are looked for, under vLLM's names (also those before 0.10) and the gateway's. A server
without metrics, or one that cannot be reached, has no series. The client that sends the load asks for them: that costs
a millisecond of a core a second and no thread.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict

from loadtest.clients.answer import Answer
from loadtest.clients.sender import Body
from loadtest.clients.targets import Server
from loadtest.report.records import EngineSample

EVERY = 1.0  # seconds
PATIENCE = 5.0  # seconds
GIVEN_UP_AFTER = 3  # looks in vain
_SAMPLE = re.compile(
    rb"^(vllm:(?:kv_cache_usage_perc|gpu_cache_usage_perc|num_requests_running|num_requests_waiting)"
    rb"|weir_(?:engine_kv_usage_ratio|engine_in_flight|queued_calls))"
    rb'(?:\{(?:[^}]*?\bengine="([^"]*)")?[^}]*\})? (\S+)',
    re.MULTILINE,
)


def samples_of(text: bytes, at: float, repeat: int, engine: str) -> list[EngineSample]:
    """Read the samples in a page of metrics: of one vLLM, `engine` (of several data-parallel ranks: the mean of KV
    usage, the sums of requests), or of a gateway and the engines that it names."""
    found: dict[bytes, dict[bytes, float]] = defaultdict(dict)
    for name, label, value in _SAMPLE.findall(text):
        try:
            found[name][label] = found[name].get(label, 0.0) + float(value)
        except ValueError:
            continue
    usage = found.get(b"vllm:kv_cache_usage_perc") or found.get(b"vllm:gpu_cache_usage_perc")
    if usage is not None:
        running, waiting = found[b"vllm:num_requests_running"], found[b"vllm:num_requests_waiting"]
        mean = sum(usage.values()) / len(usage)
        return [EngineSample(at, engine, mean, int(sum(running.values())), int(sum(waiting.values())), repeat)]
    of_engines = found.get(b"weir_engine_kv_usage_ratio")
    if of_engines is None:
        return []
    busy = found[b"weir_engine_in_flight"]
    queued = int(sum(found[b"weir_queued_calls"].values()))
    named = [
        EngineSample(at, name.decode(errors="replace"), used, int(busy.get(name, 0.0)), 0, repeat)
        for name, used in of_engines.items()
    ]
    return [*named, EngineSample(at, "", 0.0, 0, queued, repeat)]


async def watch(server: Server, engine: str, begin: float, repeat: int, samples: list[EngineSample], *,
                only_queue: bool = False) -> None:  # fmt: skip
    """Look once a second until cancelled, or until it is plain that there is nothing to see. `only_queue`: engines
    tell of themselves elsewhere."""
    request = b"GET %b/metrics HTTP/1.1\r\nhost: %b\r\n\r\n" % (
        server.address.prefix,
        server.address.name.encode("ascii", "replace"),
    )
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
