"""Inputs of the plan: the machine's GPUs, the residents of their memory, the target that wants some, and the settings.

Bytes are per GPU unless a field says otherwise. Times are monotonic seconds.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from sidecar.core.lifecycle import RUNNING, SLEEPING, START, STOPPED, WAKE, Pending, State
from sidecar.core.sleep import Level, MeasuredSleep

LEAST_RELOAD = 0.1  # seconds; whatever says it is back sooner has been measured badly
BACK = 3  # uses that are remembered: see ModelState.warmth


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. `free` is by NVML: other processes count. A quarantined one is given nothing."""

    index: int
    total: int
    free: int
    quarantined: bool = False


class Resident(msgspec.Struct, frozen=True, kw_only=True):
    """A profile whose engine holds memory, or is about to: a STOPPED one with its start pending too.

    `unseen`: bytes that it holds or is taking and NVML does not show as used yet. `ref_count`: its calls in flight at
    all gateways, which it has had for `busy_for` seconds. `warmth`: by what it is ordered before its last use counts.
    `model`: what it serves. `copy`: another engine serves that too. `since`: when `state` last changed.
    `sleep_levels`: those it may sleep at, level 1 while host memory allows. `wake_seconds`: from level 1, from level 2.
    `level`: the one it sleeps at. `host_bytes`: host memory of the whole engine at level 1, of which it has `host_held`
    already.
    """

    profile: str
    state: State
    gpus: tuple[int, ...]
    claim: int
    residue: int = 0
    unseen: int = 0
    ref_count: int = 0
    busy_for: float = math.inf
    pinned: bool = False
    pending: Pending | None = None
    last_used: float = -math.inf
    warmth: float = -math.inf
    model: str = ""
    copy: bool = False
    since: float = -math.inf
    load_seconds: float = 60.0
    wake_seconds: tuple[float, float] = (math.inf, math.inf)
    sleep_levels: tuple[Level, ...] = ()
    level: Literal[0, 1, 2] = 0
    host_bytes: int = 0
    host_held: int = 0

    @property
    def held(self) -> int:
        """Bytes on each of its GPUs that are not to be had by others, as it is now."""
        if self.state is SLEEPING and self.pending is not WAKE:
            return self.residue
        return 0 if self.state is STOPPED and self.pending is not START else self.claim

    def after_all(self) -> Resident:
        """As it will be once its calls and what is being done about it are over."""
        if self.pending is None or (self.state is SLEEPING and self.pending is not WAKE):
            return msgspec.structs.replace(self, ref_count=0, pending=None)
        return msgspec.structs.replace(self, ref_count=0, pending=None, state=RUNNING, level=0, unseen=0)

    @property
    def reload_seconds(self) -> float:
        """Seconds to have it back, evicted the way it would rather be."""
        if self.state is not RUNNING:
            return max(LEAST_RELOAD, self.load_seconds)
        return max(
            LEAST_RELOAD, min([self.load_seconds, *(self.wake_seconds[level - 1] for level in self.sleep_levels)])
        )


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Target of a plan: `need` bytes (its claim) on each of `tensor_parallel` GPUs; `gpus`: those it is bound to.

    `since`: when the first call began to wait for it. `last_used`: before that, which is how warm it is. `model`: what
    it serves; `copy`: beside another engine, see core.copies.
    """

    profile: str
    need: int
    since: float
    tensor_parallel: int = 1
    gpus: tuple[int, ...] | None = None
    last_used: float = -math.inf
    model: str = ""
    copy: bool = False


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
        """As its sleep was measured; itself where it was not, or does not sleep."""
        if slept is None or not self.residue:
            return self
        residue = min(slept.residue or self.residue, self.claim)
        return msgspec.structs.replace(self, residue=residue, host=slept.host or self.host)

    def starts_as(self, other: Size) -> bool:
        """Whether an engine is started with the same claim."""
        return self._started == other._started

    @property
    def _started(self) -> tuple[int, float | None, int | None, int | None]:
        return self.claim, self.share, self.sequences, self.context_length


class PlanSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`host_memory`: bytes that sleep at level 1 may fill in all. `come_back`: seconds after which to ask again when
    nobody can know, since it waits for calls to end or for somebody to act."""

    host_memory: int = 0
    hot: float = 10.0
    max_starvation: float = 60.0
    cost_aware: bool = False
    come_back: float = 5.0
