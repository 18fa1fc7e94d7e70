"""Scalers that are compared: the gateway's signal, a queue's length as KEDA has it, an oracle that knows the trace."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from gateway.decider.dispatch import Dispatch
from loadtest.engine.latency import Profile
from loadtest.lab.scaling.pool import SYNC
from loadtest.load.trace import Arrival

QUEUE = 5  # waiting calls for each engine: the threshold of published examples of KEDA before vLLM
WINDOW = 300.0  # seconds: scaleDown.stabilizationWindowSeconds of Kubernetes, where nothing else is said


class Signal:
    """`weir_engines_wanted`, followed as it is. As long as no call has come there is no series, which KEDA takes for no
    reason to change the `first` engines."""

    def __init__(self, dispatch: Dispatch, first: int) -> None:
        self._dispatch = dispatch
        self._first = first

    def __call__(self, now: float) -> int:
        return max(self._dispatch.engines_wanted().values(), default=self._first)


class QueueLength:
    """KEDA's AverageValue on the number of waiting calls, wherever they wait: ceil(queue / 5), at least 1, and the
    largest such number of the stabilization window."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch
        self._recent: deque[tuple[float, int]] = deque()

    def __call__(self, now: float) -> int:
        queued = sum(map(len, self._dispatch.queues.values()))
        inside = sum(engine.sample.waiting for engine in self._dispatch.fleet if engine.sample is not None)
        self._recent.append((now, max(1, math.ceil((queued + inside) / QUEUE))))
        while self._recent[0][0] < now - WINDOW:
            self._recent.popleft()
        return max(wanted for _, wanted in self._recent)


class Oracle:
    """Knows every call and what it costs an engine, and orders what a quarter of a minute needs before it begins.

    `level`: the share of an engine's time that it fills. The highest with which the targets are kept makes the fewest
    engine-hours.
    """

    def __init__(self, arrivals: Sequence[Arrival], profile: Profile, start: float, level: float) -> None:
        self._ahead = math.ceil(start / SYNC)
        seconds: list[float] = []
        for arrival in arrivals:
            slot = int(arrival.at // SYNC)
            seconds.extend([0.0] * (slot + 1 - len(seconds)))
            context = arrival.prompt_tokens + arrival.output_tokens / 2
            seconds[slot] += profile.prefill * arrival.prompt_tokens + arrival.output_tokens * (
                profile.decode + profile.context * context
            )
        self._needs = [max(1, math.ceil(work / SYNC / level)) for work in seconds]

    @property
    def first(self) -> int:
        """Engines that the first minute needs: every scaler begins with as many."""
        return max(self._needs[:4])

    def __call__(self, now: float) -> int:
        """What is needed until an engine that is ordered at the next decision would be there."""
        slot = int(now // SYNC)
        return max(self._needs[slot : slot + self._ahead + 2], default=1)
