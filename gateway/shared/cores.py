"""Cores that this process may use: what its affinity and its container's quota leave of the machine's.

The quota is that of cgroup v2: `cpu.max`, microseconds of CPU in each period. In a container it lies at the root of
what is mounted; on the machine itself there is none. Source: Linux, Documentation/admin-guide/cgroup-v2.rst.
"""

from __future__ import annotations

import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def cores(quota: Path = _QUOTA) -> int:
    """Whole cores, at least one; a quota of 2.5 cores counts as two."""
    usable = len(os.sched_getaffinity(0))
    try:
        allowed, period = quota.read_text().split()
        return max(1, min(usable, int(allowed) // int(period)))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return usable
