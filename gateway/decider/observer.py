"""Observer of the gateway for its operators: keeps the history, and when each trouble began.

It looks once a second, and compares what calls ended as once a bucket: nothing is done for a call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec

from gateway.core.call_counts import CallCounts
from gateway.core.engines.fleet import Fleet
from gateway.core.history import STEP, History
from gateway.core.request.outcome import Outcome, kind_of
from gateway.decider.dispatch import Dispatch
from gateway.decider.ended_calls import EndedCalls
from gateway.shared.notice import Level, Notice

LOOK = 1.0  # seconds
OVER = 60.0  # seconds without another call that ended so, after which a trouble is over
TROUBLES = 1000  # at once, that are told apart: tenants are many
EVENTS = 10  # of one look at the calls
PLACES = {"answered": 0, "refused": 1, "failed": 2}
STATES: dict[str, tuple[str, Level]] = {
    "starting": ("is being started", "info"),
    "running": ("is awake", "info"),
    "sleeping": ("is asleep", "info"),
    "stopped": ("is stopped", "info"),
    "error": ("does not start", "error"),
}

HOW = {
    **dict.fromkeys(
        (Outcome.QUEUE_FULL, Outcome.SHED, Outcome.DEADLINE_UNREACHABLE, Outcome.EXPIRED), "find no room in time"
    ),
    Outcome.NO_ENGINE: "find no engine",
    Outcome.TRUNCATED: "are broken off",
    Outcome.UPSTREAM: "fail at their engine",
}

Trouble = tuple[str, Outcome]  # a tenant's calls that ended so
Place = tuple[str, str]  # sidecar, profile


class Observer(msgspec.Struct, eq=False):
    """`totals` gives what has been counted of ended calls, `ended` the last of them."""

    history: History
    _fleet: Fleet
    _dispatch: Dispatch
    _totals: Callable[[], CallCounts]
    _ended: EndedCalls
    _clock: Callable[[], float]
    began: dict[Trouble, float] = {}  # Unix seconds
    states: dict[Place, tuple[str, str, float]] = {}  # state, last error, since when (Unix seconds)
    _calls: dict[Trouble, int] = {}  # that had ended so at the last comparison
    _last: dict[Trouble, float] = {}  # when one was found last, of troubles that are not over

    async def run(self, count: Callable[[], Awaitable[None]]) -> None:
        """Look for as long as the gateway runs. `count` has other processes tell what they have counted."""
        self._compare(self._clock(), self._totals())
        while True:
            for _ in range(STEP):
                await asyncio.sleep(LOOK)
                self.look()
            await count()
            self.close()

    def look(self) -> None:
        """Look at queues, engines and models."""
        dispatch = self._dispatch
        queued, running = sum(map(len, dispatch.queues.values())), sum(dispatch.running.values())
        self.history.look(queued, running, sum([engine.health.up for engine in self._fleet]), len(self._fleet.engines))
        states: dict[Place, tuple[str, str, float]] = {}
        now = time.time()
        for sidecar in dispatch.sidecars.sidecars.values():
            for profile, model in sidecar.models.items():
                place = sidecar.report.sidecar, profile
                known = self.states.get(place)
                if known is None or known[:2] != (model.state, model.last_error):
                    self._changed(place, known, model.state, model.last_error, now)
                    known = model.state, model.last_error, now
                states[place] = known
        self.states = states

    def _changed(self, place: Place, known: tuple[str, str, float] | None, state: str, error: str, at: float) -> None:
        sidecar, profile = place
        if error and (known is None or known[1] != error):
            failed = f"the start of {profile}@{sidecar} failed: {error.partition(chr(10))[0]}"
            self.history.note(at, Notice(failed, "model_failed", "error"))
        elif known is not None and known[0] != state:
            words, level = STATES[state]
            self.history.note(at, Notice(f"{profile}@{sidecar} {words}", f"model_{state}", level))

    def close(self) -> None:
        """Close a bucket of the history."""
        counts, now = self._totals(), self._clock()
        totals: dict[str, list[int]] = {}
        for (_, name, _, outcome), row in counts.rows.items():
            place = PLACES.get(kind_of(outcome))
            if place is not None:
                totals.setdefault(name, [0, 0, 0])[place] += row.requests
        self.history.close(round(time.time(), 1), totals)
        for trouble in self._compare(now, counts)[:EVENTS]:
            tenant, outcome = trouble
            who = f"tenant {tenant}" if tenant else "unknown callers"
            if outcome is Outcome.RATE_LIMITED:
                line = Notice(f"{who} has met a limit: calls are refused with 429", "limit_met", "warning")
            else:
                how = HOW.get(outcome, "are refused" if kind_of(outcome) == "refused" else "fail")
                line = Notice(f"calls of {who} {how} ({outcome.value})", f"calls_{kind_of(outcome)}", "warning")
            self.history.note(self.began[trouble], line)

    def _compare(self, now: float, counts: CallCounts) -> list[Trouble]:
        """The troubles that have begun since the last time."""
        begun, last = [], self._last
        before, self._calls = self._calls, {trouble: calls for trouble, (calls, _) in counts.tenants.items()}
        for trouble, calls in self._calls.items():
            if calls > before.get(trouble, 0) and kind_of(trouble[1]) in ("refused", "failed"):
                if trouble not in last:
                    if len(last) >= TROUBLES:
                        continue
                    begun.append(trouble)
                last[trouble] = now
        for trouble in [trouble for trouble, at in last.items() if now - at > OVER]:
            del last[trouble], self.began[trouble]
        if begun:
            first = dict.fromkeys(begun, now)
            for at, record in self._ended.since(now - STEP - LOOK):
                if (record.tenant, record.outcome) in first:
                    first[record.tenant, record.outcome] = at
            wall = time.time() - now
            self.began |= {trouble: round(wall + at, 1) for trouble, at in first.items()}
        return begun
