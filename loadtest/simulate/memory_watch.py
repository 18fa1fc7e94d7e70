"""Telemetry in memory: samples and health checks of simulated engines, at the times of real ones."""

from __future__ import annotations

import asyncio

from gateway.core.engines.engine import Engine
from gateway.serve.assembly import Gateway
from gateway.shared.vllm.answers import EngineSample, ModelCard
from loadtest.simulate.memory_engine import MemoryEngine
from loadtest.simulate.memory_wire import MemoryClient

HEALTH_WITHIN = (
    0.25  # of the health interval: a check that hangs counts as failed then, as in gateway.decider.telemetry
)
WELL = ("up", "stalled")  # conditions in which health checks and scrapes are answered


class Watch:
    """Telemetry in memory: the same samples and health checks at the same times, as timers, while the fleet has the
    engine."""

    def __init__(self, gateway: Gateway, engine: Engine, memory: MemoryEngine, client: MemoryClient) -> None:
        self._gateway = gateway
        self._engine = engine
        self._memory = memory
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._sample = sample_of(memory)
        longest = memory.config.profile.max_model_len
        self._cards = [ModelCard(id=name, max_model_len=longest) for name in memory.limits.models]

    def start(self, share: float) -> None:
        """First contact now; then checks spread over their interval."""
        self._healthy(ok=self._memory.condition in WELL)
        self._scrape()
        policy = self._gateway.policy.fleet
        self._loop.call_later(share * policy.poll, self._poll)
        self._loop.call_later(share * policy.health, self._check)

    def _forgotten(self) -> bool:
        return self._gateway.fleet.engines.get(self._engine.id) is not self._engine

    def _poll(self) -> None:
        if self._forgotten():
            return
        self._client.check(self._loop.time())
        self._scrape()
        self._loop.call_later(self._gateway.policy.fleet.poll, self._poll)

    def _scrape(self) -> None:
        memory, engine = self._memory, self._engine
        if memory.condition not in WELL or not engine.health.up:
            return
        if memory.condition == "up":
            self._sample = sample_of(memory)  # one that is stalled goes on to tell its last
        engine.sampled(self._sample, self._loop.time())
        self._gateway.engines.changed(self._engine)

    def _check(self) -> None:
        if self._forgotten():
            return
        if self._memory.condition == "stopped":
            within = max(HEALTH_WITHIN, HEALTH_WITHIN * self._gateway.policy.fleet.health)
            self._loop.call_later(within, self._checked, False)
        else:
            self._checked(ok=self._memory.condition in WELL)

    def _checked(self, ok: bool) -> None:
        if self._forgotten():
            return
        self._healthy(ok)
        interval = self._gateway.policy.fleet.health
        self._loop.call_later(interval if ok and self._engine.health.up else interval / 5, self._check)

    def _healthy(self, ok: bool) -> None:
        fleet, engine = self._gateway.fleet, self._engine
        if ok and not engine.health.up:
            fleet.has_models(engine, self._cards)
        engine.check(ok, self._loop.time())
        self._gateway.engines.changed(self._engine)


def sample_of(memory: MemoryEngine) -> EngineSample:
    """Sample that a scrape of its /metrics would give."""
    scheduler, stats = memory.engine.scheduler, memory.engine.stats
    return EngineSample(
        running=len(scheduler.running),
        waiting=scheduler.waiting,
        kv_usage=scheduler.blocks.usage,
        capacity_tokens=memory.config.profile.num_gpu_blocks * 16,
        preemptions_total=stats.preemptions,
        prompt_tokens_total=stats.prompt_tokens,
        generation_tokens_total=stats.generation_tokens,
        sleep_state="awake",
    )
