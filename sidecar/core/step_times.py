"""Durations of an engine's steps (start, sleep, wake, end): as measured, else foretold from the model's bytes.

A start is foretold by stages, so that what is left of it follows from the stage that its lines have reached.

Sources of the figures for what was never measured. DISK: `load_seconds` of published starts, of which the median reads
1.7 GiB/s, the slowest 0.1, the quickest 22. COMPILE and GRAPHS: their `init_seconds` (median 103, without graphs 4) and
`graphs_seconds` (median 21); one that finds its compiled graphs in a cache takes 15. PINS_AT: 1.1 GiB/s were measured,
1.5 to 3 published. COPIES_AT: 38 to 51 GiB/s were measured on an H200; slower buses have a fifth of that. PROCESS and
ENCODER have no published source and are rather slow. Where not even the bytes are known, as of a simulated engine, a
start takes LOAD, and waking takes WAKES.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Annotated, Literal

import msgspec

from gateway.shared.files.units import GIB, MIB
from sidecar.core.inventory import Size
from sidecar.core.start_progress import STAGE_WORDS, STAGES, Stage, share_of, stage_of

DISK = 1.5 * GIB  # bytes a second that are read
PINS_AT = 1.1 * GIB  # bytes a second to host memory that is pinned meanwhile
COPIES_AT = 8.0 * GIB  # bytes a second to and from host memory that is pinned already
DOWNLOADS = 100 * MIB  # bytes a second, where a model is not all here: nearly a gigabit
PROCESS, COMPILE, GRAPHS, EAGER = 20.0, 80.0, 20.0, 5.0  # seconds; EAGER: to profile, without compilation and graphs
ENCODER = 15.0  # seconds to compile an encoder, which is small and has one kind of step
AROUND = 0.5  # seconds of sleep and of waking beside the bytes
DROPS = 1.0  # seconds to fall asleep at level 2, which copies nothing
WAKES = (3.0, 10.0)  # seconds of waking from level 1 and 2, where the bytes are not known
EVICTION = 2.0  # seconds that one victim takes to sleep or to end, where nothing is known
UNKNOWN: Mapping[Stage, float] = {"process": 20.0, "weights": 15.0, "compile": 20.0, "graphs": 5.0}
LOAD = sum(UNKNOWN.values())  # seconds of a start of which nothing is known
LEAST_READ = GIB  # bytes, from which on a start tells how quick the disk is
LEARN = 0.5  # the weight of the newest of the times that were seen
OVERDUE = 0.25  # what is later than foretold takes that part of what it has taken, at least, once more


_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]


class Times(msgspec.Struct, kw_only=True):
    """Measured seconds of one profile's steps, as the state file keeps them; None, or absent: not measured."""

    load: _Seconds | None = None
    wake1: _Seconds | None = None  # from sleep at level 1
    wake2: _Seconds | None = None
    sleep: _Seconds | None = None
    stop: _Seconds | None = None
    stages: dict[Stage, _Seconds] = {}  # of a start
    disk: Annotated[float, msgspec.Meta(gt=0.0, le=1e15)] | None = None  # bytes of weights a second that starts read


