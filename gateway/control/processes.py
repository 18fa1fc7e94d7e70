"""Processes of one gateway as JSON, for GET /processes."""

from __future__ import annotations

from typing import Literal

import msgspec


class ProcessView(msgspec.Struct, frozen=True):
    """Process of a gateway. `started`: Unix seconds. `calls`: calls that ended in this process. `connections`:
    connections of clients. A gateway with one process has a decider only."""

    role: Literal["parent", "decider", "relay"]
    pid: int
    started: float
    calls: int
    connections: int
