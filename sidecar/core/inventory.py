"""Inputs of the plan, beside the machine's GPUs: residents of their memory, the target that wants some, the settings.

Bytes are per GPU unless a field says otherwise. Times are monotonic seconds.

A copy is an engine of a model beside another one that serves it. Gateways say which profiles are copies, since the
other engine may be another machine's. A copy takes the place of an idle model only if that is colder. The copy's model
has calls that wait, so it was used just now; what counts is how dear the place is to the other. It is spared for SPARED
seconds and the time to have it back after its last use, and as long as its last uses came more often than that on
average. So a place changes hands at most once in that time, and the time lost by moving is less than the time it was
idle (as in ski rental). `max_starvation` means nothing to a copy, and engines of its own model never make way for it.

A model that no engine serves is worth more than a copy: after STAYS seconds awake the copy is drained for it, calls or
not. A copy that has idled for SLEEPS_AFTER goes to sleep whatever its profile says of idleness.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from sidecar.core.lifecycle import RUNNING, SLEEPING, START, STOPPED, WAKE, Pending, State
from sidecar.core.sleep import Level, MeasuredSleep

LEAST_RELOAD = 0.1  # seconds; whatever says it is back sooner has been measured badly
BACK = 3  # uses that are remembered: see ModelState.warmth
SPARED = 10.0  # seconds: as many reports as tell of a model's use with certainty
STAYS = 10.0  # seconds awake, before others make a copy go
SLEEPS_AFTER = 60.0  # seconds


class Resident(msgspec.Struct, frozen=True, kw_only=True):
    """Profile whose engine holds memory, or is about to: a STOPPED one with its start pending too."""

    profile: str
    state: State
    gpus: tuple[int, ...]
    claim: int
    residue: int = 0
    unseen: int = 0  # bytes that it holds or is taking and NVML does not show yet
    ref_count: int = 0  # calls in flight at all gateways
    busy_for: float = math.inf  # seconds for which it has had calls
    pinned: bool = False
    pending: Pending | None = None
    last_used: float = -math.inf
    warmth: float = -math.inf  # orders residents before `last_used` does
    model: str = ""  # name that it serves
    copy: bool = False  # another engine serves that model too
    since: float = -math.inf  # when `state` last changed
    load_seconds: float = 60.0
    wake_seconds: tuple[float, float] = (math.inf, math.inf)  # from level 1, from level 2
    sleep_levels: tuple[Level, ...] = ()  # allowed ones, level 1 while host memory has room
    level: Literal[0, 1, 2] = 0  # at which it sleeps
    host_bytes: int = 0  # host memory of the whole engine at level 1
    host_held: int = 0  # of `host_bytes`, what it has already

    @property
    def held(self) -> int:
        """Bytes on each of its GPUs that others cannot have now."""
        if self.state is SLEEPING and self.pending is not WAKE:
            return self.residue
        return 0 if self.state is STOPPED and self.pending is not START else self.claim

    def after_all(self) -> Resident:
        """Return the resident as it will be once its calls and its pending step are over."""
        if self.pending is None or (self.state is SLEEPING and self.pending is not WAKE):
            return msgspec.structs.replace(self, ref_count=0, pending=None)
        return msgspec.structs.replace(self, ref_count=0, pending=None, state=RUNNING, level=0, unseen=0)

    @property
    def reload_seconds(self) -> float:
        """Seconds to have it back after the eviction that it recovers from fastest."""
        if self.state is not RUNNING:
            return max(LEAST_RELOAD, self.load_seconds)
        return max(
            LEAST_RELOAD, min([self.load_seconds, *(self.wake_seconds[level - 1] for level in self.sleep_levels)])
        )


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Target of a plan."""

    profile: str
    need: int  # its claim, on each of `tensor_parallel` GPUs
    since: float  # when the first call began to wait for it
    tensor_parallel: int = 1
    gpus: tuple[int, ...] | None = None  # that it is bound to
    last_used: float = -math.inf  # before `since`: how warm it is
    model: str = ""  # name that it serves
    copy: bool = False  # beside another engine, see core.inventory


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that an engine will take, in bytes on each GPU unless a field says otherwise. All 0: it needs no GPU."""

    claim: int = 0  # in the ledger
    start_needs: int = 0  # free before it starts
    residue: int = 0  # kept asleep
    host: int = 0  # of the machine's memory, asleep at level 1
    pools: int = 0  # of the machine's memory, from its start to its end
    share: float | None = None  # 0..1, for its command line; None: not to be told
    sequences: int | None = None  # at once, where it would not start with its own number
    context: int = 0  # KV cache of one whole context
    context_length: int | None = None  # tokens, where the model's own do not fit and the profile gives none
    beyond: int = 0  # of `claim` and `start_needs`, beside its share
    weights: int = 0  # 0: not known
    stored: int = 0  # in its files, all together; 0: not known
    absent: int = 0  # of `stored`, in files that are not here yet
    guessed: bool = False  # the model's files are not here, and come with its start
    encoder: bool = False  # it keeps no KV cache
    lora_rank: int = 0  # of its adapters
    arithmetic: str = ""  # how that came about, in words

    def with_sleep(self, slept: MeasuredSleep | None) -> Size:
        """Return the size with its measured sleep, or itself if it was not measured or never sleeps."""
        if slept is None or not self.residue:
            return self
        residue = min(slept.residue or self.residue, self.claim)
        return msgspec.structs.replace(self, residue=residue, host=slept.host or self.host)

    def starts_as(self, other: Size) -> bool:
        """Whether an engine is started with the same claim."""
        fields = ("claim", "share", "sequences", "context_length")
        return all(getattr(self, field) == getattr(other, field) for field in fields)


class PlanSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a plan."""

    host_memory: int = 0  # bytes that sleep at level 1 may fill in all
    hot: float = 10.0
    max_starvation: float = 60.0


def makes_way_at(resident: Resident, copy: Target) -> float:
    """From when an idle resident makes way for a copy; infinite: never, as it is the same model's."""
    if resident.model == copy.model:
        return math.inf
    spared = SPARED + resident.reload_seconds
    awake_since = resident.since if resident.state is RUNNING else -math.inf
    return max(resident.last_used, resident.warmth + (BACK - 1) * spared, awake_since) + spared
