"""Driver of one run: begins each call at its intended time, or closed-loop clients' next ones, and ends the run.

The same in real time over sockets and in virtual time. An open loop never waits for an answer: times were fixed before
the run. A sender that is late begins at once what is due, and gives way to answers after every `burst` of calls, so
that being late costs lateness alone. What is overdue at the run's end is missed.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterable, Iterator

from loadtest.clients.calls import ClientCall, Clock, Transport
from loadtest.clients.retries import Clients
from loadtest.load.trace import TraceError
from loadtest.load.workload import OpenConversations, Planned

EARLY = 1e-9  # seconds, that a timer may ring early
LONGEST = 1e8  # seconds of one timer


class Driver:
    """Calls of one run. `closed`: so many clients, each with its next call, or conversation, as soon as the one before
    has ended; 0: an open loop. `ended` hears of each call after its last try, `missed` of one that was due and is not
    sent any more. `calls` counts those that were begun, `late` is the longest lag since somebody has set it to 0.

    `failed`: what ended the calls before their time, such as a row of a trace that cannot be used. `broken`: a future
    whose exception ends the run.
    """

    def __init__(
        self, target: Transport, calls: Iterable[Planned], *, clients: Clients, rng: random.Random, closed: int = 0,
        ended: Callable[[ClientCall], None], missed: Callable[[Planned], None] = lambda planned: None,
        clock: Clock | None = None, burst: int = 1,
    ) -> None:  # fmt: skip
        loop = asyncio.get_running_loop()
        self.open: dict[ClientCall, None] = {}
        self.calls = 0
        self.late = 0.0
        self.failed: Exception | None = None
        self.stopped = False
        self.sending = True
        self.broken: asyncio.Future[None] = loop.create_future()
        self._target = target
        self._planned: Iterator[Planned] = iter(calls)
        self._clients = clients
        self._rng = rng
        self._closed = closed
        self._listener = ended
        self._missed = missed
        self._clock: Clock = loop if clock is None else clock
        self._burst = burst
        self._due: Planned | None = None  # the next call of an open loop
        self._turns = 0  # of conversations, whose time has not come
        self._talking = 0  # calls of conversations that are open
        self._conversations = OpenConversations()
        self._all = False  # no call is left that begins of itself
        self._seconds = 0.0
        self._sent: asyncio.Future[None] = loop.create_future()  # nothing is to be sent any more
        self._empty: asyncio.Future[None] = loop.create_future()

    async def run(self, seconds: float, drain: float) -> int:
        """Begin calls until `seconds`, wait for open ones until `drain` seconds after that, or after the last was begun
        where `seconds` is infinite; then whoever is left leaves. Return how many these are."""
        self._seconds = seconds
        if not self._closed:
            self._due = self._next()
            self._arm()
        elif self._clock.time() < 0.0:
            self._clock.call_at(0.0, self._begin_clients)
        else:
            self._begin_clients()
        while not self._sent.done() and (left := seconds - self._clock.time()) > EARLY:
            await self.wait(left, self._sent)  # whose timer may ring early
        if not self.stopped and self._due is not None and self._due.at < seconds:
            self._begin_due()  # whose timer may ring late, so after the end
        self.sending = False
        if not self.stopped:
            self._miss()
        if self.open and not self.stopped:
            left = seconds - self._clock.time() if math.isfinite(seconds) else 0.0
            await self.wait(left + drain, self._empty)
        unfinished = list(self.open)
        why, reason = "unfinished", f"still open {drain:g} s after the load's end"
        if self.stopped:
            why, reason = "interrupted", "the run was broken off"
        for client_call in unfinished:
            client_call.leave(why, reason)
        return len(unfinished)

    def stop(self) -> None:
        """Send no more, and wait for nothing."""
        self.stopped = True
        for over in (self._sent, self._empty):
            if not over.done():
                over.set_result(None)

    async def wait(self, seconds: float, sooner: asyncio.Future[None]) -> None:
        """Wait for the future, at most so long. Raises what `broken` does."""
        waited = {sooner, self.broken}
        await asyncio.wait(waited, timeout=min(seconds, LONGEST), return_when=asyncio.FIRST_COMPLETED)
        if self.broken.done():
            self.broken.result()

    # -- beginning ----------------------------------------------------------------------------------------------

    def _next(self) -> Planned | None:
        try:
            planned = next(self._planned, None)
        except (TraceError, OSError, ValueError) as error:
            self.failed, planned = error, None
        if planned is None:
            self._all = True
            self._check_sent()
        return planned

    def _check_sent(self) -> None:
        if self._all and not (self._turns or self._talking or self._sent.done()):
            self._sent.set_result(None)

    def _arm(self) -> None:
        if self._due is not None:
            self._clock.call_at(self._due.at, self._begin_due)

    def _begin_due(self) -> None:
        for _ in range(self._burst):
            planned = self._due
            if planned is None or not self.sending:
                return
            if planned.at > self._clock.time() + EARLY:
                break
            self._begin(planned)
            self._due = self._next()
        self._arm()

    def _miss(self) -> None:
        """Count the calls that were due by now, and were not begun because the sender was late."""
        while self._due is not None and self._due.at < min(self._clock.time(), self._seconds):
            self._missed(self._due)
            self._due = self._next()

    def _begin(self, planned: Planned) -> None:
        self.calls += 1
        self.late = max(self.late, self._clock.time() - planned.at)
        self._talking += planned.session is not None
        client_call = ClientCall(planned, self._target, self._clients, self._rng, self._ended, self._clock)
        self.open[client_call] = None
        client_call.send()

    def _begin_clients(self) -> None:
        for _ in range(self._closed):
            self._begin_next()

    def _begin_next(self) -> None:
        """Begin a client's next call, which is meant to be sent now, or when the client begins."""
        planned = self._next() if self.sending else None
        if planned is not None:
            now = self._clock.time()
            if planned.at > now:
                self._turn_at(planned)
            else:
                planned.at = now
                self._begin(planned)

    def _turn_at(self, planned: Planned) -> None:
        self._turns += 1
        self._clock.call_at(planned.at, self._turn, planned)

    def _turn(self, planned: Planned) -> None:
        """Begin a turn of a conversation. One that was due before the end and comes after it is missed."""
        self._turns -= 1
        if self.sending:
            self._begin(planned)
        elif planned.at < self._seconds and not self.stopped:
            self._missed(planned)

    def _ended(self, client_call: ClientCall) -> None:
        del self.open[client_call]
        session = client_call.call.session
        self._talking -= session is not None
        self._listener(client_call)
        if not self.sending:
            if not self.open and not self._empty.done():
                self._empty.set_result(None)
            return
        following: list[Planned] = []
        if session is not None and client_call.tried.outcome == "ok":
            following = session.follow(client_call.answer, client_call.tried.finished)
            for planned in following:
                self._turn_at(planned)
        if self._closed and self._conversations.end(client_call.call, len(following)):
            asyncio.get_running_loop().call_soon(self._begin_next)
        self._check_sent()
