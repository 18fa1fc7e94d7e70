"""Calls of clients: a `ClientCall` for each over all its tries, as callbacks and timers without a coroutine.

A client sends, hears back, and tries again by the rules of `retries.py`; after the first byte of an answer never. The
same calls go over sockets in real time (`sender.py`) and to a gateway in memory in virtual time: a `Transport` sends
them, and the clock is a run's own.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

from loadtest.clients.retries import Clients, advice
from loadtest.load.workload import Planned
from loadtest.report.records import RequestResult, TokenGaps

ERROR = b'data: {"error"'
DONE = b"data: [DONE]"
FIRST = b'data: {"choices":[{'
_PROMPT = re.compile(rb'"prompt_tokens":(\d+)')
_COMPLETION = re.compile(rb'"completion_tokens":(\d+)')
_CACHED = re.compile(rb'"cached_tokens":(\d+)')
_CONTENT = re.compile(rb'"content"\s*:\s*"([^"\\]*(?:\\.[^"\\]*)*)"')


class WallClock:
    """Seconds since a run's start, which is `begin` on `time.monotonic`. The loop's own time would not do: uvloop's
    stands still within a turn, and tells milliseconds."""

    def __init__(self, begin: float) -> None:
        self.begin = begin

    def time(self) -> float:
        """Seconds since the start; negative before it."""
        return time.monotonic() - self.begin

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Set a timer, as the loop does in virtual time."""
        return asyncio.get_running_loop().call_later(max(0.0, when - self.time()), callback, *args)


Clock = asyncio.AbstractEventLoop | WallClock


class Try(msgspec.Struct, gc=False):
    """Request and what came of it. Times are seconds of the run's clock, -1 where the thing did not happen.

    `outcome` is a word of `Answer.outcome`: ok, the gateway's reason, upstream, truncated, cut, unanswered, timed_out;
    `left`: the client went away on purpose; `unfinished`, `interrupted`: the run was over. What only the gateway knows
    comes from its record.
    """

    class_name: str
    number: int  # 1 for a call's first try
    intended: float  # when the call was meant to be sent for the first time
    sent: float
    first_byte: float = -1.0
    finished: float = -1.0
    status: int = 0
    outcome: str = ""
    reason: str = ""  # of an outcome that is not ok, in few words
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    advised: float = -1.0  # seconds the answer said to wait
    recorded: str = ""  # the gateway's outcome; empty: no record has come
    engine: str = ""
    upstream: int = 0  # requests sent to engines
    queue: float = -1.0
    recorded_at: float = -1.0  # when the gateway was done with it
    first_token: float = -1.0  # of a stream
    gaps: tuple[float, ...] | TokenGaps = ()  # inter-token latencies, where they are known
    hear: Callable[[], None] | None = None  # over a socket: notes what has come of the answer so far


class Transport(Protocol):
    """Way of calls to a server: a gateway, or engines directly."""

    def send(self, call: Planned, client_call: ClientCall, tried: Try) -> Callable[[], None]:
        """Send. The function returned is the client's leaving; it may be called at any time, also in vain."""


