"""Health of one engine: whether it is up, and what its last checks and calls met. `now` is monotonic seconds."""

from __future__ import annotations

import math

from gateway.core.engines.trouble import STALLED, Trouble

SILENT = 30.0  # seconds in which an engine may read and write no token while calls wait for it
SILENT_PROBED = 10.0  # the same, while its breaker lets through probes alone
SILENT_READING = 3.0  # times the time predicted for the prompts that it has yet to read, beside them
HITS_IN = 2  # good health checks that bring an engine back
MISSES_OUT = 3  # bad ones that take it out


class Health:
    """Health of one engine. Change `up` through `Engine`, which also forgets the cache of an engine that is down."""

    def __init__(self) -> None:
        self.up = False
        self.joins = False  # others were serving when it came, so its cache is taken to be cold
        self.hits = self.misses = 0  # good and bad checks in a row
        self.back_at = self.checked_at = -math.inf
        self.outage_at = math.inf  # first check or call that failed since it last answered one; inf: none has
        self.trouble: Trouble | None = None  # the last; of an engine that is up too
        self.check_failures: dict[str, int] = {}  # by reason
        self.failed_call = ""  # error of the last call that failed
        self.doubted = False  # a call was answered 404, so its list of models may have changed
        self.unmeasured = ""  # why it has no metrics
        self._silent_since = -math.inf  # it has read and written no token for the calls that wait

    def check(self, ok: bool, now: float, trouble: Trouble | None, *, failing_at: float, slow_start: float) -> bool:
        """Take one health check, which met `trouble` if it is not `ok`: three misses take the engine out, two hits (one
        at first contact) bring it in. Return whether the engine has to be taken out. `failing_at`: when the first of
        the last failed calls in a row ended."""
        if trouble is not None:
            self.trouble = trouble
            self.check_failures[trouble.reason] = self.check_failures.get(trouble.reason, 0) + 1
        if ok:
            self.checked_at = now
            self.hits, self.misses = self.hits + 1, 0
            first_contact = self.back_at == -math.inf
            if not self.up and (first_contact or self.hits >= HITS_IN):
                self.up = True
                self.back_at = now - slow_start if first_contact and not self.joins else now
            if self.up:
                self.outage_at = math.inf
            return False
        # A call may have met the outage before this check, but not before the last good one.
        self.outage_at = min(self.outage_at, failing_at if failing_at > self.checked_at else now)
        self.checked_at = now
        self.hits, self.misses = 0, self.misses + 1
        return self.misses >= MISSES_OUT

    def ready(self, now: float) -> None:
        """Take the engine in at once: its sidecar has started or woken it."""
        self.up = True
        self.hits, self.misses = HITS_IN, 0
        self.back_at = now
        self.outage_at = math.inf

    def down(self, trouble: Trouble | None) -> None:
        self.up = False
        self.hits = 0
        if trouble is not None:
            self.trouble = trouble
            self.outage_at = min(self.outage_at, trouble.at)

    def stall(self, waits: bool, awaited: int, reading: float, now: float, *, probed: bool) -> Trouble | None:
        """Return the trouble of an engine that does no work, whatever its checks say: an engine core that hangs leaves
        its HTTP server well. `waits`: between two samples it read and wrote no token, though it has calls. `awaited`:
        calls that wait for their first byte. `reading`: seconds predicted for the prompts that it has yet to read.
        `probed`: its breaker lets through probes alone."""
        if not (waits and self.up and awaited):
            self._silent_since = now
            return None
        silent = now - self._silent_since
        if silent <= (SILENT_PROBED if probed else SILENT) + SILENT_READING * reading:
            return None
        calls = "a call waits" if awaited == 1 else f"{awaited} calls wait"
        words = f"it has read and written no token for {silent:.0f} s, while {calls} for it"
        self.outage_at = self._silent_since
        self.failed_call, self._silent_since = words, now
        return Trouble(STALLED, words, now)
