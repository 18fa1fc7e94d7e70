"""Calls that a proxy forwards: each is known by the id of its hold until it has ended, or its time is over."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gateway.relay.decide.messages import EndReport

HOLD = b"x-weir-hold"
GRACE = 1.0  # seconds for a proxy that goes by the times it was given to say so


class HeldCall:
    """Call that a proxy forwards. `chosen`: the id that its proxy wants; else one is made that nobody can guess. `by`
    and `until`: when its first byte and its end must have been reported, in the loop's time.

    `ended` is the proxy's report, or None once the time is over. `began` is called once, with the first byte, and
    `begun` is then true.
    """

    def __init__(self, chosen: bytes | None, by: float, until: float, began: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self.id = secrets.token_urlsafe(18) if chosen is None else chosen.decode()
        self.ended: asyncio.Future[EndReport | None] = self._loop.create_future()
        self._until = until
        self._began = began
        self.begun = False
        self._timer = self._loop.call_at(min(by, until) + GRACE, self._over)

    def first_byte(self) -> None:
        """The engine's answer has begun; a second time changes nothing."""
        if self.begun:
            return
        self.begun = True
        self._timer.cancel()
        self._timer = self._loop.call_at(self._until + GRACE, self._over)
        self._began()

    def end(self, report: EndReport) -> None:
        """End the call; a second report changes nothing."""
        if not self.ended.done():
            self.ended.set_result(report)

    def close(self) -> None:
        self._timer.cancel()

    def _over(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class HeldCalls:
    """Calls that proxies forward now, by id."""

    def __init__(self) -> None:
        self._calls: dict[str, HeldCall] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def get(self, id: str) -> HeldCall | None:
        return self._calls.get(id)

    @contextmanager
    def held(self, call: HeldCall) -> Iterator[HeldCall]:
        """Take reports of the call until this is left."""
        self._calls[call.id] = call
        try:
            yield call
        finally:
            del self._calls[call.id]
            call.close()
