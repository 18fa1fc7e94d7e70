"""Driver of one run: sends each request at its intended time, or closed-loop clients' next ones; ends the run.

An open loop never waits for an answer: times were fixed before the run. A sender that is late sends at once what is due
and reports its lag. It gives way to answers after every BURST, so that being late costs lateness alone. What is overdue
at the run's end counts as not sent.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import msgspec

from loadtest.clients.retries import Clients
from loadtest.clients.sender import Sender
from loadtest.clients.targets import Servers
from loadtest.load.trace import TraceError
from loadtest.load.workload import OpenConversations, Planned
from loadtest.report.records import RequestResult

BURST = 32  # requests sent in one turn of the loop
TELL_EVERY = 0.5  # seconds
LONGEST = 86_400.0  # seconds of one timer


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Load of one run. `planned`: the requests in order, and no more of them than are to be sent within
    `seconds`; `users`: of a closed loop, 0 for an open one; `drain`: how long the last answers are waited for."""

    planned: Iterator[Planned]
    seconds: float
    users: int = 0
    drain: float = 30.0
    clients: Clients = Clients(timeout=600.0)


class LoadProgress(msgspec.Struct, frozen=True):
    """Progress of a run. `outcomes`: of calls that have ended."""

    at: float
    seconds: float
    sent: int
    open: int
    outcomes: dict[str, int]
    late: float  # the longest lag since the last time, seconds


class Driver:
    """Driver of one run. `failed`: the error that ended the run early, such as a malformed row of a trace. `stopped`:
    somebody ended the run."""

    def __init__(
        self, servers: Servers, load: Load, *, target: str, repeat: int, headers: bytes = b"", begin: float,
        tell: Callable[[LoadProgress], None],
    ) -> None:  # fmt: skip
        rng = random.Random(f"retries {repeat}")  # noqa: S311 # clients' whims
        self.sender = Sender(
            servers, target=target, repeat=repeat, begin=begin, clients=load.clients, headers=headers, rng=rng,
            ended=self._ended,
        )  # fmt: skip
        self.failed: Exception | None = None
        self.stopped = False
        self.sent = 0
        self._load = load
        self._begin = begin
        self._tell = tell
        self._late = 0.0
        self._next: Planned | None = None
        self._waiting = 0  # turns of conversations whose time has not come
        self._talking = 0  # calls of conversations that are open
        self._turns = OpenConversations()
        self._sending = True
        self._dry = False  # nothing is planned any more
        self._changed = asyncio.Event()

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._begin

    def stop(self) -> None:
        """Send no more, and wait for nothing."""
        self.stopped = True
        self._changed.set()

    async def run(self) -> None:
        """Until every answer has come, or nobody waits any more. The run starts at `begin`, which may be to come."""
        load, loop = self._load, asyncio.get_running_loop()
        loop.call_later(TELL_EVERY, self._report)
        if load.users:
            loop.call_later(max(0.0, -self.now), self._begin_users)
        else:
            self._take()
            self._arm()
        await self._until(self._all_sent, load.seconds - self.now)
        self._sending = False
        if not load.users and not self.stopped:
            self._miss()
        await self._until(lambda: not self.sender.open, load.drain)
        if self.stopped:
            self.sender.stop("interrupted", "the run was broken off")
        self.sender.stop("unfinished", f"still open {load.drain:g} s after the last was sent")
        self._report()

    def _all_sent(self) -> bool:
        """Whether nothing is to be sent any more, nor can be once what is open is answered."""
        return self._dry and not (self._next is not None or self._waiting or self._talking)

    async def _until(self, reached: Callable[[], bool], seconds: float) -> None:
        """Wait until it is, for so long, or until the run is stopped."""
        end = time.monotonic() + seconds
        while not reached() and not self.stopped and (left := end - time.monotonic()) > 0.0:
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, LONGEST)):
                    await self._changed.wait()

    # -- an open loop -----------------------------------------------------------------------------------------------

    def _take(self) -> None:
        try:
            self._next = next(self._load.planned, None)
        except (TraceError, OSError, ValueError) as error:
            self._next, self.failed = None, error
        if self._next is None:
            self._dry = True
            self._changed.set()

    def _arm(self) -> None:
        if self._next is not None:
            asyncio.get_running_loop().call_later(max(0.0, self._next.at - self.now), self._due)

    def _due(self) -> None:
        for _ in range(BURST):
            planned = self._next
            if planned is None or not self._sending:
                return
            if planned.at > self.now:
                break
            self._send(planned)
            self._take()
        self._arm()

    def _send(self, planned: Planned) -> None:
        self._late = max(self._late, self.now - planned.at)
        self.sent += 1
        self._talking += planned.session is not None
        self.sender.send(planned)

    def _miss(self) -> None:
        """Count what was due by the end of the run, and was not sent because the sender was late."""
        while self._next is not None and self._next.at < min(self.now, self._load.seconds):
            self.sender.missed(self._next)
            self._take()

    def _turn(self, planned: Planned) -> None:
        """The next turn of a conversation is due, before the end. One that is late beyond the end is not sent."""
        self._waiting -= 1
        if self._sending:
            self._send(planned)
        elif not self.stopped:
            self.sender.missed(planned)

    def _ended(self, planned: Planned, result: RequestResult, said: bytes) -> None:
        following = 0
        if planned.session is not None:
            self._talking -= 1
            if result.outcome == "ok" and self._sending:
                following = sum(self._follow(then) for then in planned.session.follow(said, result.finished))
        if self._load.users and self._sending and self._turns.end(planned, following):
            asyncio.get_running_loop().call_soon(self._user)
        if self._all_sent() if self._sending else not self.sender.open:
            self._changed.set()

    def _follow(self, then: Planned) -> bool:
        """Send it when it is due, where that is before the end."""
        if then.at >= self._load.seconds:
            return False
        self._waiting += 1
        asyncio.get_running_loop().call_later(max(0.0, then.at - self.now), self._turn, then)
        return True

    # -- a closed loop ----------------------------------------------------------------------------------------------

    def _begin_users(self) -> None:
        for _ in range(self._load.users):
            self._user()

    def _user(self) -> None:
        """A user's next request, which is meant to be sent now, or when the user begins."""
        if not self._sending or self.now >= self._load.seconds:
            return
        self._take()
        planned, self._next = self._next, None
        if planned is None:
            return
        if planned.at > self.now:
            self._follow(planned)
        else:
            planned.at = self.now
            self._send(planned)

    # -- telling ----------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        sender, now = self.sender, self.now
        self._tell(
            LoadProgress(now, self._load.seconds, self.sent, len(sender.open), dict(sender.outcomes), self._late)
        )
        self._late = 0.0
        if self._sending or sender.open:
            asyncio.get_running_loop().call_later(TELL_EVERY, self._report)
