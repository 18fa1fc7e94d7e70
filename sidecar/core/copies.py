"""Copies: engines of a model beside another one that serves it; the place that one may take, and when it gives it back.

Gateways say which profiles are copies, since the other engine may be another machine's. A copy takes the place of an
idle model only if that is colder. The copy's model has calls that wait, so it was used just now; what counts is how
dear the place is to the other. It is spared for SPARED seconds and the time to have it back after its last use, and as
long as its last uses came more often than that on average. So a place changes hands at most once in that time, and the
time lost by moving is less than the time it was idle (as in ski rental). `max_starvation` means nothing to a copy, and
engines of its own model never make way for it.

A model that no engine serves is worth more than a copy: after STAYS seconds awake the copy is drained for it, calls or
not. A copy that has idled for SLEEPS_AFTER goes to sleep whatever its profile says of idleness.

Pure. Times are monotonic seconds.
"""

from __future__ import annotations

import math

from sidecar.core.inventory import BACK, Resident, Target
from sidecar.core.lifecycle import RUNNING

SPARED = 10.0  # seconds: as many reports as tell of a model's use with certainty
STAYS = 10.0  # seconds awake, before others make a copy go
SLEEPS_AFTER = 60.0  # seconds


def makes_way_at(resident: Resident, copy: Target) -> float:
    """From when an idle resident makes way for a copy; infinite: never, as it is the same model's."""
    if resident.model == copy.model:
        return math.inf
    spared = SPARED + resident.reload_seconds
    awake_since = resident.since if resident.state is RUNNING else -math.inf
    return max(resident.last_used, resident.warmth + (BACK - 1) * spared, awake_since) + spared
