"""Parts of a gateway that the control port and its console show or give orders to."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping

import msgspec

from gateway.control.calls import CallView
from gateway.control.cluster import ClusterView
from gateway.control.processes import ProcessView
from gateway.core.admission.limits import LimitBook
from gateway.core.admission.quotas import Used as UsedTokens
from gateway.core.engines.engine import Engine
from gateway.core.money.book import Spent
from gateway.core.policy.policy import Policy
from gateway.decider.dispatch import Dispatch
from gateway.decider.ended_calls import EndedCalls
from gateway.decider.observer import Observer
from gateway.decider.report_intake import ReportIntake
from gateway.shared.files.file_status import FileStatus

LogTrouble = tuple[str, float]  # why lines of the call log are lost, and since when (Unix seconds)
Used = tuple[int, int, int]  # calls that ended, those of them that were answered, tokens


class ControlParts(msgspec.Struct, frozen=True, kw_only=True):
    """Parts by name. What asks or orders a sidecar gives the status and body of its answer."""

    dispatch: Dispatch
    limits: LimitBook
    exposition: Callable[[], Callable[[], bytes]]  # reads all numbers; what it returns writes Prometheus text
    calls: Callable[[], Iterable[CallView]]  # calls that have not ended
    ended: EndedCalls  # the last calls
    drain: Callable[[bool], None]  # turns the drain on or off; a drain that stays as it was is refused
    drain_engine: Callable[[Engine, bool], None]  # the same for one engine
    is_user_key: Callable[[str], bool]  # whether a key is the data port's
    policy_status: Callable[[], FileStatus]
    reload: Callable[[], Awaitable[FileStatus]] | None  # reads the policy file again; None: there is no file
    previous: Callable[[], Policy | None]  # the policy before this one; None: there was none
    sidecars: ReportIntake
    order: Callable[[str, str, str], Awaitable[tuple[int, bytes]]]  # sidecar, profile, order
    read_log: Callable[[str, str, int], Awaitable[tuple[int, bytes]]]  # sidecar, profile, lines
    count: Callable[[], Awaitable[None]]  # asks other processes for their counts
    processes: Callable[[], list[ProcessView]]
    cluster: Callable[[], ClusterView] | None  # None: the gateway is alone
    used: Callable[[], Mapping[str, Used]]  # by tenant, since the start
    used_tokens: Callable[[], Awaitable[list[UsedTokens]]]  # by tenant and window, all that is kept
    spent: Callable[[], Awaitable[list[Spent]]]  # money, the same; both raise StorageError
    observer: Observer
    log_trouble: Callable[[], LogTrouble | None]  # None: the log is written

    def state_since(self, sidecar: str, profile: str) -> float | None:
        """Unix seconds when a sidecar's profile entered its state; None: nobody knows."""
        known = self.observer.states.get((sidecar, profile))
        return None if known is None else round(known[2], 1)

    def unix(self, at: float) -> float | None:
        """Seconds since 1970 of a monotonic time; None for one that never was."""
        return None if math.isinf(at) else round(time.time() - self.dispatch.clock() + at, 1)
