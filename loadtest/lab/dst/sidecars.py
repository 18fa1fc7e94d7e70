"""Sidecars played in memory, by real messages: reports go in as bytes, orders arrive as HTTP requests.

What the gateway relies on is kept: an engine is put to sleep only once an answer has said that its calls are withdrawn
and none is in flight. Everything else goes wrong as it may: reports stop, come late, are of another start, leave out
what runs, are forged by somebody who has the token and not this sidecar's key.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any
from urllib.parse import unquote

import httpx
import msgspec

from gateway.shared.protocol import CapacityReport, DemandReport, Ensured, ModelReport, encode
from loadtest.lab.dst.case import SidecarAct
from loadtest.simulate.memory_engine import MemoryEngine

EVERY = 1.0  # seconds between two reports
Report = Callable[[bytes], DemandReport | None]  # None: it was not heard


class PlayedSidecar:
    """Sidecar of one machine. `wrong` is told in words what a gateway must not have done."""

    def __init__(
        self,
        number: int,
        engines: Sequence[MemoryEngine],
        running: Sequence[bool],
        takes: float,
        report: Report,
        wrong: Callable[[str], None],
    ) -> None:
        self.engines = list(engines)
        self.port = 9000 + 100 * number
        self._name = f"sidecar-{number}"
        self._takes = takes
        self._report = report
        self._wrong = wrong
        self._loop = asyncio.get_running_loop()
        self._boot = self._sequence = 0
        self._silent_until = self._deaf_until = -1.0
        self._last = b""
        self._hidden: set[int] = set()
        self._asleep: dict[int, int] = {}  # profiles put to sleep -> requests their engine had had by then
        self.models = [
            ModelReport(profile=f"p{index}", model=engine.model, state="stopped", ready_in=takes, context_length=512)
            for index, engine in enumerate(engines)
        ]
        for index, runs in enumerate(running):
            if runs:
                self._becomes(index, state="running", url=self.url(index), ready_in=0.0)
            else:
                engines[index].die()

    def url(self, profile: int) -> str:
        """Address of a profile's engine."""
        return f"http://127.0.0.1:{self.port + 1 + profile}"

    def start(self) -> None:
        """Report now and from now on."""
        self.say()
        self._loop.call_later(EVERY, self.start)

    def say(self) -> bool:
        """A report, if it speaks; what the answer allows is done. Whether it was heard."""
        if self._loop.time() < self._silent_until:
            return False
        self._sequence += 1
        self._last = encode(
            CapacityReport(
                sidecar=self._name,
                boot=f"boot-{self._boot}",
                key=self._name,
                sequence=self._sequence,
                control=f"http://127.0.0.1:{self.port}",
                models=tuple([each for index, each in enumerate(self.models) if index not in self._hidden]),
            )
        )
        answer = self._report(self._last)
        for demand in () if answer is None else answer.demands:
            index = int(demand.profile[1:])
            model = self.models[index]
            if model.pending in ("sleep", "stop", "drain") and demand.withdrawn and not demand.in_flight:
                self._rests(index)
            spare = demand.copy and model.pending is None and model.state in ("stopped", "sleeping")
            if spare and demand.waiting and model.copy_in is not None:
                self._begin(index)
            elif demand.copy != model.copy:
                self._becomes(index, copy=demand.copy, copy_in=self._takes if spare else None)
        return answer is not None

    def _forged(self) -> None:
        """Send a forged report that all its models are gone, and check that it is refused."""
        forged = CapacityReport(
            sidecar=self._name, boot="another", key="guessed", sequence=2**53, control="http://[::1]:1"
        )
        if self.say() and self._report(encode(forged)) is not None:
            self._wrong(f"a forged report of {self._name} was taken")

    def hear(self, word: SidecarAct) -> None:
        """Do what the case says."""
        now, index, model = self._loop.time(), word.profile, self.models[word.profile]
        if word.what == "silence":
            self._silent_until = now + word.seconds
        elif word.what == "deaf":
            self._deaf_until = now + word.seconds
        elif word.what == "late":
            self._report(self._last)
            self._forged()
        elif word.what in ("reboot", "lost"):
            self._boot, self._sequence = self._boot + 1, 0
            if word.what == "lost":  # the machine is gone for a while, and comes back without its engines
                self._silent_until = self._deaf_until = now + word.seconds
                for each, engine in enumerate(self.engines):
                    self._ends(each, engine, state="stopped", ready_in=self._takes)
        elif word.what == "vanish":
            self._hidden.symmetric_difference_update({index})
        elif word.what == "error":
            failed = model.state == "error"
            why = {"ready_in": self._takes, "why": ""} if failed else {"ready_in": None, "why": "error"}
            self._ends(index, self.engines[index], state="stopped" if failed else "error", **why)
        elif word.what == "wake":
            self._begin(index)
        elif model.state == "running" and model.pending is None:
            self._becomes(index, pending=word.what, ready_in=2 * self._takes)
        self.say()

    async def ordered(self, request: httpx.Request) -> httpx.Response:
        """An order of the gateway's."""
        await asyncio.sleep(0.0)  # no time, so that what follows can happen together with what callers do
        if self._loop.time() < self._deaf_until:
            raise httpx.ConnectError("nobody listens")
        _, _, profile, order = request.url.path.split("/")
        index = int(unquote(profile)[1:])
        if (request.method, order) != ("POST", "ensure"):
            self._wrong(f"{self._name} was sent {request.method} {request.url.path}")
        self._begin(index)
        return httpx.Response(200, content=_streamed(encode(Ensured(model=self.models[index]))))

    # -- inside -------------------------------------------------------------------------------------------------

    def _becomes(self, index: int, **fields: Any) -> None:
        self.models[index] = msgspec.structs.replace(self.models[index], **fields)

    def _begin(self, index: int) -> None:
        model = self.models[index]
        if model.pending is None and model.state in ("stopped", "sleeping"):
            self._becomes(index, pending="start" if model.state == "stopped" else "wake")
            self._loop.call_later(self._takes, self._ready, index)

    def _ready(self, index: int) -> None:
        if self.models[index].pending not in ("start", "wake"):
            return  # its machine was lost meanwhile
        engine, posts = self.engines[index], self._asleep.pop(index, None)
        if posts is not None and engine.posts != posts:
            self._wrong(f"{engine.posts - posts} calls were sent to {self.url(index)} while it slept")
        engine.recover()
        self._becomes(index, state="running", pending=None, url=self.url(index), ready_in=0.0)
        self.say()

    def _rests(self, index: int) -> None:
        """Every call has been taken away from it, so nothing is lost."""
        engine, model = self.engines[index], self.models[index]
        if engine.open:
            self._wrong(f"{len(engine.open)} calls run on {self.url(index)}, of which none was said to be in flight")
        state = "sleeping" if model.pending == "sleep" else "stopped"
        self._ends(index, engine, state=state, ready_in=self._takes)
        self._asleep[index] = engine.posts
        self._loop.call_soon(self.say)

    def _ends(self, index: int, engine: MemoryEngine, **fields: Any) -> None:
        self._asleep.pop(index, None)
        engine.die()
        self._becomes(index, pending=None, url="", **fields)


async def _streamed(body: bytes) -> AsyncIterator[bytes]:
    """Yield a body in pieces, as a socket does."""
    yield body
