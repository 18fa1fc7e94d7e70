"""Time zone of schedules: how far its wall clock is ahead of UTC at any time, by the machine's tables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from zoneinfo import ZoneInfo

from gateway.shared.files.checked import Fault
from sidecar.core.config import SidecarConfig
from sidecar.core.file.schedule import Offset

LOCAL = Path("/etc/localtime")


def offset_of(name: str | None) -> Offset:
    """Seconds that the wall clock of a zone is ahead of UTC, by Unix time; of the machine's zone if None. Raises
    LookupError, ValueError or OSError for one that is not known here."""
    zone = _machines() if name is None else ZoneInfo(name)

    def offset(at: float) -> float:
        return (datetime.fromtimestamp(at, zone).utcoffset() or timedelta()).total_seconds()

    return offset


def zone_faults(config: SidecarConfig) -> Iterator[Fault]:
    """A time zone that this machine does not know."""
    name = config.time_zone
    if name is None:
        return
    try:
        offset_of(name)
    except (LookupError, ValueError, OSError):
        yield Fault(("time_zone",), name, "a time zone that this machine knows, such as Europe/Berlin")


def _machines() -> tzinfo:
    """Return the time zone of TZ or /etc/localtime, else UTC."""
    try:
        told = os.environ.get("TZ", "").removeprefix(":")
        if told and not told.startswith("/"):
            return ZoneInfo(told)
        with Path(told or LOCAL).open("rb") as file:
            return ZoneInfo.from_file(file)
    except (LookupError, ValueError, OSError):
        return UTC
