"""Active call: a call under way, as its watchers see it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gateway.core.admission.decider import Admission
from gateway.core.request.call import Call
from gateway.core.request.call_trace import CallTrace
from gateway.core.request.record import Record
from gateway.core.request.tenants import Account

if TYPE_CHECKING:
    from gateway.relay.mirror import MirrorCopy


class ActiveCall:
    """`leave` ends it from outside, saying why."""

    __slots__ = ("account", "admission", "begun", "call", "copy", "record", "task", "trace", "unchanged")

    def __init__(self, record: Record) -> None:
        self.record = record
        self.account: Account | None = None  # if it is known already
        self.admission: Admission | None = None  # once it has arrived
        self.call: Call | None = None  # once it is parsed
        self.copy: MirrorCopy | None = None  # of a call for a model route with a mirror, until it begins
        self.trace: CallTrace | None = None  # where it is sampled
        self.task: asyncio.Task[None] | None = None
        self.unchanged = True  # the body for the engine is the client's own
        self.begun = False  # its task has had its first turn; one that is cancelled before then never has any

    def leave(self, reason: str) -> None:
        """`client_gone`, `slow_client`, `deadline` or `drain`: the call is cancelled."""
        self.record.reason = reason
        if self.task is not None and self.begun:
            self.task.cancel()
