"""Adaptation of one engine's budget and slots to what its samples show."""

from __future__ import annotations

import math

from gateway.core.checkpoint import SavedEngine
from gateway.core.engines.ledger import Ledger
from gateway.shared.vllm.answers import EngineSample

OVERRUN = 0.03  # of the KV cache above the fullest, where holds were too small
GROWTH = 0.7  # of the trim, each second in which tokens bind, times the share of the cache below the target
MOST_KEPT = 0.98  # of the most that ran, with each sample of a queue in the engine
TRIM_BELOW = 0.95  # of what holds were measured to turn into


class Adaptation:
    """Learner of `trim` and `slots` of a ledger. Ask it once for each sample, after `Ledger.measure`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._behind = -1  # sequences that ran at the last sample, where a queue in the engine was behind them
        self._full_at = math.inf  # slots at which there was a queue in the engine last
        self._most_running = 0.0  # sequences; falls while there is a queue in the engine and fewer run

    def adapt_trim(self, sample: EngineSample, backlog: int, since: float, *, preempted: bool) -> None:
        """AIMD on the budget: up while tokens bind and measured KV is low, by GROWTH x what is empty; x 0.9 when it
        runs over. `backlog`: calls that may queue in the engine. `since`: seconds since the last sample.

        Prefix sharing and short answers make holds too large, so a full ledger may leave the cache half empty. A queue
        inside an engine whose KV is low is a matter of slots, not of tokens, and leaves the trim alone.

        What runs over stays so for as long as its calls run. So trim falls no further than what the holds of now say:
        long calls would else take it to its least each time, and half of the cache would be empty until it has risen.
        """
        ledger, target = self._ledger, self._ledger.target
        crowded = sample.waiting > backlog and sample.kv_usage > target - 0.05
        if preempted or crowded or sample.kv_usage > ledger.fullest + OVERRUN:
            full = 1.0 if preempted else max(sample.kv_usage, target)
            told = TRIM_BELOW * ledger.held / (full * ledger.capacity)
            ledger.trim = max(0.5, ledger.trim * 0.9, min(ledger.trim, told))
        elif ledger.pressed_tokens and sample.kv_usage < target - 0.05:
            ledger.trim = min(4.0, ledger.trim * (1.0 + GROWTH * (target - sample.kv_usage)) ** since)

    def adapt_slots(self, sample: EngineSample, backlog: int, just_sent: int) -> None:
        """Learn `max_num_seqs`: a queue in the engine shows it, a full bound without one probes above it.

        Below the bound, the `just_sent` calls of the last steps only wait for the next one, and show nothing. Where
        more ran before, or more run by the next sample, the queue waits for prompts to be read, and not for places.
        """
        ledger = self._ledger
        if ledger.max_slots is not None:
            return
        waiting = sample.waiting - just_sent
        kept = MOST_KEPT if waiting > backlog else 1.0
        self._most_running = max(sample.running, kept * self._most_running)
        behind, self._behind = self._behind, sample.running if waiting > backlog else -1
        if waiting > backlog:
            if sample.running <= behind:
                ledger.slots = self._full_at = max(1, int(self._most_running) + backlog)
        elif ledger.pressed_slots and waiting <= 0 and sample.kv_usage < ledger.kv_target:
            far = sample.kv_usage < ledger.kv_target / 2 and ledger.slots < self._full_at
            ledger.slots += max(1, ledger.slots // 10) if far else 1

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
