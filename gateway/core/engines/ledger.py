"""Ledger of one engine: KV tokens and slots promised to calls, and how much more may be.

The ledger leads and the scrape corrects. A `Hold` reserves KV tokens on one engine for one call. The sum of holds is
exact at every moment, while vLLM's gauges lag by a poll and more. What the engine measured above the ledger at its last
sample (`excess`: other users of the engine, holds that were too small) is added to it.

Only `Engine.hold` and `Hold.release` change what is held. Questions, such as `fits`, change nothing; `press` records
that a call found no room. `now` is monotonic seconds.
"""

from __future__ import annotations

import math

from gateway.core.engines.hold import Hold
from gateway.core.engines.prefill_queue import PrefillQueue
from gateway.core.policy.policy import EngineEntry, Policy
from gateway.shared.vllm.answers import EngineSample

UNUSED = (0, 0)
FLOW = 3.0  # seconds in which the flow of tokens falls by e
OVER = 1.15  # of the budget, where the last call that starts within the budget may end
FULLER = 1.16  # times `kv_target`, the budget where nothing of what is held is output
FULLEST = 0.93  # of the KV cache, the largest such budget
FULL = 0.96  # of the KV cache, where the last call may then end at most
GROWING = 0.25  # share of held tokens that is output, from which on the budget is `kv_target`
LATELY = 120.0  # seconds in which the most that others held falls by e


def ceiling(kv_target: float) -> float:
    """Share of the KV cache up to which calls may start, where `kv_target` is what the budget promises."""
    return min(1.0, OVER * kv_target)


