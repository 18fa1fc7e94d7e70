"""Course of a simulation: what happens, what is wrong first, the calls that are open, and the end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from loadtest.clients.calls import ClientCall, Transport
from loadtest.clients.retries import Clients
from loadtest.lab.dst.answers import wrong_with
from loadtest.lab.dst.case import Call, Case
from loadtest.lab.dst.parts import planned
from loadtest.simulate.vtime import VirtualLoop


class Course:
    """Course of one case. `log` takes all that happens, a line each; `wrong` is what went wrong first, empty: nothing.
    `happen` takes each event with its number, `open_calls` returns the numbers of the calls that have no end yet."""

    def __init__(
        self,
        case: Case,
        log: list[str],
        happen: Callable[[int, Any], None],
        open_calls: Callable[[], list[int]],
    ) -> None:
        self.log = log
        self.wrong = ""
        self.loop = asyncio.get_running_loop()
        self._case = case
        self._happen = happen
        self._open_calls = open_calls
        self._coming = len(case.events)
        self._over: asyncio.Future[None] = self.loop.create_future()
        self.loop.set_exception_handler(self._broken)

    def tell(self, line: str) -> None:
        """Log a line with its time."""
        self.log.append(f"{self.loop.time():10.4f}  {line}")

    def found(self, what: str) -> None:
        """End the simulation because something is wrong."""
        if not self.wrong:
            self.wrong = f"at {self.loop.time():.4f} s: {what}"
            self.tell(f"WRONG: {what}")
            self._end()

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _broken(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.found(f"{context['message']}: {context.get('exception')!r}")

    @property
    def over(self) -> bool:
        return self._over.done()

    def watch(self, at_rest: Callable[[], None]) -> None:
        """Call `at_rest` at each moment at which nothing is left to be done."""
        assert isinstance(self.loop, VirtualLoop)  # noqa: S101 # else nothing is ever at rest
        self.loop.watch(at_rest)

    async def play(self, longest: float) -> None:
        """Let all events happen, and wait for the end of every call, at most `longest` seconds after the last event."""
        for number, event in zip(self._case.numbers, self._case.events, strict=True):
            self.loop.call_at(event.at, self._happens, number, event)
        last = self._case.events[-1].at if self._case.events else 0.0
        await self.wait(last + longest)
        if not self.over:
            self.found(f"calls without an end: {sorted(self._open_calls())}")

    async def wait(self, seconds: float) -> None:
        """Wait for the end, at most so long."""
        await asyncio.wait((self._over,), timeout=seconds)

    def reopen(self) -> None:
        """Go on after all calls have ended, until something is wrong."""
        self._over = self.loop.create_future()

    def check_tasks(self) -> None:
        """Check that only the caller's task is left."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks and not self.wrong:
            self.found(f"tasks that still run: {tasks}")

    def end_if_all(self) -> None:
        """End the simulation if every event has happened and no call is open."""
        if not self._coming and not self._open_calls():
            self._end()

    def _happens(self, number: int, event: Any) -> None:
        if self.wrong:
            return
        self.tell(f"[{number}] {event}")
        self._happen(number, event)
        self._coming -= 1
        self.end_if_all()


class OpenCalls:
    """`numbers`: of the calls that are open, in the case. `target`: whom they are sent to. `seed` draws clients'
    whims."""

    def __init__(self, seed: int, target: Transport, course: Course) -> None:
        self.numbers: dict[ClientCall, int] = {}
        self._seed, self._target, self._course = seed, target, course

    def begin(self, number: int, call: Call) -> None:
        """A client begins a call."""
        rng = random.Random(f"{self._seed} {number}")  # noqa: S311 # a client's whims
        whole, clients = planned(number, call), Clients(retries=call.retries)

        def check(answer: bytes) -> None:
            wrong = wrong_with(call, whole.body, answer)
            if wrong:
                self._course.found(f"the answer to {call} is not its own: {wrong}")

        client_call = ClientCall(whole, self._target, clients, rng, self._ended, check=check)
        self.numbers[client_call] = number
        if call.leaves > 0.0:
            asyncio.get_running_loop().call_later(call.leaves, self.leave, client_call)
        client_call.send()
        if not call.leaves:  # before anybody has had a turn
            self.leave(client_call)

    def leave(self, client_call: ClientCall) -> None:
        """Let its client go away, if it is there still."""
        if client_call in self.numbers:
            self._course.tell(f"client of [{self.numbers[client_call]}] leaves")
            client_call.leave("left")

    def _ended(self, client_call: ClientCall) -> None:
        number = self.numbers.pop(client_call, None)
        if number is None:
            self._course.found("a call ended twice")
        self._course.tell(f"[{number}] ended: {client_call.tried.outcome}")
        self._course.end_if_all()
