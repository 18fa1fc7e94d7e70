"""An engine's state in operators' words: one line for each change, none for a check that changes nothing.

`Announcer.look` compares an engine with what was last told of it. An engine that flaps gets BURST lines, then one every
REFILL seconds, which counts the changes that were not told. Times are monotonic seconds.
"""

from __future__ import annotations

import math

import msgspec

from gateway.core.engines.breaker import BreakerState
from gateway.core.engines.engine import Engine
from gateway.shared.files.checked import listed
from gateway.shared.notice import Notice

BURST = 6.0  # lines of one engine without a pause
REFILL = 20.0  # seconds until an engine that has used them up gets one more


class State(msgspec.Struct, frozen=True):
    """State of an engine that a line may report. `reason`: why the engine is down. `drained`: why it gets no new
    calls."""

    up: bool = False
    reason: str = ""
    tripped: bool = False
    drained: str = ""
    models: frozenset[str] = frozenset()
    unmeasured: bool = False


NEW = State()


class Reported(msgspec.Struct):
    """State that was last reported of one engine, and state that was last seen."""

    told: State = NEW
    seen: State = NEW
    changes: int = 0  # seen since the last line
    was_up: bool = False
    down_at: float = math.inf
    tripped_at: float = math.inf
    left: float = BURST  # lines that may be told
    left_at: float = -math.inf  # when `left` was reckoned


class Announcer:
    """Lines for operators about the engines of a fleet."""

    def __init__(self) -> None:
        self._engines: dict[str, Reported] = {}

    def look(self, engine: Engine, now: float, drained: str) -> list[Notice]:
        """The lines that are due: none where everything is as told. `drained`: why it gets no new calls, empty where
        it gets them."""
        told = self._engines.get(engine.id)
        if told is None:
            told = self._engines[engine.id] = Reported()
        trouble = engine.health.trouble
        state = State(
            up=engine.health.up,
            reason="" if engine.health.up or trouble is None else trouble.reason,
            tripped=engine.breaker.state is not BreakerState.CLOSED,
            drained=drained,
            models=frozenset(engine.models),
            unmeasured=bool(engine.health.unmeasured),
        )
        if state != told.seen:
            told.changes += 1
            if told.seen.up and not state.up:
                told.down_at = min(now, engine.health.outage_at)
            if state.tripped and not told.seen.tripped:
                told.tripped_at = now
            told.seen = state
        if state == told.told:
            return []
        told.left = min(BURST, told.left + (now - told.left_at) / REFILL)
        told.left_at = now
        if told.left < 1.0:
            return []
        lines = _lines(engine, told, state, now)
        told.left -= len(lines)
        if lines and told.changes > len(lines):
            last = lines[-1]
            often = f"{told.changes} changes since the last line: it changes too often to tell each"
            lines[-1] = Notice(f"{last} ({often})", last.event, last.level)
        told.told, told.changes = state, 0
        told.was_up = told.was_up or state.up
        return [Notice(f"engine {engine.label} {line}", line.event, line.level) for line in lines]

    def forget(self, id: str) -> None:
        """The engine has left the fleet."""
        self._engines.pop(id, None)


def _lines(engine: Engine, told: Reported, state: State, now: float) -> list[Notice]:
    lines: list[Notice] = []
    before = told.told
    if state.up and not before.up:
        again = f" again after {now - told.down_at:.0f} s" if told.was_up else ""
        lines.append(Notice(f"is up{again}; serves {listed(sorted(state.models)) or 'no model'}", "engine_up"))
    elif not state.up and (before.up or state.reason != before.reason):
        how = "is down" if before.up else "is still down" if before.reason else "is not up yet"
        checks = f" ({engine.health.misses} check{'s' * (engine.health.misses != 1)})" if engine.health.misses else ""
        lines.append(Notice(f"{how}{_met(engine)}{checks}", "engine_down", "warning"))
    elif state.up and state.models != before.models:
        new, gone = (listed(sorted(names)) for names in (state.models - before.models, before.models - state.models))
        changes = [f"now serves {new}"] * bool(new) + [f"no longer serves {gone}"] * bool(gone)
        lines.append(Notice(" and ".join(changes), "engine_models"))
    if state.unmeasured and not before.unmeasured:
        assumed = f"{engine.ledger.capacity} tokens of KV cache and {engine.ledger.slots} calls at once"
        line = f"tells no metrics, as a vLLM would ({engine.health.unmeasured}): {assumed} are assumed"
        lines.append(
            Notice(
                f"{line}; budget.capacity, and max_concurrency in its entry, say better", "engine_unmeasured", "warning"
            )
        )
    if state.tripped and not before.tripped:
        met = f": {engine.health.failed_call}" if engine.health.failed_call else ""
        lines.append(Notice(f"gets no calls but probes, since its breaker is open{met}", "breaker_open", "warning"))
    elif before.tripped and not state.tripped:
        again = f"gets calls again, its breaker is closed after {now - told.tripped_at:.0f} s"
        lines.append(Notice(again, "breaker_closed"))
    if state.drained != before.drained:
        running = f" ({engine.ledger.in_flight} still run)" if engine.ledger.in_flight else ""
        line = f"gets no new calls: {state.drained}{running}" if state.drained else "gets new calls again"
        lines.append(Notice(line, "engine_drained" if state.drained else "engine_admitted"))
    return lines


def state_of(engine: Engine) -> str:
    """State of an engine in words; for an engine that is down, with its last trouble."""
    if engine.health.up:
        return "up"
    return "not asked yet" if math.isinf(engine.health.checked_at) else f"down{_met(engine)}"


def _met(engine: Engine) -> str:
    return "" if engine.health.trouble is None else f": {engine.health.trouble.words}"
