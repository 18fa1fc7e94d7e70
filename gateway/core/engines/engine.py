"""Engine: one vLLM server, composed of its ledger, prefill queue, speed, adaptation, health, breaker and cache index.

Synchronous, no I/O; `now` is monotonic seconds. Read each part where it is needed (`engine.ledger.fits`). What changes
several parts at once is a method here: a hold, a sample, a health check, a restart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from gateway.core.checkpoint import SavedEngine
from gateway.core.engines.adapters import Adapters, adapters_of
from gateway.core.engines.breaker import BreakerState, CircuitBreaker
from gateway.core.engines.health import Health
from gateway.core.engines.hold import Hold
from gateway.core.engines.ledger import Ledger
from gateway.core.engines.model_turns import ModelTurns
from gateway.core.engines.prefill_queue import PrefillQueue
from gateway.core.engines.prefix_cache import PrefixCache
from gateway.core.engines.speed import Speed
from gateway.core.engines.transfers import Transfers
from gateway.core.engines.trouble import Trouble, asleep
from gateway.core.policy.policy import EngineEntry, Policy
from gateway.core.quantile import TTFTQuantile
from gateway.shared.fields import made_of
from gateway.shared.vllm.answers import EngineSample, ModelCard

STALE_POLLS = 3
READ_AHEAD = 0.5  # seconds of reading that may wait in an engine when another call starts
READ_AHEAD_LEAST = 2048  # prompt tokens that may, however slowly it reads: vLLM's step, of small GPUs
STEPS = 2.0  # of an engine, in which what was sent may wait for the next; one is not always as long as the mean
OVERRUN = 0.03  # of the KV cache above the fullest, where holds were too small
GROWTH = 0.7  # of the trim, each second in which tokens bind, times the share of the cache below the target
BACKLOG = 2  # calls that may wait inside an engine, whose own queue is first come, first served
SLOTS_GROWTH = 0.2  # of the slots at each sample with all in use, times the empty share of `kv_target`
MOST_KEPT = 0.98  # of the most that ran, with each sample of a queue in the engine
TRIM_BELOW = 0.95  # of what holds were measured to turn into


class Adaptation:
    """Learner of `trim` and `slots` of a ledger. Ask it once for each sample, after `Ledger.measure`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._behind = -1  # sequences that ran at the last sample, where a queue in the engine was behind them
        self._full_at = math.inf  # slots at which there was a queue in the engine last
        self._most_running = 0.0  # sequences; falls while there is a queue in the engine and fewer run

    def adapt_trim(self, sample: EngineSample, since: float, *, preempted: bool) -> None:
        """AIMD on the budget: up while tokens bind and measured KV is low, by GROWTH x what is empty; x 0.9 when it
        runs over. `since`: seconds since the last sample.

        Prefix sharing and short answers make holds too large, so a full ledger may leave the cache half empty. A queue
        inside an engine whose KV is low is a matter of slots, not of tokens, and leaves the trim alone.

        What runs over stays so for as long as its calls run. So trim falls no further than what the holds of now say:
        long calls would else take it to its least each time, and half of the cache would be empty until it has risen.
        """
        ledger, target = self._ledger, self._ledger.target
        crowded = sample.queued > BACKLOG and sample.kv_usage > target - 0.05
        if preempted or crowded or sample.kv_usage > ledger.fullest + OVERRUN:
            full = 1.0 if preempted else max(sample.kv_usage, target)
            told = TRIM_BELOW * ledger.held / (full * ledger.capacity)
            ledger.trim = max(0.5, ledger.trim * 0.9, min(ledger.trim, told))
        elif ledger.pressed_tokens and sample.kv_usage < target - 0.05:
            ledger.trim = min(4.0, ledger.trim * (1.0 + GROWTH * (target - sample.kv_usage)) ** since)

    def adapt_slots(self, sample: EngineSample, just_sent: int) -> None:
        """Learn `max_num_seqs`: a queue in the engine shows it, a full bound without one probes above it.

        Below the bound, the `just_sent` calls of the last steps only wait for the next one, and show nothing. Where
        more ran before, or more run by the next sample, the queue waits for prompts to be read, and not for places;
        with a full KV cache it may wait for blocks. The emptier the cache, the faster the bound grows, until there was
        a queue.
        """
        ledger = self._ledger
        if ledger.max_slots is not None:
            return
        waiting = sample.queued - just_sent
        if sample.kv_usage >= ledger.kv_target:
            waiting = min(waiting, BACKLOG)  # the queue may be for blocks
        kept = MOST_KEPT if waiting > BACKLOG else 1.0
        self._most_running = max(sample.running, kept * self._most_running)
        behind, self._behind = self._behind, sample.running if waiting > BACKLOG else -1
        if sample.running > self._full_at - BACKLOG:
            self._full_at = math.inf  # more run than there were places
        if waiting > BACKLOG:
            if sample.running <= behind:
                ledger.slots = self._full_at = max(1, int(self._most_running) + BACKLOG)
        elif ledger.pressed_slots and waiting <= 0 and sample.kv_usage < ledger.kv_target:
            empty = 1.0 - sample.kv_usage / ledger.kv_target if ledger.slots < self._full_at else 0.0
            ledger.slots += max(1, int(SLOTS_GROWTH * empty * ledger.slots))

    @property
    def full_at(self) -> int | None:
        """Slots at which there was a queue in the engine last; None: never."""
        return None if self._full_at == math.inf else int(self._full_at)

    def restore(self, saved: SavedEngine) -> None:
        """Go on with the saved bounds. Slots that the policy gives stay."""
        self._ledger.trim = saved.trim
        if self._ledger.max_slots is None:
            self._ledger.slots = saved.slots
            self._full_at = math.inf if saved.full_at is None else saved.full_at


