"""Runs behind the figures: their engines, their traffic, their length, and the tries that count.

Engines are `a100-8b` with 8,192 KV blocks (131,072 tokens), so that memory, and not the 256 places of a batch, is what
binds. Traffic is three classes; clients behave as openai-python does and give up at their class's deadline.
*Capacity* is the most those engines do when they are asked directly, by as many closed-loop clients as give the most
(no gateway, no target): the best of a sweep, in tokens (prompt and output) and in calls per second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from loadtest.clients.calls import Try
from loadtest.clients.retries import Clients
from loadtest.engine.engine_config import engine_config
from loadtest.engine.profile_file import profile_of
from loadtest.load.plan import poisson
from loadtest.load.scenario import find, load
from loadtest.load.workload import Kind, Planned
from loadtest.simulate import vtime
from loadtest.simulate.inprocess import ClassTarget, GatewayTarget, targets_of
from loadtest.simulate.memory_engine import MemoryEngine
from loadtest.simulate.rivals.router import Router
from loadtest.simulate.rivals.rules import RULES
from loadtest.simulate.simulation import SimulationRun

PROFILE = "a100-8b"
LATENCY = profile_of(PROFILE)
# The default policy, and a target for the first token of `default`, by which to tell who serves it in time.
POLICY = b"""
classes:
  interactive: {weight: 8, ttft: 2s, deadline: 60s, max_queue: 256}
  default: {weight: 4, ttft: 10s, deadline: 5m, max_queue: 512}
  batch: {weight: 1, deadline: 1h, max_queue: 4096}
"""
BLOCKS = 8192
MIX = load(find("mixed")).workload.mix
SWEEP = (176, 208, 240, 256)  # closed-loop clients per engine


class Saturation(msgspec.Struct, frozen=True):
    """Per second, over all engines. `clients`: per engine, where it was reached."""

    tokens: float
    calls: float
    clients: int


class Setting(msgspec.Struct, kw_only=True):
    """Setting that all figures share. Times in seconds; `progress(what, share)` is told how far a run is.

    Raises ValueError for a policy that cannot be used here.
    """

    engines: int = 4
    seed: int = 1
    policy: bytes = POLICY
    warm: float = 60.0
    measured: float = 120.0
    without: str = "round_robin"  # rule that chooses engines where there is no gateway
    mix: tuple[Kind, ...] = MIX
    progress: Callable[[str, float], None] = lambda what, share: None
    capacity: Saturation | None = None
    traces: dict[str, Path] = {}  # files of recorded traffic, by the `trace` of a load
    left: list[str] = []  # by the gateways of its runs
    targets: dict[str, ClassTarget] = {}

    def __post_init__(self) -> None:
        self.targets = targets_of(self.policy)
        missing = [kind.class_name for kind in self.mix if kind.class_name not in self.targets]
        if missing:
            raise ValueError(f"the figures' traffic is of classes the policy has not: {', '.join(missing)}")

    @property
    def ends(self) -> float:
        return self.warm + self.measured

    def saturated(self) -> Saturation:
        """The capacity, measured once."""
        if self.capacity is None:
            found = []
            for clients in SWEEP:
                calls = poisson(self.mix, 1000.0, 1e9, self.seed)
                tries = self.run(f"capacity, {clients} clients an engine", calls, closed=clients, gateway=False)
                done = [t for t in tries if t.outcome == "ok"]
                seconds = self.measured
                found.append(Saturation(sum(map(tokens, done)) / seconds, len(done) / seconds, clients))
            self.capacity = max(found, key=lambda capacity: capacity.tokens)
        return self.capacity

    def overload(
        self, factor: float, *, gateway: bool = True, clients: Clients | None = None, name: str = ""
    ) -> list[Try]:
        """The mix at `factor` times the capacity, with retrying clients."""
        what = f"{factor:g}x load{'' if gateway else ', round robin'}{name}"
        calls = poisson(self.mix, factor * self.saturated().calls, self.ends, self.seed)
        return self.run(what, calls, gateway=gateway, clients=clients)

    def run(
        self,
        what: str,
        calls: Iterable[Planned],
        *,
        gateway: bool = True,
        clients: Clients | None = None,
        closed: int = 0,
        grace: float = 0.0,
        by_load: bool = False,
    ) -> list[Try]:
        """Run this setting's engines, as `SimulationRun.until` and `GatewayTarget` have it. Return the tries that ended
        after the warm-up."""
        waits = Clients(patience={name: target.deadline for name, target in self.targets.items()})

        async def whole() -> list[Try]:
            engines = [an_engine(self.seed * 100 + number) for number in range(self.engines)]
            weir = GatewayTarget(self.policy, engines, seed=self.seed, by_load=by_load) if gateway else None
            target = weir or Router(engines, RULES[self.without])
            run = SimulationRun(
                engines,
                target,
                calls,
                clients=(Clients() if closed else waits) if clients is None else clients,
                seed=self.seed,
                closed=closed * len(engines),
                sampled=lambda sample: self.progress(what, min(1.0, sample[0] / self.ends)),
            )
            await run.until(self.ends, grace=grace)
            self.left += [f"{what}: {left}" for left in weir.left_over()] if weir else ()
            return run.tries

        # A run at ten times the load is hundreds of thousands of tries: those of the warm-up are not kept.
        return [tried for tried in vtime.run(whole()) if tried.finished >= self.warm]


def an_engine(seed: int) -> MemoryEngine:
    """Engine of the figures."""
    return MemoryEngine(engine_config(LATENCY, num_gpu_blocks=BLOCKS, seed=seed), seed=seed)


def measured(setting: Setting, tries: Iterable[Try]) -> list[Try]:
    """The tries that ended in the measured part of a run, but not by its end."""
    return [t for t in tries if setting.warm <= t.finished < setting.ends and t.outcome != "unfinished"]


def tokens(tried: Try) -> int:
    """Prompt and output."""
    return tried.prompt_tokens + tried.completion_tokens


def in_time(tried: Try, targets: dict[str, ClassTarget]) -> bool:
    """Whether a try was answered well and within its class's two targets, counted from its sending."""
    target = targets[tried.class_name]
    return (
        tried.outcome == "ok"
        and tried.first_byte - tried.sent <= target.ttft
        and tried.finished - tried.sent <= target.deadline
    )
