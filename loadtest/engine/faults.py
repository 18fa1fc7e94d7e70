"""Fault injection while the engine runs: `POST /_faults` with the fields below; `{}` heals everything.

A fault with a share (0..1) strikes that share of the generating and pooling requests, drawn from the seed. A fault that
does not concern requests (hang, refuse, metrics, memory) holds until it is taken back.

An engine on simulated GPUs finds the faults of its start, and all others, in a file of their folder: `faults_of`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import quote

import msgspec

Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Events = Annotated[int, msgspec.Meta(ge=0)]


class Faults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """All of them off. Shares are 0..1; `after` counts SSE events that still get through."""

    slow: Annotated[float, msgspec.Meta(gt=0.0)] = 1.0  # every step takes this many times as long
    hang: bool = False  # no more steps; /health stays 200, as with a stopped EngineCore, and /is_sleeping never answers
    refuse: bool = False  # connections are accepted, then reset at the first byte; /_faults still answers
    close_listener: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0  # seconds without a listening socket, then it is back
    errors: Share = 0.0  # answered with `status` at once
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 500
    die_before_headers: Share = 0.0  # the connection is reset instead of an answer
    die_mid_stream: Share = 0.0  # reset after `after` events
    truncate: Share = 0.0  # closed after `after` events: no end of the body, no [DONE]
    error_mid_stream: Share = 0.0  # after `after` events an error event, then [DONE]: as vLLM when EngineCore dies
    after: Events = 3
    garbage: Share = 0.0  # bytes that are not HTTP
    no_newline: Share = 0.0  # a stream of 1 MiB without a newline
    garbage_metrics: bool = False
    stale_metrics: bool = False  # /metrics stays as it was when this was set
    out_of_memory: bool = False  # EngineCore dies: what runs fails, /health is 503, requests get 500
    fail_wake: bool = False  # /wake_up answers 500
    keep_memory: bool = False  # asleep it holds what it held awake
    hang_end: bool = False  # SIGTERM does not end it
    # At its start, and without effect later:
    fail_start: str = ""  # it ends with these last words and exit status 1
    hang_start: bool = False  # it does nothing and says nothing
    hang_loading: Literal["", "idle", "busy"] = ""  # it stops in its weights, says so every minute; busy: burns a core
    download: str = ""  # it first fills this file, without a line, for
    download_seconds: Annotated[float, msgspec.Meta(ge=0.0, le=86400.0)] = 10.0
    out_of_memory_start: bool = False  # it ends while it loads the weights, as when the GPU is too small


class Plan(msgspec.Struct, frozen=True):
    """Faults of one request: at most one of these."""

    kind: str  # the field of Faults
    after: int = 0
    status: int = 500


_BY_SHARE = (
    "errors",
    "die_before_headers",
    "garbage",
    "no_newline",
    "die_mid_stream",
    "truncate",
    "error_mid_stream",
)


def plan(faults: Faults, rng: random.Random) -> Plan | None:
    """Draw the fate of one request; None: nothing goes wrong."""
    for kind in _BY_SHARE:
        share = getattr(faults, kind)
        if share and rng.random() < share:
            return Plan(kind, faults.after, faults.status)
    return None


def faults_of(folder: Path, model: str) -> Faults:
    """Read `FOLDER/MODEL.faults`, in the JSON of `POST /_faults`; without a file there are no faults. MODEL is the
    first served name, percent-encoded where a file's name cannot have it. Raises ValueError for anything else."""
    file = folder / f"{quote(model, safe='')}.faults"
    try:
        return msgspec.json.decode(file.read_bytes(), type=Faults)
    except FileNotFoundError:
        return Faults()
    except msgspec.DecodeError as error:
        raise ValueError(f"{file}: {error}") from None
