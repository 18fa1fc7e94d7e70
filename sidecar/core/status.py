"""Status of a sidecar: the answer to `GET /status`, read by `sidecar status` and by the nodes of a pool."""

from __future__ import annotations

from typing import Literal

import msgspec

from gateway.shared.files.file_status import FileStatus
from gateway.shared.protocol import GPUReport, ModelReport


class GatewayStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of one gateway. `taken`: whether it takes reports, None: not tried yet; `error`: why it does not; `for_s`:
    seconds since that changed."""

    url: str
    taken: bool | None = None
    error: str = ""
    for_s: float = 0.0
    failures: int = 0


RelayOutcome = Literal["ordered", "refused", "left", "answered", "failed", "broken"]


class RelayUse(msgspec.Struct, frozen=True):
    """Use of the relay: open connections, and requests by outcome since its start. `ordered`: an `ensure`; `refused`
    before an engine was asked; `left`: the gateway left, or the sidecar ended; `failed`: the engine gave no answer;
    `broken`: it failed in the middle of one."""

    connections: int
    outcomes: dict[RelayOutcome, int]


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """A sidecar at one moment. `calls`: in flight by profile; `file`: of its reloads; `state_error`: why the state file
    cannot be written, empty while it can; `relay`: None where the file has none; `troubles`: what an operator should
    know, in words."""

    sidecar: str
    version: str
    pid: int
    boot: str
    config: str
    control: str
    up_s: float
    driver: str = ""
    gpus: tuple[GPUReport, ...] = ()
    models: tuple[ModelReport, ...] = ()
    gateways: tuple[GatewayStatus, ...] = ()
    calls: dict[str, int] = {}
    file: FileStatus = FileStatus()
    state_error: str = ""
    relay: RelayUse | None = None
    troubles: tuple[str, ...] = ()
