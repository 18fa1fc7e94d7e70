"""Rules that look at no prompt: a draw for each client, round robin, least requests."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from loadtest.simulate.rivals.router import Prompt, Worker


class Direct:
    """No router, and nobody who takes turns: each conversation, and each call that is none, goes to the engine that
    chance has given it, as where clients are told one address each."""

    reads = False
    polls = 0.0

    def choose(self, prompt: Prompt, workers: Sequence[Worker]) -> Worker:
        return workers[zlib.crc32(prompt.who.encode()) % len(workers)]


class RoundRobin:
    """The next engine's turn, as nginx and a Kubernetes Service do it."""

    reads = False
    polls = 0.0

    def __init__(self) -> None:
        self._next = 0

    def choose(self, prompt: Prompt, workers: Sequence[Worker]) -> Worker:
        worker = workers[self._next % len(workers)]
        self._next += 1
        return worker


class LeastRequests:
    """The engine with the fewest unanswered requests, as nginx's least_conn and HAProxy's leastconn; of several the one
    that was chosen longest ago."""

    reads = False
    polls = 0.0

    def __init__(self) -> None:
        self._chosen: dict[int, int] = {}
        self._calls = 0

    def choose(self, prompt: Prompt, workers: Sequence[Worker]) -> Worker:
        worker = min(workers, key=lambda one: (one.requests, self._chosen.get(one.number, -1)))
        self._calls += 1
        self._chosen[worker.number] = self._calls
        return worker
