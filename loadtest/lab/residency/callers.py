"""Callers of a sidecar's models through one gateway, in virtual time.

Of a gateway there is only what its sidecar sees and what its callers feel. As a gateway does, it knows the last report
and no more. It sends a call where the model is reported to run, and holds it while the model can be had in time. Else
it refuses the call, with the time that the sidecar foresees as Retry-After. A call that is refused only because it
cannot wait so long has the model made ready all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from typing import Literal

import msgspec

from gateway.shared.protocol import CapacityReport, Demand, DemandReport, ModelReport
from gateway.shared.tasks import done_within
from loadtest.lab.residency.residents import ResidentEngine, ResidentEngines
from sidecar.residency.manager import Manager

TELL_EVERY = 1.0  # seconds between two reports to a gateway
UNKNOWN = 5.0  # seconds of Retry-After where nobody knows better, as the gateway's


class CallOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a call. `served`: an engine had it after `waited` seconds; `broken`: the engine ended under it, and
    `how` says how (`hung` where it had hung before); `astray`: it was sent to one that did not serve; `refused` after
    `waited` seconds, with a `retry_after`; or `expired`. `foretold`: seconds that it would wait, by the first word on
    that; 0 of one that did not."""

    ending: Literal["served", "broken", "astray", "refused", "expired"]
    waited: float
    retry_after: float = 0.0
    how: str = ""
    foretold: float = 0.0


class ModelCallers:
    """Calls of one gateway to the models of `manager`. `cut`: no report reaches it, and it asks for nothing. `away`:
    there is no sidecar that could be asked. `late`: seconds that a report takes to reach it. `copies`: the models that
    another machine serves too and is full, so that calls of others want them as copies."""

    def __init__(self, manager: Manager, engines: ResidentEngines, name: str = "gateway") -> None:
        self.manager = manager
        self.name = name
        self.cut = self.away = False
        self.copies: set[str] = set()
        self.late = 0.0
        self.in_flight: Counter[str] = Counter()
        self.waiting: Counter[str] = Counter()
        self.models: dict[str, ModelReport] = {}
        self._engines = engines
        self._used: dict[str, float] = {}
        self._news = asyncio.Event()

    async def run(self) -> None:
        """Take reports, every second and at once on change, until cancelled."""
        while True:
            changed = self.manager.changed
            if not self.cut:
                report = self.manager.report("sidecar", "boot", "")
                if self.late:
                    await asyncio.sleep(self.late)
                self.manager.heard(self._answer(report))
            await done_within(changed.wait(), TELL_EVERY)
            changed.clear()

    def serves(self, model: str) -> bool:
        """Whether it may be sent calls, by the last report."""
        known = self.models.get(model)
        return known is not None and known.state == "running" and known.pending is None

    def _answer(self, report: CapacityReport) -> DemandReport:
        now = asyncio.get_running_loop().time()
        self.models = {each.profile: each for each in report.models}
        self._news.set()
        self._news = asyncio.Event()
        demands = tuple(
            Demand(
                profile=name,
                in_flight=self.in_flight[name],
                waiting=max(self.waiting[name], name in self.copies and not self.serves(name)),
                idle=now - self._used[name] if name in self._used else None,
                withdrawn=not self.serves(name),
                copy=name in self.copies,
            )
            for name in self.models
        )
        return DemandReport(gateway=self.name, boot="boot", sequence=report.sequence, demands=demands)

    async def call(self, model: str, seconds: float, patience: float = math.inf) -> CallOutcome:
        """Make a call that an engine needs `seconds` for and that waits for its model no longer than `patience`."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        foretold: list[float] = []
        if not self.serves(model):
            self.waiting[model] += 1
            try:
                refusal = await self._held(model, began, began + patience, foretold)
            finally:
                self.waiting[model] -= 1
            if refusal is not None:
                return refusal
        waited = loop.time() - began
        engine = self._engines.all[model]
        if not engine.alive_now:
            return CallOutcome(ending="broken", waited=waited, how="gone")
        if not engine.serves:
            return CallOutcome(ending="astray", waited=waited)
        await self._sent(model, engine, seconds)
        if engine.alive_now:
            return CallOutcome(ending="served", waited=waited, foretold=sum(foretold))
        return CallOutcome(ending="broken", waited=waited, how="hung" if engine.hung else engine.process.result())

    async def _held(self, model: str, began: float, until: float, foretold: list[float]) -> CallOutcome | None:
        """Wait until the model can be called. Return the refusal if it cannot. The seconds that the last
        report said go to `foretold`."""
        loop = asyncio.get_running_loop()
        asked = self.cut
        while not self.serves(model):
            known = self.models.get(model)
            waited = loop.time() - began
            if known is None and self.models and not self.cut:  # the sidecar's file no longer has it
                return CallOutcome(ending="refused", waited=waited, retry_after=UNKNOWN)
            if known is not None and not self.cut:
                if known.ready_in is None:
                    retry_after = UNKNOWN if known.retry_in is None else known.retry_in
                    return CallOutcome(ending="refused", waited=waited, retry_after=retry_after)
                if not asked and not self.away:
                    asked = True
                    with contextlib.suppress(KeyError):  # gone since the last report
                        self.manager.orders.ensure(model)
                    foretold.append(known.ready_in)
                if loop.time() + known.ready_in > until:
                    return CallOutcome(ending="refused", waited=waited, retry_after=known.ready_in)
            try:
                async with asyncio.timeout_at(until if until < math.inf else None):
                    await self._news.wait()
            except TimeoutError:
                return CallOutcome(ending="expired", waited=loop.time() - began)
        return None

    async def _sent(self, model: str, engine: ResidentEngine, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self.in_flight[model] += 1
        engine.requests += 1
        self._used[model] = loop.time()
        try:
            await asyncio.wait((engine.process,), timeout=seconds)
            if engine.hung:
                await asyncio.wait((engine.process,))
        finally:
            self.in_flight[model] -= 1
            engine.requests -= 1
            self._used[model] = loop.time()
