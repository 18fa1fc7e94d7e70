"""Simulated engine: schedule, run, postprocess. Pure: the driver brings the clock and does the waiting.

    result = engine.step(now)      # what the step wrote is known at once,
    ...                            # the driver lets result.duration pass,
    ...                            # and hands out the tokens at result.ends.

`add`, `abort`, `sleep` and `wake` may be called at any time between two steps.
"""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Literal

import msgspec

from loadtest.engine.blocks import Blocks
from loadtest.engine.engine_config import EngineConfig
from loadtest.engine.kv_transfer import KeptPrompts
from loadtest.engine.scheduler import EngineStep, Scheduler
from loadtest.engine.sequence import Sequence, SequenceState

SleepMode = Literal["abort", "wait"]
Weights = Literal["loaded", "offloaded", "discarded", "blank"]
TAGS = ("weights", "kv_cache")
LEAST_AHEAD = 3  # steps: fewer are sooner made than foreseen
ENDS = ("stop", "length", "abort", "error", "repetition")
DRAWN = 64  # steps whose jitter is drawn together


class Stats(msgspec.Struct):
    """Counters since the engine started, as its /metrics show them. `steps`: those that computed anything."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    success: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(ENDS, 0))


class Engine:
    """A simulated EngineCore. `stats` is what it has done, `scheduler` what it is doing."""

    def __init__(self, config: EngineConfig, *, engine_id: str = "sim") -> None:
        self.config = config
        self.stats = Stats()
        limits = config.profile
        self.scheduler = Scheduler(
            Blocks(limits.num_gpu_blocks, caching=config.caching),
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            policy=config.policy,
        )
        self.kept = KeptPrompts(self.scheduler, engine_id)
        self.asleep: int | None = None  # the level it sleeps at
        self.weights: Weights = "loaded"
        self.cache_ready = True
        self._held: dict[Sequence, None] = {}  # sent while it sleeps
        self._rng = random.Random(config.seed)  # noqa: S311 - jitter
        self._factors: list[float] = []  # jitter, drawn for steps to come
        self._next = 0  # of it, for the next step

    def __repr__(self) -> str:
        return f"<Engine {'awake' if self.asleep is None else f'asleep at level {self.asleep}'}, {self.scheduler!r}>"

    @property
    def busy(self) -> bool:
        """Whether another step would do anything."""
        return self.asleep is None and (self.scheduler.waiting > 0 or bool(self.scheduler.running))

    @property
    def garbage(self) -> bool:
        """Whether its weights are memory nobody has written to: woken from level 2 and not reloaded."""
        return self.weights == "blank"

    def add(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence. Sent to a sleeping engine it is held, in no gauge, until the engine is awake."""
        sequence.arrived_at = now
        if self.asleep is None:
            self.scheduler.add(sequence)
        else:
            sequence.state = SequenceState.HELD
            self._held[sequence] = None

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence, wherever it is; one that has ended stays ended."""
        if sequence in self._held:
            del self._held[sequence]
            sequence.state = SequenceState.ABORTED
        else:
            self.scheduler.abort(sequence)

    def unfinished(self) -> list[Sequence]:
        """Every sequence that has not ended: running, waiting, then held."""
        return [*self.scheduler.running, *self.scheduler.queued(), *self._held]

    def step(self, now: float) -> EngineStep:
        """Run a step from `now` on. Not to be called while asleep."""
        if self.asleep is not None:
            raise RuntimeError("a sleeping engine makes no steps")
        step = self.scheduler.schedule()
        exact = self.config.profile.exact(step.prefill_tokens, step.decoded, step.context, step.pairs)
        step.duration = exact * self._jitter(1)[0]
        self._next += 1
        step.ends = now + step.duration
        stats = self.stats
        stats.preemptions += step.preempted
        stats.generation_tokens += step.decoded
        stats.steps += step.prefill_tokens + step.decoded > 0
        for sequence in step.prefilled:
            stats.generation_tokens += sequence.output > 0
            if sequence.first_token_at < 0.0:
                sequence.first_token_at = step.ends
                stats.prompt_tokens += sequence.prompt
        for sequence in step.finished:
            stats.success[sequence.reason] += 1
        return step

    def _jitter(self, steps: int) -> list[float]:
        """Return the jitter factors of the next `steps` steps; `_next` advances as steps are made."""
        at = self._next
        if at + steps > len(self._factors):
            profile, rng = self.config.profile, self._rng
            self._factors = self._factors[at:] + [profile.factor(rng) for _ in range(max(DRAWN, steps))]
            at = self._next = 0
        return self._factors[at : at + steps]

    def look_ahead(self, now: float, most: int) -> list[float] | None:
        """Return the ends of the next steps from `now` on, at most `most`, while they only decode; None if looking
        ahead is not worthwhile. The steps are not made before `go_on`, which must be called before anything else."""
        scheduler, profile = self.scheduler, self.config.profile
        steps = scheduler.quiet(most) if self.asleep is None else 0
        if steps < LEAST_AHEAD:
            return None
        decoded, read = len(scheduler.running), scheduler.context
        fixed, context = profile.exact(0, decoded, 0), profile.context
        tokens = range(read + decoded, read + decoded * steps + 1, decoded)
        times = [(fixed + context * each) * factor for each, factor in zip(tokens, self._jitter(steps), strict=True)]
        times[0] += now
        return list(accumulate(times))

    def go_on(self, steps: int) -> None:
        """Make so many of those steps, and no more."""
        if not steps:
            return
        stats, decoded = self.stats, len(self.scheduler.running)
        self._next += steps
        self.scheduler.decode(steps)
        stats.generation_tokens += decoded * steps
        stats.steps += steps

    def sleep(self, level: int) -> list[Sequence]:
        """Sleep at level 1 (weights to host memory) or 2 (weights dropped). Return the sequences it aborted: none where
        the driver has waited until nothing was unfinished. An engine already asleep stays as it is."""
        if self.asleep is not None:
            return []
        aborted = self.unfinished()
        for sequence in aborted:
            self.scheduler.abort(sequence)
            self.stats.success["abort"] += 1
        self.asleep = level
        self.kept.drop()
        self.scheduler.blocks.reset()
        self.weights = "offloaded" if level == 1 else "discarded"
        self.cache_ready = False
        return aborted

    def wake(self, tags: list[str] | None = None) -> bool:
        """Bring back `weights`, `kv_cache`, or both; True once the engine is fully awake and takes up its work.

        Weights dropped at level 2 come back as unwritten memory: `garbage` until `reload_weights`.
        """
        if self.asleep is None:
            return True
        for tag in TAGS if tags is None else tags:
            if tag == "weights" and self.weights in ("offloaded", "discarded"):
                self.weights = "loaded" if self.weights == "offloaded" else "blank"
            elif tag == "kv_cache":
                self.cache_ready = True
        if not self.cache_ready or self.weights in ("offloaded", "discarded"):
            return False
        self.asleep = None
        for sequence in self._held:
            self.scheduler.add(sequence)
        self._held.clear()
        return True

    def reload_weights(self) -> None:
        """Read the weights again. Raises RuntimeError where there is no memory for them yet."""
        if self.weights in ("offloaded", "discarded"):
            raise RuntimeError("the weights' memory is not mapped: wake the tag weights first")
        self.weights = "loaded"
