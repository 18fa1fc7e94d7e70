"""Sources of the console beside the fleet, the dispatch and the policy's status."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping

import msgspec

from gateway.core.admission.bucket import Bucket
from gateway.core.policy.policy import Policy
from gateway.decider.ended_calls import EndedCalls
from gateway.decider.observer import Observer

LogTrouble = tuple[str, float]  # why lines of the call log are lost, and since when (Unix seconds)
ReadLog = Callable[[str, str, int], Awaitable[tuple[int, bytes]]]  # sidecar, profile, lines -> status, body
GiveOrder = Callable[[str, str, str], Awaitable[tuple[int, bytes]]]  # sidecar, profile, order -> status, body
Used = tuple[int, int, int]  # calls that ended, those of them that were answered, tokens


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """`ended`: the last calls. `order` passes an operator's order on to a sidecar; None: there are none. `previous`:
    the policy before this one, None: there was none. `used`: by tenant, since the start. `buckets`: of all limits.
    `observer` keeps the history, None: nobody does. `log_trouble`: None: the log is written. `read_log`: of an engine,
    from its sidecar.
    """

    ended: EndedCalls = msgspec.field(default_factory=EndedCalls)
    order: GiveOrder | None = None
    previous: Callable[[], Policy | None] = lambda: None
    used: Callable[[], Mapping[str, Used]] = dict
    buckets: Callable[[], Iterable[Bucket]] = tuple
    observer: Observer | None = None
    log_trouble: Callable[[], LogTrouble | None] = lambda: None
    read_log: ReadLog | None = None

    def state_since(self, sidecar: str, profile: str) -> float | None:
        """Unix seconds when a sidecar's profile entered its state; None: nobody knows."""
        known = None if self.observer is None else self.observer.states.get((sidecar, profile))
        return None if known is None else round(known[2], 1)