class Ledger:
    """Tokens and slots of one engine: how many there are, how many are held.

    `trim` scales the budget to what holds really turn into; `slots` bounds the calls in flight, since vLLM's
    `max_num_seqs` is in no metric and short contexts run out of batch long before KV.
    """

    def __init__(
        self, policy: Policy, prefills: PrefillQueue, capacity: int | None = None, max_slots: int | None = None
    ) -> None:
        self._prefills = prefills
        self._fixed_capacity = capacity is not None
        self._assumed = capacity is None  # the capacity is the policy's: the engine has told none
        self.capacity = capacity or policy.budget.capacity  # tokens of KV cache
        self.max_slots = max_slots  # None: learned
        self._usual = policy.budget.max_concurrency  # slots as long as none are given or learned
        self.slots = max_slots or self._usual
        self.trim = 1.0
        self.held = self.output_held = self.in_flight = 0
        self.excess = 0  # tokens measured above `held` at the last sample
        self.kv_usage = 0.0  # share of the KV cache in use at the last sample
        self.pressed_tokens = self.pressed_slots = False  # a call found no room since the last sample
        self.used: dict[str, list[int]] = {}  # class -> tokens and calls that are held
        self._flow, self._flow_at = 0.0, -math.inf  # KV tokens of what was sent lately, as of then
        self._others: dict[str, tuple[float, float]] = {}  # class with headroom -> most that others held lately, when
        self.apply(policy)

    def apply(self, policy: Policy) -> None:
        """Go by `policy` from now on. What is learned and what is held stays."""
        self.kv_target = policy.budget.kv_target
        if self._assumed:
            self.capacity = policy.budget.capacity
        usual, self._usual = self._usual, policy.budget.max_concurrency
        if self.max_slots is None and self.slots == usual:
            self.slots = self._usual
        self._reserves = tuple((name, each.reserve) for name, each in policy.classes.items() if each.reserve)
        self.headrooms = {name: each.headroom for name, each in policy.classes.items() if each.headroom}

    # -- sizes --------------------------------------------------------------------------------------------------

    def go_by(self, entry: EngineEntry) -> None:
        """Take the slots of the policy's entry; without any they are learned, or the policy's where nothing is."""
        before, self.max_slots = self.max_slots, entry.max_concurrency
        freed = before is not None and self._assumed
        self.slots = entry.max_concurrency or (self._usual if freed else self.slots)

    def expect_sizes(self, capacity: int | None, slots: int | None) -> None:
        """Take the sizes that the engine will probably have, where the policy does not give them."""
        if capacity and not self._fixed_capacity:
            self.capacity, self._assumed = capacity, False
        if slots and self.max_slots is None:
            self.slots = slots

    def measure(self, sample: EngineSample) -> None:
        """Take capacity and excess from a sample."""
        if sample.capacity_tokens and not self._fixed_capacity:
            self.capacity, self._assumed = sample.capacity_tokens, False
        self.kv_usage = sample.kv_usage
        self.excess = max(0, int(sample.kv_usage * self.capacity) - self.held)

    @property
    def target(self) -> float:
        """Share of the KV cache that may be promised: the policy's `kv_target`, and more where little of what is held
        is output. A prompt's tokens are known; only output grows, and may grow beyond its estimate."""
        target = self.kv_target
        if not self.held:
            return target
        known = max(0.0, 1.0 - self.output_held / self.held / GROWING)
        return target + known * max(0.0, min(FULLEST, FULLER * target) - target)

    @property
    def fullest(self) -> float:
        """Share of the KV cache up to which the last call may go. Above the `ceiling` of the policy's own target: up to
        FULL, as modes begin there."""
        return max(ceiling(self.kv_target), min(FULL, ceiling(self.target)))

    @property
    def budget(self) -> int:
        """Tokens that may be promised: capacity x target x trim."""
        return int(self.capacity * self.target * self.trim)

    @property
    def largest(self) -> int:
        """The largest call this engine could ever take: its ceiling without the trim of the moment."""
        return round(self.capacity * ceiling(self.kv_target))

    @property
    def ceiling(self) -> int:
        """Tokens up to which the last call may go that starts within the budget. Were none to go beyond the budget, a
        call of a tenth of the cache would leave the last tenth empty."""
        return round(self.capacity * self.trim * self.fullest)

    # -- questions ----------------------------------------------------------------------------------------------

    @property
    def load(self) -> int:
        """Tokens promised, plus what the engine measured above the ledger at its last sample."""
        return self.held + self.excess

    def watermark(self, without: int = 0) -> float:
        """Share of the KV cache in use: as measured, or what the holds of now will come to, whichever is more; as if
        `without` tokens of these were not held."""
        promised = (self.held - without) / self.trim / self.capacity
        return promised if promised > self.kv_usage else self.kv_usage

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
        if load + cost >= int(self.capacity * self.kv_target * self.trim) and (
            load >= self.budget or load + cost > self.ceiling
        ):
            return False
        if not self._reserves:
            return True
        budget = self.budget
        room, slots = budget - load - cost, self.slots - self.in_flight
        for name, share in self._reserves:
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
        if self._prefills.ahead(now) or tokens + self.excess + cost + others > self.budget:
            return False
        return self.max_slots is None or self.in_flight + headroom * (self.in_flight - calls) < self.slots

    def _others_held(self, class_name: str, now: float) -> float:
        """Tokens that other classes hold, or held at most lately: who comes in waves will come again."""
        most, at = self._others.get(class_name, (0.0, now))
        return max(self.held - self.used.get(class_name, UNUSED)[0], most * math.exp((at - now) / LATELY))

    def flow(self, now: float) -> float:
        """KV tokens of the calls that were sent lately, each falling by e in FLOW seconds."""
        passed = now - self._flow_at
        return self._flow * math.exp(-passed / FLOW) if self._flow and passed > 0.0 else self._flow

    # -- changes ------------------------------------------------------------------------------------------------

    def press(self, cost: int) -> None:
        """Record that a call of `cost` tokens wanted to start: what had no room for it, slots or tokens, is under
        pressure until the next sample, which may learn that there is more."""
        if self.in_flight >= self.slots:
            self.pressed_slots = True
        elif self.in_flight or cost > self.largest:
            self.pressed_tokens |= self.load >= self.budget or self.load + cost > self.ceiling

    def add(self, hold: Hold) -> None:
        """Take a new hold. The caller asked `fits`."""
        now, cost, class_name = hold.taken_at, hold.tokens, hold.class_name
        self.held += cost
        self.output_held += hold.output
        self.in_flight += 1
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
        if self.in_flight >= self.slots:
            self.pressed_slots = True

    def give_back(self, hold: Hold) -> None:
        self.held -= hold.tokens
        self.output_held -= hold.output
        self.in_flight -= 1
        used = self.used[hold.class_name]
        used[0] -= hold.tokens
        used[1] -= 1
