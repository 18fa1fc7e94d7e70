"""Fleet and engines: the ledger of what was promised on each, and what is known of it.

The ledger leads and the scrape corrects. A `Hold` reserves KV tokens on one engine for one call. The sum of holds is
the engine's ledger and is exact at every moment, while vLLM's gauges lag by a poll and more. What the engine measured
above the ledger at its last sample (`excess`: other users of the engine, holds that were too small) is added to it.

Synchronous, no I/O; `now` is monotonic seconds. Only `Engine.hold` and `Hold.release` change a ledger. Questions, such
as `fits` and `reading`, change nothing; `advance` and `press` say that time has passed, and that a call found no room.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator

from gateway.core.checkpoint import SavedEngine
from gateway.core.engines.adapters import Adapters, adapters_of
from gateway.core.engines.breaker import BreakerState, CircuitBreaker
from gateway.core.engines.cache_age import CacheAge
from gateway.core.engines.origin import engine_id
from gateway.core.engines.prefix_cache import PrefixCache
from gateway.core.engines.trouble import STALLED, Trouble, asleep
from gateway.core.policy.policy import EngineEntry, Policy
from gateway.shared.vllm.answers import EngineSample, ModelCard

__all__ = ["Engine", "Fleet", "Hold", "engine_id"]

FIRST_BYTES_REMEMBERED = 64
FIRST_BYTES_NEEDED = 8
PREFILL_RATE = 10_000.0  # tokens/s until first bytes teach better
UNUSED = (0, 0)
TPOT = 0.03  # seconds per output token until answers teach better
PACE = 0.005  # seconds per output token at its fastest, until it is known
FASTEST = 0.0005  # seconds per output token of any sequence
PACE_WEIGHT = 0.02  # of one slower answer
TPOT_TOKENS = 8  # fewer say more of the network than of the engine
TPOT_WEIGHT = 0.1  # of one answer in the mean
SENT_REMEMBERED = 128  # calls
STEPS = 2.0  # of an engine, in which what was sent may wait for the next; one is not always as long as the mean
RATE_TOKENS = 64  # prompt tokens to be read; fewer teach nothing
MOST_SPREAD = 3.0  # one that stalls is no reason to doubt all
LEAST_READING = 0.25  # of the time to a first token, whatever a step takes
RATE_BELIEVED = 30.0  # seconds without a first byte after which a low rate is doubted
FLOW = 3.0  # seconds in which the flow of tokens falls by e
OVER = 1.15  # of the budget, where the last call that starts within the budget may end
FULLER = 1.16  # times `kv_target`, the budget where nothing of what is held is output
FULLEST = 0.93  # of the KV cache, the largest such budget
FULL = 0.96  # of the KV cache, where the last call may then end at most
GROWING = 0.25  # share of held tokens that is output, from which on the budget is `kv_target`
OVERRUN = 0.03  # of the KV cache above that, where holds were too small
GROWTH = 0.7  # of the trim, each second in which tokens bind, times the share of the cache below the target
MOST_KEPT = 0.98  # of the most that ran, with each sample of a queue in the engine
LATELY = 120.0  # seconds in which the most that others held falls by e
STALE_POLLS = 3
SILENT = 30.0  # seconds in which an engine may read and write no token while calls wait for it
SILENT_PROBED = 10.0  # the same, while its breaker lets through probes alone
SILENT_READING = 3.0  # times the time predicted for the prompts that it has yet to read, beside them
TRIM_BELOW = 0.95  # of what holds were measured to turn into
HITS_IN = 2  # good health checks that bring an engine back
MISSES_OUT = 3  # bad ones that take it out


def ceiling(kv_target: float) -> float:
    """Share of the KV cache up to which calls may start, where `kv_target` is what the budget promises."""
    return min(1.0, OVER * kv_target)


class Hold:
    """KV tokens reserved on one engine for one call. `release` gives them back, once; more calls change nothing."""

    __slots__ = ("awaited", "class_name", "engine", "live", "output", "prefill", "reading", "taken_at", "tokens")

    def __init__(
        self, engine: Engine, tokens: int, output: int, prefill: int, reading: float, taken_at: float, class_name: str
    ) -> None:
        self.engine = engine
        self.tokens = tokens
        self.output = output  # of the tokens; the others are the prompt's
        self.class_name = class_name
        self.prefill = prefill  # prompt tokens the engine has yet to read for this call; 0 after the first byte
        self.reading = reading  # `Engine.reading` of it, when it was taken
        self.taken_at = taken_at
        self.awaited = True  # its first byte
        self.live = True

    def first_byte(self, now: float, *, teach: bool) -> None:
        """The engine has read the prompt: it leaves the prefill queue. Where that is what the first byte tells (in a
        stream; a whole answer's comes after its last token), it teaches the engine's prefill rate."""
        if self.prefill:
            if teach:
                self.engine.learn_first_byte(self.reading, now - self.taken_at)
            self.prefill_done()
        self.answered()

    def answered(self) -> None:
        """The first byte is here."""
        if self.awaited:
            self.awaited = False
            self.engine.awaited -= 1

    def prefill_done(self) -> None:
        self.engine.prefill_queued -= self.prefill
        self.prefill = 0

    def release(self) -> None:
        if self.live:
            self.live = False
            engine = self.engine
            engine.held -= self.tokens
            engine.output_held -= self.output
            engine.in_flight -= 1
            used = engine.used[self.class_name]
            used[0] -= self.tokens
            used[1] -= 1
            self.prefill_done()
            self.answered()
            if not engine.in_flight:
                engine.unseen.clear()


class Engine:
    """vLLM server: its ledger, its last sample, its learned rates, its place in the fleet.

    `capacity` is tokens of KV cache; `trim` scales the budget to what holds really turn into; `slots` bounds the calls
    in flight, since vLLM's `max_num_seqs` is in no metric and short contexts run out of batch long before KV.
    """

    __slots__ = (
        "_behind",
        "_first_bytes",
        "_flow",
        "_flow_at",
        "_full_at",
        "_most_running",
        "_others",
        "_pressed_slots",
        "_pressed_tokens",
        "_sent",
        "_silent_since",
        "_unsorted",
        "_untaught",
        "adapters",
        "awaited",
        "back_at",
        "breaker",
        "cache_age",
        "capacity",
        "check_failures",
        "checked_at",
        "doubted",
        "draining",
        "excess",
        "failed_call",
        "fixed_capacity",
        "headrooms",
        "held",
        "hits",
        "id",
        "in_flight",
        "label",
        "leaving",
        "max_slots",
        "misses",
        "models",
        "name",
        "number",
        "only_models",
        "outage_at",
        "output_held",
        "pace",
        "policy",
        "prefill_queued",
        "prefill_rate",
        "prefixes",
        "priorities",
        "reserves",
        "sample",
        "sampled_at",
        "slots",
        "tpot",
        "trim",
        "trouble",
        "ttft_spread",
        "unmeasured",
        "unseen",
        "up",
        "url",
        "used",
    )

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
        self.name = self.number = "engine"  # for clients, who see no address; its fleet numbers it
        self.url = url
        self.policy = policy
        self.priorities = False  # it runs vLLM's priority scheduling: calls are sent with the rank of their class
        self.fixed_capacity = capacity is not None
        self.capacity = capacity or policy.budget.capacity
        self.max_slots = max_concurrency
        self.slots = max_concurrency or policy.budget.max_concurrency
        self.only_models = frozenset(models)  # what the policy lets this engine serve; empty: all it has
        self.models: dict[str, ModelCard] = {}
        self.adapters: Adapters | None = None  # LoRA adapters among them
        self.up = False
        self.draining = False
        self.leaving = False  # it is forgotten once it has nothing left to do: nobody waits for it
        self.hits = self.misses = 0
        self.back_at = self.checked_at = -math.inf
        self.outage_at = math.inf  # first check or call that failed since it last answered one; inf: none has
        self.trouble: Trouble | None = None  # the last; of an engine that is up too
        self.check_failures: dict[str, int] = {}  # by reason
        # What the last call that failed met; whether it answered 404, so that its list of models may have changed; why
        # it tells no metrics.
        self.failed_call, self.doubted, self.unmeasured = "", False, ""
        self.held = self.output_held = self.in_flight = self.prefill_queued = 0
        self.awaited = 0  # calls whose first byte has not come
        self._silent_since = -math.inf  # it has read and written no token for them
        self.excess = 0
        self.trim = 1.0
        self.sample: EngineSample | None = None
        self.sampled_at = -math.inf
        self.prefill_rate = PREFILL_RATE
        self.ttft_spread = 1.0  # how many times its prediction the slowest first token of ten takes
        self.unseen: deque[tuple[float, Hold]] = deque()  # in order of their predicted first bytes, roughly
        self._untaught = 0  # samples since a first byte taught the rate
        self._unsorted = 0  # first bytes since the rate was last computed
        self._first_bytes: deque[float] = deque(maxlen=FIRST_BYTES_REMEMBERED)
        self._pressed_tokens = self._pressed_slots = False
        self._flow, self._flow_at = 0.0, -math.inf  # KV tokens of what was sent lately, as of then
        self._behind = -1  # sequences that ran at the last sample, where a queue in the engine was behind them
        self._full_at = math.inf  # slots at which there was a queue in the engine last
        self._most_running = 0.0  # sequences; falls while there is a queue in the engine and fewer run
        self._others: dict[str, tuple[float, float]] = {}  # class with headroom -> most that others held lately, when
        self._sent: deque[float] = deque(maxlen=SENT_REMEMBERED)  # when the last holds were taken
        self.prefixes = PrefixCache()
        self.cache_age: CacheAge | None = None  # where the engine publishes what becomes of its cache
        self.tpot = TPOT
        self.pace = PACE  # seconds per output token of its fastest answers of late: what it can have written
        self.breaker = CircuitBreaker(policy.breaker)
        self.used: dict[str, list[int]] = {}  # class -> tokens and calls that are held
        self.reserves: tuple[tuple[str, float], ...] = ()
        self.headrooms: dict[str, float] = {}
        self.apply(policy)

    def apply(self, policy: Policy) -> None:
        """Go by `policy` from now on. What is learned and what is held stays."""
        self.policy = policy
        self.breaker.policy = policy.breaker
        self.reserves = tuple((name, each.reserve) for name, each in policy.classes.items() if each.reserve)
        self.headrooms = {name: each.headroom for name, each in policy.classes.items() if each.headroom}

    def go_by(self, entry: EngineEntry) -> None:
        """Take the policy's entry for this engine."""
        self.max_slots = entry.max_concurrency
        if entry.max_concurrency is not None:
            self.slots = entry.max_concurrency
        self.only_models = frozenset(entry.models)
        self.name, self.label = entry.name or self.number, entry.name or self.id
        self.priorities = entry.scheduling_policy == "priority"

    def __repr__(self) -> str:
        state = "up" if self.up else "down"
        return f"<Engine {self.id} {state} held={self.held}/{self.budget} in_flight={self.in_flight}/{self.slots}>"

    # -- the ledger ---------------------------------------------------------------------------------------------

    @property
    def target(self) -> float:
        """Share of the KV cache that may be promised: the policy's `kv_target`, and more where little of what is held
        is output. A prompt's tokens are known; only output grows, and may grow beyond its estimate."""
        target = self.policy.budget.kv_target
        if not self.held:
            return target
        known = max(0.0, 1.0 - self.output_held / self.held / GROWING)
        return target + known * max(0.0, min(FULLEST, FULLER * target) - target)

    @property
    def fullest(self) -> float:
        """Share of the KV cache up to which the last call may go. Above the `ceiling` of the policy's own target: up to
        FULL, as modes begin there."""
        return max(ceiling(self.policy.budget.kv_target), min(FULL, ceiling(self.target)))

    @property
    def budget(self) -> int:
        """Tokens that may be promised: capacity x target x trim."""
        return int(self.capacity * self.target * self.trim)

    @property
    def largest(self) -> int:
        """The largest call this engine could ever take: its ceiling without the trim of the moment."""
        return round(self.capacity * ceiling(self.policy.budget.kv_target))

    @property
    def ceiling(self) -> int:
        """Tokens up to which the last call may go that starts within the budget. Were none to go beyond the budget, a
        call of a tenth of the cache would leave the last tenth empty."""
        return round(self.capacity * self.trim * self.fullest)

    @property
    def load(self) -> int:
        """Tokens promised, plus what the engine measured above the ledger at its last sample."""
        return self.held + self.excess

    def watermark(self, without: int = 0) -> float:
        """Share of the KV cache in use: as measured, or what the holds of now will come to, whichever is more; as if
        `without` tokens of these were not held."""
        held = (self.held - without) / self.trim / self.capacity
        return held if self.sample is None else max(held, self.sample.kv_usage)

    def fits(self, cost: int, class_name: str = "") -> bool:
        """Whether a call of `cost` tokens may start now: the engine is within its budget, and with the call within its
        ceiling. An idle engine takes anything up to `largest`.

        What other classes have in reserve and do not use is not there for this one, nor is anything above the budget.
        """
        if self.in_flight >= self.slots:
            return False
        if not self.in_flight and cost <= self.largest:
            return True
        load = self.held + self.excess
        # Below the policy's own target, which is the least of all, nothing else has to be known.
        if load + cost >= int(self.capacity * self.policy.budget.kv_target * self.trim) and (
            load >= self.budget or load + cost > self.ceiling
        ):
            return False
        if not self.reserves:
            return True
        budget = self.budget
        room, slots = budget - load - cost, self.slots - self.in_flight
        for name, share in self.reserves:
            if name != class_name:
                tokens, calls = self.used.get(name, UNUSED)
                room -= max(0, int(share * budget) - tokens)
                slots -= max(0, round(share * self.slots) - calls)
        return room >= 0 and slots > 0

    def leaves_headroom(self, cost: int, class_name: str, now: float) -> bool:
        """Whether the engine has read all its prompts, and has room for the most that other classes held lately to come
        back and grow as the class's policy says, if a call of `cost` tokens starts. Slots that are learned need none:
        only a full bound shows whether there are more."""
        headroom = self.headrooms.get(class_name, 0.0)
        if not headroom or not self.in_flight:
            return True
        tokens, calls = self.used.get(class_name, UNUSED)
        others = (1.0 + headroom) * self._others_held(class_name, now)
        if self.prefill_ahead(now) or tokens + self.excess + cost + others > self.budget:
            return False
        return self.max_slots is None or self.in_flight + headroom * (self.in_flight - calls) < self.slots

    def _others_held(self, class_name: str, now: float) -> float:
        """Tokens that other classes hold, or held at most lately: who comes in waves will come again."""
        most, at = self._others.get(class_name, (0.0, now))
        return max(self.held - self.used.get(class_name, UNUSED)[0], most * math.exp((at - now) / LATELY))

    def press(self, cost: int) -> None:
        """A call of `cost` tokens wanted to start: what had no room for it, slots or tokens, is under pressure until
        the next sample, which may learn that there is more."""
        if self.in_flight >= self.slots:
            self._pressed_slots = True
        elif self.in_flight or cost > self.largest:
            self._pressed_tokens |= self.load >= self.budget or self.load + cost > self.ceiling

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
        (None: all). The caller asked `fits`. `teaches`: its first byte will tell how fast they were read."""
        output = cost if output is None else output
        if self.unseen:
            self._pass_unseen(now)
        reading = self.reading(prefill, now) if teaches else 0
        self.held += cost
        self.output_held += output
        self.in_flight += 1
        self.awaited += 1
        self._sent.append(now)
        if now >= self._flow_at:
            self._flow, self._flow_at = self.flow(now) + cost, now
        else:  # an earlier decider's calls were sent before
            self._flow += cost * math.exp((now - self._flow_at) / FLOW)
        used = self.used.get(class_name)
        if used is None:
            used = self.used[class_name] = [0, 0]
        used[0] += cost
        used[1] += 1
        for name in self.headrooms:
            if name != class_name:
                self._others[name] = self._others_held(name, now), now
        self.prefill_queued += prefill
        if self.in_flight >= self.slots:
            self._pressed_slots = True
        return Hold(self, cost, output, prefill, reading, now, class_name)

    def expect_first_byte(self, hold: Hold, at: float) -> None:
        """A call whose first byte will not tell when its prompt was read: it counts as read at the predicted time."""
        self.unseen.append((at, hold))

    def _pass_unseen(self, now: float) -> None:
        """Count as read what should be by now."""
        unseen = self.unseen
        while unseen and (unseen[0][0] <= now or not unseen[0][1].prefill):
            unseen.popleft()[1].prefill_done()

    def _pass_begun(self, waiting: int, now: float) -> None:
        """Count as read what the engine has begun, whatever was predicted: it reads in order, so only the last
        `waiting` calls wait, those sent within its last steps, and the one before them is being read."""
        if unseen := self.unseen:
            since = now - STEPS * self.tpot
            unread = waiting + 1 + sum(1 for _, hold in unseen if hold.taken_at > since)
            for _ in range(len(unseen) - unread):
                unseen.popleft()[1].prefill_done()

    def prefill_ahead(self, now: float) -> int:
        """Prompt tokens that wait to be read on this engine."""
        ahead = self.prefill_queued
        for at, hold in self.unseen:
            if at > now and hold.prefill:
                break
            ahead -= hold.prefill
        return ahead

    def reading(self, prefill: int, now: float) -> int:
        """Prompt tokens to read until `prefill` tokens more are read: those that wait to be read included."""
        return (self.prefill_ahead(now) if self.unseen else self.prefill_queued) + prefill  # asked twice for every call

    def flow(self, now: float) -> float:
        """KV tokens of the calls that were sent lately, each falling by e in FLOW seconds."""
        return self._flow * math.exp(min(0.0, self._flow_at - now) / FLOW) if self._flow else 0.0

    # -- samples and learned rates ------------------------------------------------------------------------------

    def fresh(self, now: float) -> bool:
        """A sample older than three polls is stale: trim and slots freeze, and the ledger is alone in charge."""
        return now - self.sampled_at <= STALE_POLLS * self.policy.fleet.poll

    def sampled(self, sample: EngineSample, now: float) -> None:
        """Take a sample in: capacity, excess, trim and slots. An engine that says it sleeps is out at once. One that is
        draining gets no calls anyway, and whoever put it to sleep says when it is back."""
        trouble = None if self.draining else asleep(sample, now)
        if trouble is not None:
            self.down(trouble)
        before, self.sample, self.unmeasured = self.sample, sample, ""
        since = now - self.sampled_at
        self._notice_stall(sample, before if since <= STALE_POLLS * self.policy.fleet.poll else None, now)
        self.sampled_at = now
        if sample.capacity_tokens and not self.fixed_capacity:
            self.capacity = sample.capacity_tokens
        self.excess = max(0, int(sample.kv_usage * self.capacity) - self.held)
        preempted = before is not None and sample.preemptions_total > before.preemptions_total
        self._adapt_trim(sample, preempted, min(since, 5.0))
        self._adapt_slots(sample, now)
        self._pass_begun(sample.waiting, now)
        if sample.lora is not None and self.adapters is not None:
            self.adapters.told(sample.lora)
        self._untaught += 1
        if self._untaught * self.policy.fleet.poll > RATE_BELIEVED:
            # A rate learned in a bad moment would keep every call away, and so would never be mended.
            self.prefill_rate = max(self.prefill_rate, PREFILL_RATE)
            self.tpot = min(self.tpot, TPOT)
        self._pressed_tokens = self._pressed_slots = False

    def _notice_stall(self, sample: EngineSample, before: EngineSample | None, now: float) -> None:
        """Take the engine out if it has calls, of which some wait for their first byte, and reads and writes no token,
        whatever its health checks say: an engine core that hangs leaves its HTTP server well. `before`: the sample
        before, if recent."""
        moved = before is None or not sample.tokens_total or sample.tokens_total != before.tokens_total
        if moved or not (self.up and self.awaited and sample.running + sample.waiting):
            self._silent_since = now
            return
        silent = now - self._silent_since
        most = SILENT if self.breaker.state is BreakerState.CLOSED else SILENT_PROBED
        if silent > most + SILENT_READING * (self.tpot + self.prefill_queued / self.prefill_rate):
            calls = "a call waits" if self.awaited == 1 else f"{self.awaited} calls wait"
            words = f"it has read and written no token for {silent:.0f} s, while {calls} for it"
            self.outage_at = self._silent_since
            self.failed_call, self._silent_since = words, now
            self.breaker.stalled(now)
            self.down(Trouble(STALLED, words, now))

    def _adapt_trim(self, sample: EngineSample, preempted: bool, since: float) -> None:
        """AIMD on the budget: up while tokens bind and measured KV is low, by GROWTH x what is empty; x 0.9 when it
        runs over.

        Prefix sharing and short answers make holds too large, so a full ledger may leave the cache half empty. A queue
        inside an engine whose KV is low is a matter of slots, not of tokens, and leaves the trim alone.

        What runs over stays so for as long as its calls run. So trim falls no further than what the holds of now say:
        long calls would else take it to its least each time, and half of the cache would be empty until it has risen.
        """
        target = self.target
        crowded = sample.waiting > self.policy.budget.engine_backlog and sample.kv_usage > target - 0.05
        if preempted or crowded or sample.kv_usage > self.fullest + OVERRUN:
            full = 1.0 if preempted else max(sample.kv_usage, target)
            told = TRIM_BELOW * self.held / (full * self.capacity)
            self.trim = max(0.5, self.trim * 0.9, min(self.trim, told))
        elif self._pressed_tokens and sample.kv_usage < target - 0.05:
            self.trim = min(4.0, self.trim * (1.0 + GROWTH * (target - sample.kv_usage)) ** since)

    def _adapt_slots(self, sample: EngineSample, now: float) -> None:
        """Learn `max_num_seqs`: a queue in the engine shows it, a full bound without one probes above it.

        Below the bound, what was sent within the last steps only waits for the next one, and shows nothing. Where more
        ran before, or more run by the next sample, the queue waits for prompts to be read, and not for places.
        """
        if self.max_slots is not None:
            return
        waiting = sample.waiting
        since = now - STEPS * self.tpot
        waiting -= sum(1 for at in self._sent if at > since)
        backlog = self.policy.budget.engine_backlog
        kept = MOST_KEPT if waiting > backlog else 1.0
        self._most_running = max(sample.running, kept * self._most_running)
        behind, self._behind = self._behind, sample.running if waiting > backlog else -1
        if waiting > backlog:
            if sample.running <= behind:
                self.slots = self._full_at = max(1, int(self._most_running) + backlog)
        elif self._pressed_slots and waiting <= 0 and sample.kv_usage < self.policy.budget.kv_target:
            far = sample.kv_usage < self.policy.budget.kv_target / 2 and self.slots < self._full_at
            self.slots += max(1, self.slots // 10) if far else 1

    def advance(self, now: float) -> None:
        """Time has passed. The correction of a sample too old to be true is dropped: an outage of scrapes must not stop
        dispatch. Its breaker may be due for a probe, and prompts count as read."""
        if self.excess and not self.fresh(now):
            self.excess = 0
        self.breaker.advance(now)
        self._pass_unseen(now)

    def learn_first_byte(self, reading: float, seconds: float) -> None:
        """prefill_rate = median of tokens/s over the last 64 first bytes, once there are 8.

        Of the same work as `predicted_ttft` has it, what was ahead included, less the step that each waits for: so a
        prediction is right also where what is ahead does not wait to be read, but for a place in the batch. Little
        work says more of that step than of the rate.
        """
        if reading < RATE_TOKENS:
            return
        rates = self._first_bytes
        self._untaught = 0
        rates.append(reading / max(seconds - self.tpot, seconds * LEAST_READING, 1e-4))
        self._unsorted += 1
        if self._unsorted >= FIRST_BYTES_NEEDED:
            self._unsorted = 0
            known = sorted(rates)
            self.prefill_rate = max(1.0, known[len(known) // 2])
            self.ttft_spread = min(MOST_SPREAD, self.prefill_rate / known[len(known) // 10])

    def learn_tpot(self, tokens: float, seconds: float) -> None:
        """`tokens` of one sequence took `seconds` to write: a mean over answers, weights falling by a tenth. Below zero
        is an answer that was whole before its first token was expected."""
        if tokens >= TPOT_TOKENS:
            self.tpot += TPOT_WEIGHT * (max(0.0, seconds) / tokens - self.tpot)

    def learn_pace(self, tokens: float, seconds: float) -> None:
        """`tokens` of one sequence took `seconds` to write: the least of late, which a slower answer lifts a little. An
        answer that came to us all at once says little: it is taken for four times as fast as the mean."""
        if tokens >= TPOT_TOKENS:
            each, pace = seconds / tokens, self.pace
            if each > pace != PACE:
                self.pace = pace + PACE_WEIGHT * (each - pace)
                return
            each = max(each, self.tpot / 4, FASTEST)
            lower = each < pace or pace == PACE
            self.pace = each if lower else pace + PACE_WEIGHT * (each - pace)

    def checkpoint(self, now: float, blocks: int) -> SavedEngine:
        """Return the learned rates and bounds, for the next decider, and at most so many blocks of the prefix index."""
        return SavedEngine(
            self.id,
            self.prefill_rate,
            self.ttft_spread,
            self.tpot,
            self.pace,
            self.trim,
            self.slots,
            None if self._full_at == math.inf else self._full_at,
            self.breaker.checkpoint(now),
            self.prefixes.checkpoint(blocks, now),
        )

    def restore(self, saved: SavedEngine, then: float, *, prefixes: bool) -> None:
        """Go on with what an earlier decider had learned by `then`. Slots that the policy gives stay. `prefixes`: its
        hashes have the key of ours."""
        self.prefill_rate, self.ttft_spread = saved.prefill_rate, saved.ttft_spread
        self.tpot, self.pace, self.trim = saved.tpot, saved.pace, saved.trim
        if self.max_slots is None:
            self.slots = saved.slots
            self._full_at = math.inf if saved.full_at is None else saved.full_at
        self.breaker.restore(saved.breaker, then)
        if prefixes:
            self.prefixes.restore(saved.prefixes, then)

    def health(self, ok: bool, now: float, trouble: Trouble | None = None) -> None:
        """Take one health check, which met `trouble` if it is not `ok`: three misses take the engine out, two hits (one
        at first contact) bring it in."""
        if not ok:
            # A call may have met the outage before this check, but not before the last good one.
            failing = self.breaker.failing_at
            self.outage_at = min(self.outage_at, failing if failing > self.checked_at else now)
        self.checked_at = now
        if trouble is not None:
            self.trouble = trouble
            self.check_failures[trouble.reason] = self.check_failures.get(trouble.reason, 0) + 1
        if ok:
            self.hits, self.misses = self.hits + 1, 0
            first_contact = self.back_at == -math.inf
            if not self.up and (first_contact or self.hits >= HITS_IN):
                self.up = True
                self.back_at = now - self.policy.routing.slow_start if first_contact else now
            if self.up:
                self.outage_at = math.inf
        else:
            self.hits, self.misses = 0, self.misses + 1
            if self.misses >= MISSES_OUT:
                self.down()

    def ready(self, now: float) -> None:
        """Take the engine in at once: its sidecar has started or woken it. Its cache is empty, its speed is
        unknown, and what it failed before is over."""
        self.up = True
        self.hits, self.misses = HITS_IN, 0
        self.back_at = now
        self.outage_at = math.inf
        self.excess = 0
        self.forget_cache()
        if not self.in_flight:
            self.breaker = CircuitBreaker(self.policy.breaker)

    def expect_sizes(self, capacity: int | None, slots: int | None) -> None:
        """Take the KV tokens that the engine will probably hold, and the calls that it will run at once, until it
        reports or shows its own."""
        if self.sample is None and capacity and not self.fixed_capacity:
            self.capacity = capacity
        if self.sample is None and slots and self.max_slots is None:
            self.slots = slots

    def down(self, trouble: Trouble | None = None) -> None:
        """Out of the fleet until health says otherwise. Its cache may be gone, so its prefixes are forgotten."""
        self.up = False
        if trouble is not None:
            self.trouble = trouble
            self.outage_at = min(self.outage_at, trouble.at)
        self.hits = 0
        self.excess = 0
        self.forget_cache()

    def forget_cache(self) -> None:
        """Forget the engine's cache: it was restarted, slept, or reset."""
        self.prefixes.clear()
        if self.adapters is not None:
            self.adapters.forget()

    # -- prefix cache -------------------------------------------------------------------------------------------

    def cached_blocks(self, prefix: tuple[int, ...]) -> int:
        """Number of leading blocks of `prefix` that this engine has probably cached."""
        return self.prefixes.leading(prefix, -math.inf if self.cache_age is None else self.cache_age.cut)

    def remember(self, prefix: tuple[int, ...], tokens: int, now: float) -> None:
        """Note that the engine has read, or has just finished with, this prompt of `tokens`."""
        self.prefixes.use(prefix, tokens, self.capacity, now)


class Fleet:
    """All engines, by id, and which of them serve a model."""

    def __init__(self) -> None:
        self.engines: dict[str, Engine] = {}
        self.expected: dict[str, ModelCard] = {}  # models that sidecars have or can have ready
        self.unasked: set[str] = set()  # engines that are asked for the first time: nobody knows their models
        self._serving: dict[str, tuple[Engine, ...]] = {}
        self._contexts: dict[str, int | None] = {}
        self._added = 0  # engines so far, those that are gone included

    def __iter__(self) -> Iterator[Engine]:
        return iter(self.engines.values())

    def add(self, engine: Engine) -> None:
        """Raises ValueError if the id is taken."""
        if engine.id in self.engines:
            raise ValueError(f"engine id {engine.id!r} is used twice")
        self._added += 1
        engine.name = engine.number = f"engine-{self._added}"
        self.engines[engine.id] = engine
        self._index()

    def remove(self, id: str) -> None:
        del self.engines[id]
        self.unasked.discard(id)
        self._index()

    def _index(self) -> None:
        serving: dict[str, list[Engine]] = {}
        for engine in self:
            for model in engine.models:
                serving.setdefault(model, []).append(engine)
        self._serving = {model: tuple(engines) for model, engines in serving.items()}
        self._contexts = {id: card.max_model_len for id, card in self.expected.items()} | {
            model: max(e.models[model].max_model_len or 0 for e in engines) or None
            for model, engines in serving.items()
        }

    def expect(self, cards: dict[str, ModelCard]) -> None:
        """The models that can be had from sidecars, whether an engine serves them now or not."""
        self.expected = cards
        self._index()

    def named(self, name: str) -> Engine | None:
        """The engine of this id or label."""
        return self.engines.get(name) or next((engine for engine in self if engine.label == name), None)

    def serving(self, model: str) -> tuple[Engine, ...]:
        """Engines known to have `model`, up or not; empty: nobody has ever had it."""
        return self._serving.get(model, ())

    @property
    def models(self) -> dict[str, ModelCard]:
        """Every model of the fleet, also those that would have to be woken first; where engines differ, the card with
        the longest context."""
        cards: dict[str, ModelCard] = {}
        for engine in self:
            for id, card in engine.models.items():
                known = cards.get(id)
                if known is None or (card.max_model_len or 0) > (known.max_model_len or 0):
                    cards[id] = card
        return {**self.expected, **cards}

    def context(self, model: str) -> int | None:
        """The longest context, in tokens, any engine gives this model; None where none tells."""
        return self._contexts.get(model)

    # -- news from telemetry ------------------------------------------------------------------------------------

    def sampled(self, engine: Engine, sample: EngineSample, now: float) -> None:
        engine.sampled(sample, now)

    def has_models(self, engine: Engine, cards: Iterable[ModelCard]) -> None:
        """The engine's own list of models, cut to what the policy lets it serve."""
        allowed = engine.only_models
        engine.models = {card.id: card for card in cards if not allowed or card.id in allowed}
        engine.adapters = adapters_of(engine.models, engine.adapters)
        self._index()

    def health(self, engine: Engine, ok: bool, now: float, trouble: Trouble | None = None) -> None:
        engine.health(ok, now, trouble)
