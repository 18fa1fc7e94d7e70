"""Fault injection while the engine runs: `POST /_faults` with the fields below; `{}` heals everything.

A fault that does not concern requests (slow, hang, metrics) holds until it is taken back. An engine on simulated GPUs
finds the faults of its start, and all others, in a file of their folder: `faults_of`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar
from urllib.parse import quote

import msgspec

from loadtest.engine.kv_transfer import Wrong

T = TypeVar("T")


class Faults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """All of them off."""

    slow: Annotated[float, msgspec.Meta(gt=0.0)] = 1.0  # every step takes this many times as long
    hang: bool = False  # no more steps; /health stays 200, as with a stopped EngineCore, and /is_sleeping never answers
    errors: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0  # share of the calls, drawn by the seed
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 500  # of these errors
    transfer: Wrong = ""  # what is wrong with the parameters of prompts that it reads for others
    stale_metrics: bool = False  # /metrics stays as it was when this was set
    hang_end: bool = False  # SIGTERM does not end it
    # At its start, and without effect later:
    fail_start: str = ""  # it ends with these last words and exit status 1
    hang_loading: Literal["", "idle", "busy"] = ""  # it stops in its weights, says so every minute; busy: burns a core
    download: str = ""  # it first fills this file, without a line, for
    download_seconds: Annotated[float, msgspec.Meta(ge=0.0, le=86400.0)] = 10.0


def faults_of(folder: Path, model: str) -> Faults:
    """Read `FOLDER/MODEL.faults`, in the JSON of `POST /_faults`; without a file there are no faults. Raises
    ValueError."""
    return told_of(folder, model, "faults", Faults) or Faults()


def told_of(folder: Path, model: str, ending: str, kind: type[T]) -> T | None:
    """Read `FOLDER/MODEL.ENDING`, in JSON; None: there is no such file. MODEL is the first served name, percent-encoded
    where a file's name cannot have it. Raises ValueError for anything else."""
    file = folder / f"{quote(model, safe='')}.{ending}"
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ValueError(f"{file}: {error}") from None
