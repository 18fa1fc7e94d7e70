"""Calls that proxies forward, such as those of the endpoint picker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from gateway.control.calls import CallView, active_calls
from gateway.relay.epp.lending import Lending
from gateway.relay.pipeline import Pipeline
from gateway.serve.assembly import Gateway


class LentCalls:
    """Pipeline that lends its grants. It is where the decider is, and no relay knows of it."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        lending = Lending(gateway.decider, self._upstream, gateway.current, gateway.clock)
        own = gateway.pipeline
        self.pipeline = Pipeline(
            gateway.current,
            gateway.decider,
            gateway.attempts,
            own.endings.observe,
            gateway.clock,
            gateway.rng,
            gateway.bodies,
            large=own.large,
            exchange=lending.exchange,
        )

    async def drain(self, within: float) -> None:
        """Take reports until no call is left, for `within` seconds at most, then give up the remaining calls."""
        tasks = self.pipeline.tasks
        if tasks and within > 0:
            await asyncio.wait(tasks, timeout=within)
        for live in list(tasks.values()):
            live.leave("drain")
        if tasks:
            await asyncio.wait(tasks)

    def calls(self) -> Iterable[CallView]:
        """Return the calls that wait and run now."""
        return active_calls(self.pipeline.tasks.values(), self._gateway.recorder.labels, self._gateway.clock())

    def _upstream(self, id: str) -> tuple[str, str | None]:
        """Return an engine's URL and the key to show."""
        engine = self._gateway.fleet.engines[id]
        return engine.url, self._gateway.engines.credentials(engine)[0]
