"""Text of /metrics, under the names of vLLM 0.32. Written by hand: it is a fixed list of series.

Counters carry what the engine has counted; gauges are read from the scheduler at the scrape. Of vLLM's histograms there
is the one whose count the sidecar reads.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import msgspec

from loadtest.engine.engine import Engine
from loadtest.engine.sequence import BLOCK

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
    return "\n".join([*_gauges(engine, labels), *_lora(lora), *_counters(engine, labels), ""]).encode()


def _gauges(engine: Engine, labels: str) -> Iterable[str]:
    scheduler, config = engine.scheduler, engine.config
    usage = scheduler.blocks.usage
    yield from _family("num_requests_running", "gauge", [(labels, len(scheduler.running))])
    yield from _family("num_requests_waiting", "gauge", [(labels, scheduler.waiting)])
    yield from _family("kv_cache_usage_perc", "gauge", [(labels, usage)])
    info = f'block_size="{BLOCK}",cache_dtype="auto",enable_prefix_caching="{config.caching}",engine="0"'
    info += f',gpu_memory_utilization="0.9",num_gpu_blocks="{config.profile.num_gpu_blocks}"'
    info += f',kv_cache_size_tokens="{config.profile.num_gpu_blocks * BLOCK}"'
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
    yield "# TYPE vllm:iteration_tokens_total histogram"
    yield f"vllm:iteration_tokens_total_count{{{labels}}} {float(stats.steps)!r}"
    success = [(f'{labels},finished_reason="{reason}"', count) for reason, count in stats.success.items()]
    yield from _family("request_success_total", "counter", success)


def _family(name: str, kind: str, samples: Sequence[tuple[str, float]]) -> Iterable[str]:
    yield f"# HELP vllm:{name} Simulated."
    yield f"# TYPE vllm:{name} {kind}"
    for labels, value in samples:
        yield f"vllm:{name}{{{labels}}} {float(value)!r}"
