"""Time zone of schedules: how far its wall clock is ahead of UTC at any time, by the machine's tables."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from gateway.shared.files.checked import Fault
from sidecar.core.config import SidecarConfig
from sidecar.core.file.schedule import Offset


def offset_of(name: str | None) -> Offset:
    """Seconds that the wall clock of a zone is ahead of UTC, by Unix time; of the machine's zone if None. Raises
    LookupError, ValueError or OSError for one that is not known here."""
    if name is None:
        return lambda at: float(time.localtime(at).tm_gmtoff)
    zone = ZoneInfo(name)
    return lambda at: (datetime.fromtimestamp(at, zone).utcoffset() or timedelta()).total_seconds()


def zone_faults(config: SidecarConfig) -> Iterator[Fault]:
    """A time zone that this machine does not know. The C library takes one that $TZ names, AREA/PLACE, for UTC."""
    name, found = config.time_zone, "{}"
    if name is None and any(profile.schedule for profile in config.models.values()):
        of_machine = re.fullmatch(r":?([A-Za-z_]+/.+)", os.environ.get("TZ", ""))  # else it is a rule or a file
        name, found = of_machine and of_machine[1], "null, and $TZ is {}"
    try:
        offset_of(name)
    except (LookupError, ValueError, OSError):
        yield Fault(("time_zone",), found.format(name), "a time zone that this machine knows, such as Europe/Berlin")