class ClientCall:
    """Call from its intended time to its end. `check` hears each answer of the target in memory that is whole."""

    __slots__ = ("_answer", "_check", "_clients", "_clock", "_cut", "_ended", "_leave", "_rng", "_target", "_timer",
                 "call", "tried", "tries")  # fmt: skip

    def __init__(
        self,
        call: Planned,
        target: Transport,
        clients: Clients,
        rng: random.Random,
        ended: Callable[[ClientCall], None],
        clock: Clock | None = None,
        check: Callable[[bytes], None] | None = None,
    ) -> None:
        self.call = call
        self.tries: list[Try] = []
        self._target = target
        self._clients = clients
        self._rng = rng
        self._ended = ended
        self._clock = asyncio.get_running_loop() if clock is None else clock
        self._check = check
        self._timer: asyncio.TimerHandle | None = None
        self._cut: tuple[str, str] | None = None  # outcome and reason of a call that would have tried again
        self._answer: list[bytes] = []
        self._leave: Callable[[], None] | None = None

    def send(self) -> None:
        """The next try, now."""
        now, clients, call = self._clock.time(), self._clients, self.call
        tried = self.tried = Try(call.class_name, len(self.tries) + 1, call.at, now)
        self.tries.append(tried)
        self._answer = []
        patience = clients.patience_of(call.class_name)
        if clients.leaves and self._rng.random() < clients.leaves:
            self._timer = self._clock.call_at(
                now + self._rng.expovariate(1.0 / clients.leaves_after), self.leave, "left"
            )
        elif patience < math.inf:
            self._timer = self._clock.call_at(now + patience, self.leave, "timed_out")
        else:
            self._timer = None
        leave = self._target.send(call, self, tried)
        if tried.finished < 0.0:  # else it was answered on the spot
            self._leave = leave

    # -- answers of the target, in memory -----------------------------------------------------------------------

    def head(self, status: int, fields: Mapping[bytes, bytes]) -> None:
        """Status and headers are here."""
        tried = self.tried
        tried.first_byte = self._clock.time()
        tried.status = status
        if status != 200:
            tried.outcome = fields.get(b"x-weir-reason", b"upstream" if status >= 500 else b"engine_refused").decode()
            tried.reason = str(status)
            tried.advised = advice(fields)

    def body(self, data: bytes) -> None:
        """A piece of the body, its framing perhaps included."""
        self._answer.append(data)
        if self.tried.first_token < 0.0 and FIRST in data:
            self.tried.first_token = self._clock.time()

    def over(self, whole: bool) -> None:
        """Nothing more will come. `whole`: the answer was complete as far as HTTP can tell."""
        tried = self.tried
        if tried.finished >= 0.0:
            return
        data = b"".join(self._answer)
        if tried.status == 200:
            if ERROR in data:
                tried.outcome = "upstream" if DONE in data else "truncated"
            elif not whole:
                tried.outcome = "cut"
            else:
                tried.outcome = "ok"
                self._read_usage(data)
                if self._check is not None:
                    self._check(data)
        elif not tried.status:
            tried.outcome = "unanswered"
        self.close(data, self._clock.time())

    # -- the end ------------------------------------------------------------------------------------------------

    def leave(self, why: str, reason: str = "") -> None:
        """Go away: `left`, `timed_out`, `unfinished` or `interrupted`."""
        tried = self.tried
        if tried.finished >= 0.0:  # between two tries
            self._cut = why, reason
            self._stop()
            self._ended(self)
            return
        tried.outcome, tried.reason = why, reason
        if tried.hear is not None:
            tried.hear()
        leave, self._leave = self._leave, None
        self.close(b"", self._clock.time())
        if leave is not None:
            leave()

    def close(self, data: bytes, finished: float) -> None:
        """Note the end of a try, whose outcome is known; there may be another. `data`: the body, or what came of it."""
        tried = self.tried
        tried.finished = finished
        tried.hear = self._leave = None
        self._stop()
        wait = self._clients.wait_before_retry(tried.number, tried.outcome, tried.status, tried.advised, self._rng)
        if wait is not None:
            self._timer = self._clock.call_at(tried.finished + wait, self.send)
            return
        session = self.call.session
        if session is not None and tried.outcome == "ok":
            self._answer = [b"".join(_CONTENT.findall(data))]
        self._ended(self)

    def _read_usage(self, data: bytes) -> None:
        prompt, tried = _PROMPT.search(data), self.tried
        if prompt is not None:
            completion, cached = _COMPLETION.search(data, prompt.end()), _CACHED.search(data, prompt.end())
            tried.prompt_tokens = int(prompt[1])
            tried.completion_tokens = int(completion[1]) if completion is not None else 0
            tried.cached_tokens = int(cached[1]) if cached is not None else 0

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def answer(self) -> bytes:
        """Text of the answer as it stands in JSON, once the call has ended well and is part of a session."""
        return self._answer[0] if self._answer else b""

    def result(self, target: str, repeat: int = 0) -> RequestResult:
        """Result for the report, once it has ended."""
        call, tried = self.call, self.tried
        outcome, reason = self._cut or (tried.outcome, tried.reason)
        return RequestResult(
            index=call.index,
            target=target,
            repeat=repeat,
            at=call.at,
            kind=call.kind,
            class_name=call.class_name,
            tenant=call.tenant,
            sent=self.tries[0].sent,
            first_byte=max(0.0, tried.first_byte),
            first_token=max(0.0, tried.first_token),
            finished=max(0.0, tried.finished),
            status=tried.status,
            outcome=outcome,
            reason=reason,
            prompt_tokens=tried.prompt_tokens,
            completion_tokens=tried.completion_tokens,
            cached_tokens=tried.cached_tokens,
            tries=len(self.tries),
            gaps=tried.gaps,
        )