class StepTimes:
    """Times of the profile `name`. `alike`: profiles with equal `alike` start alike, so a profile that was never
    started is predicted from another that was. `eager`: the profile compiles nothing. `machine`: times of all profiles
    of this machine; these are added there, in place of earlier ones of the name, whose disk rate is kept. `seen`: the
    measured ones."""

    def __init__(self, name: str, alike: str, *, eager: bool, machine: MutableMapping[str, StepTimes]) -> None:
        self.seen: Times = Times(disk=machine[name].seen.disk if name in machine else None)
        self._alike = (alike, eager)
        self._eager = eager
        self._machine = machine
        machine[name] = self

    # -- foretold -----------------------------------------------------------------------------------------------------

    def start_stages(self, size: Size) -> Mapping[Stage, float]:
        """Seconds of each stage of a start. A download is a part of loading the weights."""
        known = self._known()
        if known.stages:
            found = {stage: known.stages.get(stage, 0.0) for stage in STAGES}
        elif not size.stored:
            found = {stage: each * (known.load or LOAD) / LOAD for stage, each in UNKNOWN.items()}
        else:
            found = {"process": PROCESS, "weights": size.stored / self._disk()}
            compiles, graphs = (ENCODER, 0.0) if size.encoder else (COMPILE, GRAPHS)
            found |= {"compile": EAGER if self._eager else compiles, "graphs": 0.0 if self._eager else graphs}
        return {**found, "weights": found["weights"] + size.absent / DOWNLOADS}

    def load_seconds(self, size: Size) -> float:
        """Seconds of a start."""
        known = self._known()
        if known.load and not size.absent:
            return known.load
        return sum(self.start_stages(size).values())

    def wake_seconds(self, size: Size) -> tuple[float, float]:
        """Seconds of waking from level 1, which copies the weights back, and from level 2, which reads them again."""
        first, second = WAKES
        if size.weights:
            first = AROUND + size.weights / COPIES_AT
            second = AROUND + max(size.weights, size.stored) / self._disk()
        return self.seen.wake1 or first, self.seen.wake2 or second

    def reads(self, size: Size) -> float:
        """Seconds of waking from level 2 where none of its files is in memory, at the rate of usual disks or of this
        one if it is slower."""
        return AROUND + max(size.weights, size.stored) / min(DISK, self._disk())

    def sleep_seconds(self, size: Size, level: Literal[1, 2], *, first: bool = False) -> float:
        """Seconds to fall asleep: level 1 copies the weights to the host. `first`: the engine's first sleep, which has
        to pin that memory and is never learnt from: vLLM keeps it pinned, so the later ones are far quicker."""
        if first and level == 1 and size.weights:
            return AROUND + size.weights / PINS_AT
        if self.seen.sleep is not None or not size.weights:
            return self.seen.sleep or EVICTION
        return AROUND + size.weights / COPIES_AT if level == 1 else DROPS

    @property
    def stop_seconds(self) -> float:
        """Seconds to end it."""
        return self.seen.stop or EVICTION

    def _known(self) -> Times:
        """Return these times, or, for a profile that was never started, those of a started profile that starts
        alike."""
        if self.seen.load:
            return self.seen
        alike = (each.seen for each in self._machine.values() if each.seen.load and each._alike == self._alike)
        return next(alike, self.seen)

    def _disk(self) -> float:
        """Bytes a second: of its own starts, else the median of the others on this machine."""
        others = [each.seen.disk for each in self._machine.values() if each.seen.disk]
        return self.seen.disk or (statistics.median(others) if others else DISK)

    # -- measured -----------------------------------------------------------------------------------------------------

    def loaded(self, seconds: float, stages: Mapping[Stage, float], size: Size) -> None:
        """A start took so long; `stages`: those that its lines told, none where they told nothing. One that has
        downloaded its model tells nothing of the next."""
        if size.absent or size.guessed:
            return
        seen = self.seen
        seen.load = _learnt(seen.load, seconds)
        if stages:
            seen.stages = {stage: _learnt(seen.stages.get(stage), stages.get(stage, 0.0)) for stage in STAGES}
        if size.stored >= LEAST_READ and stages.get("weights", 0.0) > 0:
            seen.disk = _learnt(seen.disk, size.stored / stages["weights"])

    def took(self, step: Literal["wake1", "wake2", "sleep", "stop"], seconds: float) -> None:
        """Record the seconds that a step took: waking from level 1 or 2, falling asleep, or ending."""
        setattr(self.seen, step, _learnt(getattr(self.seen, step), seconds))


def _learnt(was: float | None, seconds: float) -> float:
    return seconds if was is None else was + LEARN * (seconds - was)


class StartClock:
    """Clock of one start: the stage that its lines have reached, and since when. `seconds`: duration of each finished
    stage. Times are monotonic seconds."""

    def __init__(self, now: float) -> None:
        self.stage: Stage = "process"
        self.seconds: dict[Stage, float] = {}
        self._began = self._since = self._share_at = now
        self._share = 0.0

    def heard(self, lines: Iterable[str], now: float) -> None:
        """Advance the stage and its progress bar by lines that the engine wrote. Unknown lines change nothing."""
        for line in lines:
            stage = stage_of(line)
            if stage is None or STAGES.index(stage) < STAGES.index(self.stage):
                continue
            if stage != self.stage:
                self.seconds[self.stage] = now - self._since
                self.stage, self._since, self._share_at, self._share = stage, now, now, 0.0
            share = share_of(line) or 0.0
            if share > self._share:
                self._share, self._share_at = share, now

    @property
    def phase(self) -> str:
        """Stage in words, with the share that its progress bar tells."""
        return STAGE_WORDS[self.stage] + (f", {self._share:.0%}" if 0.0 < self._share < 1.0 else "")

    def ready(self, now: float) -> dict[Stage, float]:
        """Seconds of each stage, now that it serves; empty where its lines told none."""
        return {**self.seconds, self.stage: now - self._since} if self.seconds else {}

    def left(self, now: float, foretold: Mapping[Stage, float]) -> float:
        """Seconds until it serves: of this stage by its progress bar, else by what was foretold, then the later
        stages."""
        if not self.seconds:  # it may be an engine that tells no stage
            passed = now - self._began
            return max(sum(foretold.values()) - passed, OVERDUE * passed)
        here = foretold[self.stage] * (1 - self._share) - (now - self._share_at)
        if self._share and self._share_at > self._since:
            here = (self._share_at - self._since) * (1 / self._share - 1) - (now - self._share_at)
        later = STAGES[STAGES.index(self.stage) + 1 :]
        return max(here, OVERDUE * (now - self._share_at)) + sum(foretold[stage] for stage in later)
