"""Text of /metrics, under the names of vLLM 0.32. Written by hand: it is a fixed list of series.

Counters and histograms carry what the engine has counted; gauges are read from the scheduler at the scrape.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import msgspec

from loadtest.engine.engine import Engine
from loadtest.engine.sequence import BLOCK
from loadtest.engine.stats import Histogram

CONTENT_TYPE = b"content-type: text/plain; version=1.0.0; charset=utf-8\r\n"
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


class LoraInfo(msgspec.Struct, frozen=True):
    """LoRA adapters: how many are loaded at once, and those with running and waiting requests."""

    most: int
    running: tuple[str, ...]
    waiting: tuple[str, ...]


def text(engine: Engine, model: str, lora: LoraInfo | None = None) -> bytes:
    """Every series once, each family with its HELP and TYPE. `lora`: None: it is not enabled."""
    labels = f'engine="0",model_name="{model}"'
    return "\n".join(
        [*_gauges(engine, labels), *_lora(lora), *_counters(engine, labels), *_times(engine, labels), ""]
    ).encode()


def _gauges(engine: Engine, labels: str) -> Iterable[str]:
    scheduler, config = engine.scheduler, engine.config
    usage = scheduler.blocks.usage
    yield from _family("num_requests_running", "gauge", [(labels, len(scheduler.running))])
    yield from _family("num_requests_waiting", "gauge", [(labels, scheduler.waiting)])
    yield from _family("kv_cache_usage_perc", "gauge", [(labels, usage)])
    info = f'block_size="{BLOCK}",cache_dtype="auto",enable_prefix_caching="{config.caching}",engine="0"'
    info += f',gpu_memory_utilization="0.9",num_gpu_blocks="{config.num_gpu_blocks}"'
    info += f',kv_cache_size_tokens="{config.num_gpu_blocks * BLOCK}"'
    level = 0 if engine.asleep is None else engine.asleep
    flags = (engine.asleep is None, level == 1, level == 2)
    states = [(f'{labels},sleep_state="{state}"', flag) for state, flag in zip(SLEEP_STATES, flags, strict=True)]
    yield from _family("engine_sleep_state", "gauge", states)
    yield from _family("cache_config_info", "gauge", [(info, 1)])


def _lora(lora: LoraInfo | None) -> Iterable[str]:
    """Yield adapters in vLLM's form: all facts in labels, the time as the value."""
    if lora is not None:
        running, waiting = ",".join(lora.running), ",".join(lora.waiting)
        labels = f'max_lora="{lora.most}",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
        yield from _family("lora_requests_info", "gauge", [(labels, time.time())])


def _counters(engine: Engine, labels: str) -> Iterable[str]:
    stats, scheduler = engine.stats, engine.scheduler
    yield from _family("prefix_cache_queries_total", "counter", [(labels, scheduler.queries)])
    yield from _family("prefix_cache_hits_total", "counter", [(labels, scheduler.hits)])
    yield from _family("num_preemptions_total", "counter", [(labels, stats.preemptions)])
    yield from _family("prompt_tokens_total", "counter", [(labels, stats.prompt_tokens)])
    yield from _family("generation_tokens_total", "counter", [(labels, stats.generation_tokens)])
    success = [(f'{labels},finished_reason="{reason}"', count) for reason, count in stats.success.items()]
    yield from _family("request_success_total", "counter", success)


def _times(engine: Engine, labels: str) -> Iterable[str]:
    stats = engine.stats
    histograms = {
        "time_to_first_token_seconds": stats.first_token,
        "inter_token_latency_seconds": stats.between_tokens,
        "e2e_request_latency_seconds": stats.end_to_end,
        "request_queue_time_seconds": stats.queue,
        "request_inference_time_seconds": stats.inference,
        "request_prefill_time_seconds": stats.prefill,
        "request_decode_time_seconds": stats.decode,
        "iteration_tokens_total": stats.iteration_tokens,
        "request_prompt_tokens": stats.request_prompt,
        "request_generation_tokens": stats.request_generation,
    }
    for name, histogram in histograms.items():
        yield from _histogram(name, labels, histogram)


def _family(name: str, kind: str, samples: Sequence[tuple[str, float]]) -> Iterable[str]:
    yield f"# HELP vllm:{name} Simulated."
    yield f"# TYPE vllm:{name} {kind}"
    for labels, value in samples:
        yield f"vllm:{name}{{{labels}}} {float(value)!r}"


def _histogram(name: str, labels: str, histogram: Histogram) -> Iterable[str]:
    yield f"# HELP vllm:{name} Simulated."
    yield f"# TYPE vllm:{name} histogram"
    total = 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        total += count
        upto = "+Inf" if bound == float("inf") else repr(float(bound))
        yield f'vllm:{name}_bucket{{{labels},le="{upto}"}} {float(total)!r}'
    yield f"vllm:{name}_count{{{labels}}} {float(total)!r}"
    yield f"vllm:{name}_sum{{{labels}}} {histogram.sum!r}"
