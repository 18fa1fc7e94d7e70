"""Simulated provider: an API outside the house with a latency and a limit of its own, answering in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from loadtest.engine.api.checks import ApiError, Limits
from loadtest.simulate.memory_engine import Condition
from loadtest.simulate.memory_requests import Taker, Work, read, refuse

CONTEXT = 1 << 20  # tokens
# Its speed, the same at any load.
FIRST = 0.5  # seconds to the first token
EACH = 0.01  # seconds for every further one
AT_ONCE = 1024  # requests at a time, one more is answered with 429


class MemoryProvider:
    """Simulated provider of `models`."""

    condition: Condition = "up"
    changed_at = 0.0

    def __init__(self, models: Iterable[str]) -> None:
        self.limits = Limits(models=tuple(models), max_model_len=CONTEXT, priorities=False, prompt_details=True)
        self.open: dict[Taker, Work | None] = {}
        self._loop = asyncio.get_running_loop()

    def post(self, path: bytes, body: bytes, taker: Taker, request_id: str = "") -> Callable[[], None]:
        """Take a request. The function returned ends it: a connection that is closed."""
        try:
            if len(self.open) >= AT_ONCE:
                raise ApiError(429, "Too many requests at once.", type="rate_limit_error")
            work = Work(taker, read(b"/v1" + path, body, self.limits))  # its URL ends with /v1
        except ApiError as error:
            return refuse(taker, error)
        self.open[taker] = work
        longest = max([sequence.output for sequence in work.asked.sequences])
        last = FIRST + max(0, longest - 1) * EACH
        timers = [
            self._loop.call_later(FIRST, work.first),
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
