"""State of one model: its lifecycle, its demand, its memory, and the times that its steps take.

`ModelState` is the one place for a profile's figures. The scheduler and the engine's steps write them; the plan reads
them as a Resident or a Target (placement.py). Bytes are per GPU, times are monotonic seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import MutableMapping
from typing import Literal

import msgspec

from sidecar.core.engine_records import EngineFacts
from sidecar.core.inventory import BACK, SLEEPS_AFTER, Size
from sidecar.core.lifecycle import DRAIN, ERROR, RUNNING, SLEEP, SLEEPING, START, STARTING, STOP, WAKE, Lifecycle
from sidecar.core.plan import Infeasible, Plan
from sidecar.core.profile import Profile
from sidecar.core.sleep import Level, MeasuredSleep, levels, residue_exceeded
from sidecar.core.step_times import LOAD, OVERDUE, StartClock, StepTimes

WAITED = 5.0  # seconds after the last word of calls that wait, after which nobody does any more
PAUSE = 1.5  # seconds between two uses of their own: gateways tell of calls once a second
TURN = 5.0  # times the seconds of a switch, for which a model that is in use keeps its place
LEAST_TURN, MOST_TURN = 5.0, 60.0  # seconds
SOON = 0.2  # seconds: the least that is promised of what is late already


class ModelState:
    """State of one profile: what it wants, what its engine does, and what is known of its memory and times."""

    def __init__(
        self, name: str, profile: Profile, now: float, machine: MutableMapping[str, StepTimes] | None = None
    ) -> None:
        """`machine`: see StepTimes."""
        self.name = name
        self.last_used = -math.inf
        self.uses: tuple[float, ...] = ()  # times of its last BACK uses that a pause lay before, the newest last
        self.idle_since = now
        self.began = now  # of the step under way
        self._machine: MutableMapping[str, StepTimes] = {} if machine is None else machine
        self.wanted_since: float | None = None
        self.wanted_until = -math.inf
        self.off = False  # by an operator, until an operator switches it on
        self.stopped_by_hand = False  # not to be started only because it is pinned
        self.last_lines: list[str] = []  # of the engine that has ended last
        # How often: events by name, evictions by step and reason, starts, and those that failed by kind of diagnosis.
        self.counts, self.failed_starts = Counter[str](), Counter[str]()
        self.evictions, self.starts = Counter[tuple[str, str]](), 0
        self.renew(profile, now)

    def renew(self, profile: Profile, now: float) -> None:
        """Take new settings, without an engine; what is known of its use stays."""
        self.profile = profile
        self.copy = False  # another engine serves its model, by all gateways
        self.ordered = False  # somebody wants it although it is a copy
        self.lifecycle = Lifecycle(now)
        self.size = Size()  # on the GPUs where it is, or on the smallest
        self.sizes: dict[int, Size] = {}  # by the bytes of the GPUs it may run on
        self.sized = False
        self.unified = False  # its GPUs' memory is the host's
        self.unusable = ""  # why it cannot be sized
        self.size_again_at = math.inf  # when that may be otherwise
        self.gpus: tuple[int, ...] = ()  # that its engine is on, or is to be on
        self.level: Literal[0, 1, 2] = 0  # at which it sleeps
        self.slept: MeasuredSleep | None = None  # what was measured of its sleep
        self.first_residue = 0  # bytes that this engine kept at its first sleep, 0: it had none
        # Host memory: booked for a sleep that is decided and not over, so that two GPUs that evict at once do not count
        # on the same bytes; taken by sleep at level 1; and pools, from the engine's start on. vLLM keeps its pinned
        # copies after it has woken (vllm#16663), so what was taken stays until the engine ends.
        self.host_booked = self.host_taken = self.host_pools = 0
        self.host_pinned = False  # this engine has slept at level 1, for which vLLM keeps host memory pinned
        self.busy = 0  # requests running and waiting in the engine at the last look
        self.busy_since: float | None = None  # since when it has had calls; None: it has none
        eager = profile.flags.get("enforce-eager") is True
        alike = f"{profile.model_path} on {profile.tensor_parallel}"
        self.times = StepTimes(self.name, alike, eager=eager, machine=self._machine)
        self.starting: StartClock | None = None  # of its start under way
        self.least_room = 0  # bytes that a start had and found too few
        self.taught = False  # it claims otherwise since its last start, which failed
        self.infeasible: Infeasible | None = None
        self.asked = False  # a person wants it though it has failed too often
        self.facts = EngineFacts()  # of its engine, which is or was ready
        self.grown: dict[int, int] = {}  # bytes by which the use of each GPU grew while its engine started
        self.refused = "", ""  # settings that vLLM refused, and why
        self.withdrawn: tuple[int, float] | None = None  # the last report before that, and when to wait no longer
        self.replaced = False  # the file has other settings for its engine, which has to end first
        self.leaving = False  # the file no longer has it

    # -- demand -----------------------------------------------------------------------------------------------------

    def want(self, now: float, *, ordered: bool = False) -> None:
        """Note that it is wanted: by calls that wait, or, `ordered`, by a person or a gateway who says it once.

        A model that is off stays off.
        """
        if self.off:
            return
        self.wanted_since = now if self.wanted_since is None else self.wanted_since
        self.ordered = self.ordered or ordered
        holds = self.max_starvation + LOAD if ordered else WAITED
        self.wanted_until = max(self.wanted_until, now + holds)

    def wanted(self, now: float) -> bool:
        """Whether it is to run: somebody still wants it, or it is pinned."""
        wanted = self.wanted_since is not None and now <= self.wanted_until
        return not self.off and (wanted or (self.profile.pin and not self.stopped_by_hand))

    def advance(self, now: float) -> None:
        """Forget that it was wanted where nobody has said so again in time, unless it is on its way."""
        life = self.lifecycle
        if now > self.wanted_until and life.pending is None and life.state not in (STARTING, RUNNING):
            self.wanted_since, self.ordered = None, False

    @property
    def served_name(self) -> str:
        """The name that calls use."""
        return self.profile.served_name or self.name

    @property
    def copy_only(self) -> bool:
        """Whether it is wanted at most as a copy, which no warmer model makes way for."""
        return self.copy and not self.ordered and not self.profile.pin

    @property
    def max_starvation(self) -> float:
        """Seconds that calls may wait before models used more make room.

        Unless the profile says it, proportional to the seconds of a switch, so that models that are always wanted take
        turns and switching takes a sixth of the time at most.
        """
        told = self.profile.max_starvation
        if told != "auto":
            return told
        return max(LEAST_TURN, min(MOST_TURN, TURN * (self._back_seconds() + self.sleep_seconds)))

    def starved(self, now: float) -> bool:
        """Whether it was wanted for so long that others make room for it though they are never idle."""
        return self.wanted_since is not None and now >= self.wanted_since + self.max_starvation

    def used(self, at: float) -> None:
        """Record a use at this time."""
        if at > self.last_used:
            paused = at - self.last_used > PAUSE
            self.uses = (*self.uses[-BACK + 1 :], at) if paused else (*self.uses[:-1], at)
            self.last_used = at
        self.idle_since = max(self.idle_since, at)

    def has_calls(self, now: float, in_flight: int) -> None:
        """Record how many calls its gateways have in flight."""
        if in_flight or self.busy:
            self.busy_since = now if self.busy_since is None else self.busy_since
        else:
            self.busy_since = None

    @property
    def warmth(self) -> float:
        """Time of the last use but two; minus infinity if the model was used less often.

        LRU-K with K = 3 (O'Neil, O'Neil and Weikum, "The LRU-K page replacement algorithm", SIGMOD 1993): a single call
        for an otherwise unused model does not make that model warmer than a regularly used model.
        """
        return self.uses[0] if len(self.uses) == BACK else -math.inf

    def serves(self) -> bool:
        """Whether gateways may send it calls."""
        return self.lifecycle.state is RUNNING and self.lifecycle.pending is None

    # -- due steps --------------------------------------------------------------------------------------------------

    def idle_step(self) -> tuple[float, Literal["sleep", "stop"]] | None:
        """Time and kind of its next step down, were it left alone from now on; None: never."""
        profile, state = self.profile, self.lifecycle.state
        if self.profile.pin or self.lifecycle.pending is not None:
            return None
        stop = math.inf if profile.stop_after is None else profile.stop_after
        sleep = math.inf
        if state is RUNNING and profile.sleeps is not None:
            after = math.inf if profile.sleeps.after is None else profile.sleeps.after
            sleep = min(after, SLEEPS_AFTER) if self.copy else after
        if sleep < stop:
            return self.idle_since + sleep, "sleep"
        return (self.idle_since + stop, "stop") if stop < math.inf and state in (RUNNING, SLEEPING) else None

    def starts_at(self, now: float) -> float | None:
        """From when on it may be started or woken, by itself or because it is wanted; None: it is not to be."""
        life = self.lifecycle
        if self.off or self.replaced or life.pending is not None or not self.sized:
            return None
        if life.state in (STARTING, RUNNING):
            return None
        if life.state is ERROR and self.asked:
            return now
        if life.state is ERROR and life.rests_until is None:
            return life.restart_at
        return max(now, life.rests_until or now) if self.wanted(now) else None

    # -- sleep ------------------------------------------------------------------------------------------------------

    def sleep_levels(self) -> tuple[Level, ...]:
        """Levels that it may sleep at, the one to be tried first in front; none: it is stopped instead."""
        return (
            ()
            if residue_exceeded(self.first_residue, self.size.residue)
            else levels(self.profile, self.slept, unified=self.unified)
        )

    def fell_asleep(self, level: Level, residue: int) -> None:
        """Record that it sleeps at this level and keeps so many bytes on each GPU."""
        self.level = level
        self.size = msgspec.structs.replace(self.size, residue=residue)
        self.first_residue = self.first_residue or residue
        self.host_pinned = self.host_pinned or level == 1

    @property
    def host_held(self) -> int:
        """Bytes of host memory that it has for its sleep."""
        return max(self.host_booked, self.host_taken)

    def pins(self, level: Level | None) -> bool:
        """Return whether sleep at this level has to pin host memory first: the engine's first sleep at level 1, which
        takes far longer than later ones."""
        return level == 1 and not self.host_pinned and self.size.weights > 0

    def gone(self) -> None:
        """Record that its engine has ended."""
        self.host_booked = self.host_taken = self.host_pools = 0
        self.gpus, self.level, self.first_residue, self.host_pinned, self.grown = (), 0, 0, False, {}

    # -- for the plan ---------------------------------------------------------------------------------------

    def place(self, plan: Plan) -> None:
        """Place it on the plan's GPUs, with its size there."""
        self.gpus, self.size = plan.gpus, self.sizes.get(plan.total, self.size)

    def tries_again(self, now: float) -> bool:
        """Whether one that found too little memory may start with no more than it had: it claims otherwise now, or has
        rested."""
        return self.taught or self.asked or self.lifecycle.rested(now)

    # -- times ------------------------------------------------------------------------------------------------------

    @property
    def load_seconds(self) -> float:
        """Seconds of a start, as measured or foretold."""
        return self.times.load_seconds(self.size)

    @property
    def wake_seconds(self) -> tuple[float, float]:
        """Seconds of waking from level 1 and 2."""
        return self.times.wake_seconds(self.size)

    @property
    def sleep_seconds(self) -> float:
        """Seconds to fall asleep."""
        level = 1 if self.profile.sleeps is None else self.profile.sleeps.level
        return self.times.sleep_seconds(self.size, level, first=self.pins(level))

    @property
    def stop_seconds(self) -> float:
        """Seconds to end."""
        return self.times.stop_seconds

    def ready_in(self, now: float, decision: Plan | Infeasible | None) -> float | None:
        """Seconds until it could serve, were it wanted now; None: it cannot be had. `decision`: what the plan would do
        with it, None where the plan was not asked since it is on its way."""
        life = self.lifecycle
        if self.serves():
            return 0.0
        if self.unusable or self.off or self.leaving or self.rests(now):
            return None
        again = self._back_seconds()
        if life.pending is START and self.starting is not None:
            return max(SOON, self.starting.left(now, self.times.start_stages(self.size)))
        if life.pending in (START, WAKE):
            return max(SOON, again + self.began - now, OVERDUE * (now - self.began))
        if life.pending in (DRAIN, SLEEP, STOP):
            return (self.stop_seconds if again == self.load_seconds else self.sleep_seconds) + again
        if not self.sized:  # its files are being read
            return self.load_seconds
        if isinstance(decision, Plan):
            way = self.load_seconds if decision.start is not None else again
            return max(decision.after, (life.restart_at or now) - now) + decision.makes_room + way
        return None

    def rests(self, now: float) -> bool:
        """Whether it has failed so often that calls are refused, as nobody starts it for them now."""
        until = self.lifecycle.rests_until
        return until is not None and now < until and not self.asked

    def _back_seconds(self) -> float:
        """Seconds of the start or the waking that it takes from here."""
        life = self.lifecycle
        if self.replaced:
            return self.load_seconds
        if life.state is SLEEPING and life.pending is not STOP:
            return self.wake_seconds[self.level - 1]
        if life.pending in (DRAIN, SLEEP) and (levels := self.sleep_levels()):
            return self.wake_seconds[levels[0] - 1]
        return self.load_seconds
