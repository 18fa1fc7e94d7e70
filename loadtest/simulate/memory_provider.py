"""Simulated provider: an API outside the house with a latency and a limit of its own, answering in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import msgspec

from loadtest.engine.api.checks import ApiError, Limits
from loadtest.simulate.memory_engine import Condition
from loadtest.simulate.memory_requests import Taker, Work, read, refuse

CONTEXT = 1 << 20  # tokens


class ProviderPace(msgspec.Struct, frozen=True, kw_only=True):
    """Speed of a simulated provider, the same at any load. `first`: seconds to the first token; `each`: seconds for
    every further one; `at_once`: requests that it takes at a time, one more is answered with 429."""

    first: float = 0.5
    each: float = 0.01
    at_once: int = 1024


AT_A_PROVIDER = ProviderPace()


class MemoryProvider:
    """Simulated provider of `models`. `posts` counts the requests that it took, `turned_away` those that it did not."""

    condition: Condition = "up"
    changed_at = 0.0

    def __init__(self, models: Iterable[str], pace: ProviderPace) -> None:
        self.limits = Limits(models=tuple(models), max_model_len=CONTEXT, priorities=False, prompt_details=True)
        self.pace = pace
        self.open: dict[Taker, Work | None] = {}
        self.posts = self.turned_away = 0
        self._loop = asyncio.get_running_loop()

    def post(self, path: bytes, body: bytes, taker: Taker, request_id: str = "") -> Callable[[], None]:
        """Take a request. The function returned ends it: a connection that is closed."""
        try:
            if len(self.open) >= self.pace.at_once:
                self.turned_away += 1
                raise ApiError(429, "Too many requests at once.", type="rate_limit_error")
            work = Work(taker, read(b"/v1" + path, body, self.limits))  # its URL ends with /v1
        except ApiError as error:
            return refuse(taker, error)
        self.posts += 1
        self.open[taker] = work
        longest = max([sequence.output for sequence in work.asked.sequences])
        last = self.pace.first + max(0, longest - 1) * self.pace.each
        timers = [
            self._loop.call_later(self.pace.first, work.first),
            self._loop.call_later(last, self._finish, taker, work),
        ]

        def leave() -> None:
            if self.open.pop(taker, None) is not None:
                for timer in timers:
                    timer.cancel()

        return leave

    def _finish(self, taker: Taker, work: Work) -> None:
        del self.open[taker]
        work.finished()
