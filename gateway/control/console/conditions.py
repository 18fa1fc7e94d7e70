"""Conditions of the console's headline: what is wrong now, whatever calls there are, since when, and what to do.

One line for each engine or model in trouble, up to EACH of a kind; more of them share a line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime

import msgspec

from gateway.control.console.headline import Line
from gateway.control.parts import ControlParts
from gateway.control.view import ModelView, ready_in
from gateway.core.engines.breaker import BreakerState
from gateway.core.engines.engine import Engine
from gateway.core.engines.trouble import STALLED
from gateway.core.sidecars.sidecar import Sidecar
from gateway.shared.files.checked import listed
from gateway.shared.files.file_status import FileStatus
from gateway.shared.protocol import ModelReport
from gateway.shared.tasks import failing

EACH = 3  # lines of one kind
NAMED = 20  # engines that a shared line names

# By the reason of the last check or call that failed.
HOW = {
    "refused": "Nothing listens at {url}. Start vLLM there: its log says why it ended.",
    "unreachable": "No packet comes through to {url}: is that machine up, and is a firewall between?",
    "name": "The name in {url} is not known: correct fleet.engines, or DNS.",
    "timeout": "It does not answer at {url}: if it hangs or swaps, restart it.",
    "asleep": "It says that it sleeps: POST {url}/wake_up wakes it. Let a sidecar decide that.",
    "status": "Something else may answer at {url}: it must be a vLLM, and the URL without a path.",
    "models": "Something else may answer at {url}: it must be a vLLM, and the URL without a path.",
    "garbage": "Something that is no vLLM answers at {url}: correct fleet.engines, or what stands before it.",
    STALLED: "It hangs: it takes requests and works on none. Restart it.",
    "descriptors": "This gateway has no file descriptor left: raise its limit (LimitNOFILE).",
}
OTHER = "See that it runs at {url} and can be reached."
BACK = " It gets calls again by itself, once two checks are good."
SIDECAR = "Its sidecar starts it again. Its log says why it ended."
BY_HAND = "Set budget.capacity, and max_concurrency in {} (docs/operating.md, Other engines)."
COMMON = "See what they have in common: a machine, a network, a version. They get calls again by themselves."


class Conditions:
    """Reads the parts of a gateway."""

    def __init__(self, parts: ControlParts) -> None:
        self._parts = parts
        self._fleet = parts.dispatch.fleet
        self._dispatch = parts.dispatch
        self._unix = parts.unix

    def lines(self, models: Sequence[ModelView], status: FileStatus) -> Iterator[Line]:
        """The lines, by kind."""
        yield from self._engines()
        queued = {model.id: model.queued_calls for model in models}
        for _, sidecar in sorted(self._dispatch.sidecars.sidecars.items()):
            yield from self._sidecar(sidecar, queued)
        yield from _policy(status)
        yield from self._log()
        for task in failing():
            yield Line(level="bad", what=f"A task of this gateway fails: {task}.", change="Report this as a bug.")
        if self._dispatch.leaving:
            what = "This gateway is drained: balancers are told to send calls elsewhere."
            yield Line(level="warn", what=what, change="End the drain once it may get calls again.")
        for name, model_out, why in self._dispatch.routes.canaries():
            if why:
                what = f"The canary {model_out} gets no more calls of {name}: it is worse than the other members."
                change = f"Mend it, then change its member in models.{name}: the trial begins anew."
                yield Line(level="warn", what=what, why=why, change=change, model=model_out)
        for model in models:
            if model.mode != "normal":
                state = self._dispatch.traffic[model.id].state
                what = f"{model.id} is in mode {model.mode}."
                change = f"It ends once the load falls. Add an engine of {model.id}, or change modes.{model.mode}."
                since = self._unix(state.since)
                runbook = "WeirCallsWithoutRoom"
                yield Line(level="warn", what=what, why=state.why, change=change, since=since, runbook=runbook)

    # -- engines ------------------------------------------------------------------------------------------------

    def _engines(self) -> Iterator[Line]:
        down = [
            each for each in self._fleet if not (each.health.up or each.draining or math.isinf(each.health.checked_at))
        ]
        tripped = [each for each in self._fleet if each.health.up and each.breaker.state is not BreakerState.CLOSED]
        blind = [each for each in self._fleet if each.health.up and each.health.unmeasured]
        yield from self._of(down, "are down", self._down, lambda each: each.health.outage_at)
        shut = "are without calls, as their circuit breakers are open"
        yield from self._of(tripped, shut, self._tripped, lambda each: each.breaker.broken_at)
        how = "tell no metrics, so they are no vLLM, or run with --disable-log-stats"
        yield from self._of(blind, how, _unmeasured, lambda _: math.inf, BY_HAND.format("their entries"))

    def _of(
        self,
        engines: Sequence[Engine],
        how: str,
        line: Callable[[Engine], Line],
        since: Callable[[Engine], float],
        change: str = COMMON,
    ) -> Iterator[Line]:
        """A line for each engine, or one for all where they are many. `since`: monotonic time when its trouble
        began."""
        lines = [line(engine) for engine in engines[:EACH]]  # each is made by a look at all other engines
        if len(engines) <= EACH:
            yield from lines
            return
        whys = "; ".join([f"{engine.label}: {each.why}" for engine, each in zip(engines, lines, strict=False)])
        yield msgspec.structs.replace(
            lines[0],
            what=f"{len(engines)} of {len(self._fleet.engines)} engines {how}.",
            why=f"{whys}, and {len(engines) - EACH} more",
            change=change,
            since=self._unix(min(map(since, engines))),
            engines=tuple([engine.label for engine in engines][:NAMED]),
        )

    def _down(self, engine: Engine) -> Line:
        trouble = engine.health.trouble
        how = SIDECAR if "@" in engine.label else HOW.get("" if trouble is None else trouble.reason, OTHER) + BACK
        return Line(
            level="bad",
            what=f"Engine {engine.label} is down. {self._instead(engine)}",
            why="" if trouble is None else trouble.words,
            change=how.format(url=engine.url),
            since=self._unix(engine.health.outage_at),
            engines=(engine.label,),
            runbook="WeirEngineDown",
        )

    def _tripped(self, engine: Engine) -> Line:
        state = engine.breaker.state.value.replace("_", " ")
        return Line(
            level="bad",
            what=f"Engine {engine.label} fails its calls: its circuit breaker is {state}. {self._instead(engine)}",
            why=engine.health.failed_call,
            change="Read its log, and restart it if its engine core has died or hangs. It is tried again by itself.",
            since=self._unix(engine.breaker.broken_at),
            engines=(engine.label,),
            runbook="WeirBreakerOpen",
        )

    def _instead(self, engine: Engine) -> str:
        """Say which engines take an engine's calls while it fails; empty if the engine serves no model."""
        alone = []
        for model in sorted(engine.models):
            others = [
                each
                for each in self._fleet.serving(model)
                if each is not engine and each.health.up and not each.draining
            ]
            if not any(each.breaker.state is not BreakerState.OPEN for each in others):
                alone.append(model)
        if alone:
            return f"No other engine serves {listed(alone[:3])}: calls wait, and are refused with 503 in the end."
        return "Other engines take its calls." if engine.models else ""

    # -- sidecars -----------------------------------------------------------------------------------------------

    def _sidecar(self, sidecar: Sidecar, queued: Mapping[str, int]) -> Iterator[Line]:
        now, id = self._dispatch.clock(), sidecar.report.sidecar
        if sidecar.stale(now):
            silent = now - sidecar.reported_at
            yield Line(
                level="bad",
                what=f"Sidecar {id} does not report: none of its models is started, woken or put to sleep.",
                why=f"Its last report is {silent:.0f} s old." if silent < 120 else "",
                change="See on its machine whether it runs (sidecar status), and what its log says of this gateway.",
                since=self._unix(sidecar.reported_at),
                runbook="WeirSidecarSilent",
            )
            return
        models = sidecar.models.values()
        failed = [each for each in models if each.last_error and each.state not in ("running", "sleeping")]
        for model in failed[:EACH]:
            yield self._start(id, model)
        for model in models:
            if model.state == "starting" and not model.last_error and queued.get(model.model):
                yield self._starting(id, model, queued[model.model], ready_in(sidecar, model.profile, now))

    def _starting(self, sidecar: str, model: ModelReport, queued: int, seconds: float | None) -> Line:
        name = f"{model.profile}@{sidecar}"
        ready = f"in about {seconds:.0f} s" if seconds else "later than expected"
        calls = "1 call waits" if queued == 1 else f"{queued} calls wait"
        what = f"{calls} for {model.model}, which is being started as {name}: it will be ready {ready}."
        since = self._parts.state_since(sidecar, model.profile)
        return Line(level="good", what=what, since=since, engines=(name,))

    def _start(self, sidecar: str, model: ModelReport) -> Line:
        name = f"{model.profile}@{sidecar}"
        again = model.state == "starting" or model.pending == "start"
        return Line(
            level="warn" if again else "bad",
            what=f"The start of {name} failed{', and is tried again' if again else '; its model cannot be called'}.",
            why=model.last_error,
            change="Its log ends with what went wrong, and with advice.",
            since=self._parts.state_since(sidecar, model.profile),
            engines=(name,),
            runbook="WeirStartFailing",
        )

    # -- the gateway itself -------------------------------------------------------------------------------------

    def _log(self) -> Iterator[Line]:
        trouble = self._parts.log_trouble()
        if trouble is not None:
            yield Line(
                level="bad",
                what="Lines of the log are lost. Calls go on.",
                why=trouble[0],
                change="Free space on that disk (df), or let what reads the pipe keep up. No restart is needed.",
                since=round(trouble[1], 1),
                runbook="WeirLogLinesLost",
            )


def _policy(status: FileStatus) -> Iterator[Line]:
    if status.error is None:
        return
    lines = status.error.splitlines()
    more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
    yield Line(
        level="bad",
        what=f"The policy file {status.file} cannot be used. Version {status.version}, of before, stays in force.",
        why=lines[0] + more,
        change="Correct the file: it is read again once it is saved. A restart would fail. View Policy has all lines.",
        since=None if status.error_at is None else datetime.fromisoformat(status.error_at).timestamp(),
        runbook="WeirPolicyBad",
    )


def _unmeasured(engine: Engine) -> Line:
    assumed = f"{engine.ledger.capacity} tokens of KV cache and {engine.ledger.slots} calls at once"
    return Line(
        level="warn",
        what=f"Engine {engine.label} tells no metrics, so it is no vLLM, or runs with --disable-log-stats.",
        why=f"{engine.health.unmeasured}. Assumed are {assumed}.",
        change=BY_HAND.format("its entry"),
        engines=(engine.label,),
    )