class Engine:
    """vLLM server and its place in the fleet."""

    def __init__(
        self,
        id: str,
        url: str,
        policy: Policy,
        *,
        capacity: int | None = None,
        max_concurrency: int | None = None,
        models: Iterable[str] = (),
    ) -> None:
        # `label`: the name for operators: the policy's, PROFILE@SIDECAR of a sidecar's, else the id
        self.id = self.label = id
        self.name = "engine"  # for clients, who see no address
        self.number = 0  # among the engines of its fleet, as they joined it
        self.url = url
        self.policy = policy
        self.provider = ""  # the policy's name for it, where it is an API outside the house
        self.priorities = False  # it runs vLLM's priority scheduling: calls are sent with the rank of their class
        self.only_models = frozenset(models)  # what the policy lets this engine serve; empty: all it has
        self.told: tuple[ModelCard, ...] = ()  # all that it has, as it told last
        self.models: dict[str, ModelCard] = {}  # of them, those that it may serve
        self.adapters: Adapters | None = None  # LoRA adapters among them
        self.draining = False
        self.drained = False  # by an operator
        self.closed = False  # by its sidecar, which puts it to sleep or ends it
        self.leaving = False  # it is forgotten once it has nothing left to do: nobody waits for it
        self.sample: EngineSample | None = None
        self.sampled_at = -math.inf
        self.prefills = PrefillQueue()
        self.ledger = Ledger(policy, self.prefills, capacity, max_concurrency)
        self.speed = Speed()
        self.firsts = TTFTQuantile()  # of a provider, from sending
        self.adaptation = Adaptation(self.ledger)
        self.health = Health()
        self.breaker = CircuitBreaker(policy.breaker)
        self.cache = PrefixCache()
        self.transfers = Transfers()
        self.model_turns = ModelTurns()

    def __repr__(self) -> str:
        state, ledger = "up" if self.health.up else "down", self.ledger
        slots = f"{ledger.in_flight}/{ledger.slots}"
        return f"<Engine {self.id} {state} held={ledger.held}/{ledger.budget} in_flight={slots}>"

    def apply(self, policy: Policy) -> None:
        """Go by `policy` from now on. What is learned and what is held stays."""
        self.policy = policy
        self.breaker.policy = policy.breaker
        self.ledger.apply(policy)

    def go_by(self, entry: EngineEntry) -> None:
        """Take the policy's entry for this engine."""
        self.ledger.go_by(entry)
        self.only_models = frozenset(entry.models)
        self.name, self.label = entry.name or f"engine-{self.number}", (not self.provider and entry.name) or self.id
        self.priorities = entry.scheduling_policy == "priority"
        self.transfers.group, self.transfers.role = entry.transfer or "", entry.role

    def expect_sizes(self, capacity: int | None, slots: int | None) -> None:
        """Take the KV tokens that the engine will probably hold, and the calls that it will run at once, until it
        reports or shows its own."""
        if self.sample is None:
            self.ledger.expect_sizes(capacity, slots)

    def serve(self, cards: Iterable[ModelCard]) -> None:
        """Take the engine's own list of models, cut to what the policy lets it serve."""
        self.told, allowed = tuple(cards), self.only_models
        self.models = {card.id: card for card in self.told if not allowed or card.id in allowed}
        self.adapters = adapters_of(self.models, self.adapters)

    # -- calls --------------------------------------------------------------------------------------------------

    def hold(
        self,
        cost: int,
        prefill: int,
        now: float,
        class_name: str = "",
        *,
        output: int | None = None,
        teaches: bool = True,
    ) -> Hold:
        """Promise `cost` tokens, of which `prefill` prompt tokens are still to be read, and `output` to be written
        (None: all). The caller asked `ledger.fits`. `teaches`: its first byte will tell how fast they were read."""
        prefills = self.prefills
        if prefills.unseen:
            prefills.advance(now)
        reading = prefills.reading(prefill, now) if teaches else 0
        output = cost if output is None else output
        if self.provider:
            prefill = 1  # a provider reads prompts beside each other
        hold = Hold(self, cost, prefill, now, class_name, output=output, reading=reading)
        self.ledger.add(hold)
        prefills.add(hold)
        return hold

    def takes(self, cost: int, class_name: str) -> bool:
        """Whether a call of `cost` tokens may start now: the ledger has room, and no more than READ_AHEAD seconds of
        prompts wait to be read. An engine reads in the order of arrival, so a longer queue there would make important
        calls wait for others' prompts, and fill the KV cache before the first answer tells what calls need. Prompts of
        whole answers are left out: nothing tells in time that they are read, and the engine would wait for more."""
        if not self.ledger.fits(cost, class_name):
            return False
        most = max(READ_AHEAD_LEAST, READ_AHEAD * self.speed.prefill_rate)
        return self.prefills.queued_telling <= most

    def remember(self, prefix: tuple[int, ...], tokens: int, now: float) -> None:
        """Note that the engine has read, or has just finished with, this prompt of `tokens`. Nobody knows the size of a
        provider's cache, so nothing is noted of that."""
        if not self.provider:
            self.cache.use(prefix, tokens, self.ledger.capacity, now)

    # -- samples ------------------------------------------------------------------------------------------------

    def fresh(self, now: float) -> bool:
        """Whether the last sample is at most three polls old. With an older one, trim and slots freeze, and the ledger
        is alone in charge."""
        return now - self.sampled_at <= STALE_POLLS * self.policy.fleet.poll

    def sampled(self, sample: EngineSample, now: float) -> None:
        """Take a sample in: capacity, excess, trim and slots. An engine that says it sleeps is out at once. One that is
        draining gets no calls anyway, and whoever put it to sleep says when it is back."""
        trouble = None if self.draining else asleep(sample, now)
        if trouble is not None:
            self.down(trouble)
        before = self.sample
        since = now - self.sampled_at
        self._notice_stall(sample, before if self.fresh(now) else None, now)
        self.sample, self.sampled_at, self.health.unmeasured = sample, now, ""
        self.ledger.measure(sample)
        preempted = before is not None and sample.preemptions_total > before.preemptions_total
        self.adaptation.adapt_trim(sample, min(since, 5.0), preempted=preempted)
        recent = now - STEPS * self.speed.tpot
        self.adaptation.adapt_slots(sample, self.prefills.sent_after(recent))
        self.prefills.pass_begun(sample.waiting, recent)
        if sample.lora is not None and self.adapters is not None:
            self.adapters.told(sample.lora)
        self.speed.sampled(self.policy.fleet.poll, busy=self.ledger.in_flight > 0)
        self.ledger.pressed_tokens = self.ledger.pressed_slots = False

    def _notice_stall(self, sample: EngineSample, before: EngineSample | None, now: float) -> None:
        """Take the engine out if it has calls and reads and writes no token, by its samples and by what comes back.
        `before`: the sample before, if recent."""
        moved = before is None or not sample.tokens_total or sample.tokens_total != before.tokens_total
        moved, self.prefills.begun = moved or self.prefills.begun, False
        waits = not moved and bool(sample.running + sample.waiting)
        reading = self.speed.tpot + self.prefills.queued / self.speed.prefill_rate
        probed = self.breaker.state is not BreakerState.CLOSED
        trouble = self.health.stall(waits, self.prefills.awaited, reading, now, probed=probed)
        if trouble is not None:
            self.breaker.stalled(now)
            self.down(trouble)

    def advance(self, now: float) -> None:
        """Time has passed. What a sample said that is too old to be true is dropped: an outage of scrapes must neither
        stop dispatch nor shorten answers. Its breaker may be due for a probe, and prompts count as read."""
        ledger = self.ledger
        if (ledger.excess or ledger.kv_usage) and not self.fresh(now):
            ledger.excess, ledger.kv_usage = 0, 0.0
        self.breaker.advance(now)
        self.prefills.advance(now)

    # -- health -------------------------------------------------------------------------------------------------

    def check(self, ok: bool, now: float, trouble: Trouble | None = None) -> None:
        """Take one health check, as `Health.check`."""
        slow_start = self.policy.routing.slow_start
        if ok and self.health.unmeasured:
            # No sample will doubt its rates.
            self.speed.sampled(self.policy.fleet.health, busy=self.ledger.in_flight > 0)
        if self.health.check(ok, now, trouble, failing_at=self.breaker.failing_at, slow_start=slow_start):
            self.down()

    def ready(self, now: float) -> None:
        """Take the engine in at once: its sidecar has started or woken it. Its cache is empty, its speed is
        unknown, and what it failed before is over."""
        self.health.ready(now)
        self.ledger.excess = 0
        self.forget_cache()
        if not self.ledger.in_flight:
            self.breaker = CircuitBreaker(self.policy.breaker)

    def down(self, trouble: Trouble | None = None) -> None:
        """Out of the fleet until health says otherwise. Its cache may be gone, so its prefixes are forgotten."""
        self.health.down(trouble)
        self.ledger.excess = 0
        self.forget_cache()

    def forget_cache(self) -> None:
        """Forget the engine's cache: it was restarted, slept, or reset."""
        self.cache.clear()
        if self.adapters is not None:
            self.adapters.forget()

    # -- checkpoints --------------------------------------------------------------------------------------------

    def checkpoint(self, now: float, blocks: int) -> SavedEngine:
        """Return the learned rates and bounds, for the next decider, and at most so many blocks of the prefix index."""
        return made_of(
            SavedEngine,
            self.speed,
            id=self.id,
            trim=self.ledger.trim,
            slots=self.ledger.slots,
            full_at=self.adaptation.full_at,
            breaker=self.breaker.checkpoint(now),
            prefixes=self.cache.checkpoint(blocks, now),
            drained=self.drained,
        )

    def restore(self, saved: SavedEngine, then: float, *, prefixes: bool) -> None:
        """Go on with what an earlier decider had learned by `then`. Slots that the policy gives stay. `prefixes`: its
        hashes have the key of ours."""
        self.speed.restore(saved)
        self.adaptation.restore(saved)
        self.breaker.restore(saved.breaker, then)
        self.drained = saved.drained  # one of when we led may be lifted since
        self.draining = self.drained or self.closed or self.leaving
        if prefixes:
            self.cache.restore(saved.prefixes, then)
