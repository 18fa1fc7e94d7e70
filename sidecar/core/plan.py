"""Placement and eviction: the GPUs on which a model is started or woken, and the models that make room for it.

Room on a GPU is min(free by NVML - bytes that NVML does not show yet, total - bytes held). A resident holds its claim;
asleep, its residue; starting or waking, already its whole claim. A model fits where each of its GPUs has room for its
claim. A resident that is being stopped or put to sleep holds its claim until it is done.

Idle residents (no call in flight, not pinned, nothing pending) may be evicted, least recently used first: by the last
use but two (LRU-K, see `ModelState.warmth`), then by the last.
On one set of GPUs **the hottest is spared first**: assume that every resident there is evicted, then keep each, from
hot to cold, that still fits beside the target. That is LRU, and spares whatever LRU evicts needlessly. The best set of
GPUs has the fewest victims, then the colder victims, then the least room left over (best fit). A tensor parallel engine
gets all its GPUs at once or none.

- A model used within `hot` times its reload time is not evicted for a colder one, unless that has waited
  `max_starvation`.
- A copy of a served model takes the place of colder models alone, and gives it back at once (inventory.py).
- Engines of one model are kept on different GPUs, where that costs nobody more.
- A target that sleeps is woken where it sleeps. It waits for room there, for residents to cool and for their calls to
  end, if that is sooner than a start elsewhere. Calls that have run for t seconds are assumed to run for t more, so a
  wait in vain is never longer than the start it has put off.
- A victim sleeps if that is the quicker way back and its residue leaves room, the hottest first; else it is stopped.

The plan is pure and deterministic. Bytes are per GPU, times are monotonic seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from gateway.shared.files.units import GIB
from sidecar.core.gpus import GPU
from sidecar.core.inventory import STAYS, PlanSettings, Resident, Target, makes_way_at
from sidecar.core.lifecycle import RUNNING, SLEEPING, START, STARTING, STOPPED
from sidecar.core.sleep import Level, chosen_level

ALIKE = 256  # that part of the need tells no GPU from another: other processes hold a little here and there
COME_BACK = 5.0  # seconds until to ask again, where nobody can know
MOST_SETS = 200  # of GPUs that are looked at: 20 ms at worst


class PutToSleep(msgspec.Struct, frozen=True):
    """Victim that sleeps, and how deep."""

    profile: str
    level: Level


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of a plan: first `sleep` and `stop`, colder models first, then `start` or `wake` on `gpus`.

    None of these: the target runs already. If the target sleeps where it cannot wake, or is in ERROR, `stop` has the
    target itself last.
    """

    sleep: tuple[PutToSleep, ...] = ()
    stop: tuple[str, ...] = ()
    start: str | None = None
    wake: str | None = None
    gpus: tuple[int, ...] = ()
    after: float = 0.0  # seconds until it may begin; 0 unless it is a forecast
    makes_room: float = 0.0  # seconds that `sleep` and `stop` take; 0: not filled in
    total: int = 0  # bytes of the GPUs that the target was sized for; 0: not filled in


class Infeasible(msgspec.Struct, frozen=True):
    """Refusal of a plan."""

    why: str
    retry_at: float | None  # when it may be otherwise; None: not before somebody changes something
    waits: bool = False  # the target could be started now, and is back sooner if it is woken later


class PlacementOption(msgspec.Struct, frozen=True):
    """Way to serve the target: waking it, or starting it on some GPUs."""

    wakes: bool
    need: int  # more bytes, on each of `size` GPUs
    size: int
    room: Mapping[int, int]  # bytes by GPU
    same_model: frozenset[int] = frozenset()  # GPUs that have another engine of the model
    anti_affinity: bool = False  # avoiding these is worth an eviction


class Choice(msgspec.Struct, frozen=True):
    """Set of GPUs with its victims, colder first."""

    gpus: tuple[int, ...]
    victims: tuple[Resident, ...]
    left: dict[int, int]  # bytes left over on each of `gpus` with the victims stopped


def plan(
    target: Target, residents: Sequence[Resident], gpus: Sequence[GPU], now: float, settings: PlanSettings
) -> Plan | Infeasible:
    """Plan to have `target` run, or the reason why there is none. `residents` may have the target itself among them."""
    own = next((r for r in residents if r.profile == target.profile), None)
    if own is not None and (own.pending is not None or own.state is STARTING):
        doing = own.pending.value if own.pending is not None else START.value
        return Infeasible(f"{target.profile} is {own.state.value} and has a {doing} pending", now + COME_BACK)
    if own is not None and own.state is RUNNING:
        return Plan(gpus=own.gpus)
    return _Planning(target, own, residents, gpus, now, settings).decided()


class _Planning:
    """Plan of a target that does not run: `others` and, of them, `idle` ones may make room for one of the `options`."""

    def __init__(
        self,
        target: Target,
        own: Resident | None,
        residents: Sequence[Resident],
        gpus: Sequence[GPU],
        now: float,
        settings: PlanSettings,
    ) -> None:
        self.target, self.own, self.residents, self.gpus = target, own, residents, gpus
        self.now, self.settings = now, settings
        self.others = [r for r in residents if r is not own]
        self.idle = [r for r in self.others if not (r.ref_count or r.pinned or r.pending or r.state is STARTING)]
        self.options = list(self._options())

    def decided(self) -> Plan | Infeasible:
        """The plan of the first option that has room, or the obstacle."""
        target, own, now = self.target, self.own, self.now
        cool = [r for r in self.idle if now >= self._cool_at(r)]
        starved = not target.copy and now >= target.since + self.settings.max_starvation
        for option in self.options:
            for evictable in (cool, self.idle) if starved else (cool,):
                order = sorted(evictable, key=lambda r: (r.warmth, r.last_used, r.profile))
                choice = _best(option, order)
                if choice is not None and own is not None and self.options[0].wakes and not option.wakes:
                    at = self._freed(self.options[:1], self.others)
                    if at + own.wake_seconds[own.level - 1] < now + own.load_seconds:
                        sooner = "is back sooner where it sleeps, once others there have no calls and cool"
                        return Infeasible(f"{target.profile} {sooner}", at, waits=True)
                if choice is not None:
                    return self._plan(option, choice)
        return self._why()

    def _options(self) -> Iterator[PlacementOption]:
        """Yield the options: waking where the target sleeps, which is always quicker, then starting where it may."""
        target, own, room = self.target, self.own, {}
        for gpu in self.gpus:
            here = [r for r in self.residents if gpu.index in r.gpus]
            unseen, held = sum(r.unseen for r in here), sum(r.held for r in here)
            if not gpu.refused:
                room[gpu.index] = min(gpu.free - unseen, gpu.total - held)
        if own is not None and own.state is SLEEPING and all(gpu in room for gpu in own.gpus):
            here_only = {gpu: room[gpu] for gpu in own.gpus}
            yield PlacementOption(wakes=True, need=own.claim - own.residue, size=len(own.gpus), room=here_only)
        allowed = {gpu: room[gpu] for gpu in sorted(room) if target.gpus is None or gpu in target.gpus}
        if own is not None:
            allowed.update({gpu: allowed[gpu] + own.held for gpu in own.gpus if gpu in allowed})
        alike = (gpu for r in self.others if r.model and r.model == target.model for gpu in r.gpus)
        yield PlacementOption(
            wakes=False,
            need=target.need,
            size=target.tensor_parallel,
            room=allowed,
            same_model=frozenset(alike),
            anti_affinity=target.copy,
        )

    def _cool_at(self, resident: Resident) -> float:
        """Return the time from which a resident may be evicted for the target; at once if the target is the warmer."""
        if self.target.copy:
            return makes_way_at(resident, self.target)
        if resident.copy:
            return resident.since + STAYS
        if resident.last_used <= self.target.last_used:
            return -math.inf
        return resident.last_used + self.settings.hot * resident.reload_seconds

    def _plan(self, option: PlacementOption, choice: Choice) -> Plan:
        """Return the plan of a choice. The hottest victim has first claim on room and host memory to sleep in."""
        own, name = self.own, self.target.profile
        host = self.settings.host_memory - sum(r.host_held for r in self.residents)
        left = dict(choice.left)
        sleep: list[PutToSleep] = []
        stop: list[str] = []
        for victim in reversed(choice.victims):
            level = _level(victim, host)
            shared = [gpu for gpu in victim.gpus if gpu in left]
            if level is None or any(left[gpu] < victim.residue for gpu in shared):
                stop.append(victim.profile)
                continue
            for gpu in shared:
                left[gpu] -= victim.residue
            host -= _host(victim) if level == 1 else 0
            sleep.append(PutToSleep(victim.profile, level))
        stop.reverse()
        if not option.wakes and own is not None and own.state is not STOPPED:
            stop.append(own.profile)
        start, wake = (None, name) if option.wakes else (name, None)
        return Plan(sleep=tuple(reversed(sleep)), stop=tuple(stop), start=start, wake=wake, gpus=choice.gpus)

    def _freed(self, options: Sequence[PlacementOption], residents: Sequence[Resident]) -> float:
        """Return the time at which there is room without an order; infinite: never, as far as is known.

        By then residents are hot no longer, or the target has starved, and their calls have ended.
        """
        now, starved_at = self.now, self.target.since + self.settings.max_starvation
        free_at = {}
        for resident in residents:
            if not (resident.pinned or resident.pending is not None or resident.state is STARTING):
                calls = now + resident.busy_for if resident.ref_count else now
                free_at[resident.profile] = max(now, calls, min(self._cool_at(resident), starved_at))
        for at in sorted(set(free_at.values()) - {math.inf}):
            if _could(options, [r for r in residents if free_at.get(r.profile, math.inf) <= at]):
                return at
        return math.inf

    def _why(self) -> Infeasible:
        """Return the obstacle: the first of time, calls, pins, other processes and quarantine whose end would help."""
        target, others, count = self.target, self.others, self.target.tensor_parallel
        each = "a GPU" if count == 1 else f"each of {count} GPUs"
        needs = f"{target.profile} needs {target.need / GIB:.1f} GiB of {each}"

        def names(some: Iterable[Resident]) -> str:
            there = {gpu for option in self.options for gpu in option.room}
            return ", ".join(sorted(r.profile for r in some if r.held and not there.isdisjoint(r.gpus)))

        at, soon = self._freed(self.options, self.idle), self.now + COME_BACK
        if at < math.inf:
            hot = names(r for r in self.idle if self.now < self._cool_at(r))
            why = f"{needs}, and it is too soon after the last use of {hot} to evict for a colder model"
            return Infeasible(why, at)
        if _could(self.options, [r for r in others if not r.pinned]):
            busy = names(r for r in others if not r.pinned and r not in self.idle)
            return Infeasible(f"{needs}, and cannot have it before calls or changes of {busy} have ended", soon)
        if _could(self.options, others):
            pinned = names(r for r in others if r.pinned)
            why = f"{needs}, and there is none beside what is pinned: unpin {pinned}, or allow other GPUs"
            return Infeasible(why, None)
        large = [g for g in self.gpus if g.total >= target.need and (target.gpus is None or g.index in target.gpus)]
        if sum(not gpu.refused for gpu in large) >= count:
            return Infeasible(f"{needs}, and other processes hold too much of them", soon)
        if len(large) >= count:
            quarantined = ", ".join(map(str, sorted(gpu.index for gpu in large if gpu.refused)))
            return Infeasible(f"{needs}, and of those it may use, these are in quarantine: {quarantined}", soon)
        return Infeasible(f"{needs}, and may use only {len(large)} that are so large", None)


def _open(option: PlacementOption, evictable: Iterable[Resident]) -> list[int]:
    """GPUs with enough room if all of `evictable` were evicted. An option needs `size` of them."""
    room = dict(option.room)
    for resident in evictable:
        for gpu in resident.gpus:
            if gpu in room:
                room[gpu] += resident.held
    return [gpu for gpu in room if room[gpu] >= option.need]


def _best(option: PlacementOption, order: Sequence[Resident]) -> Choice | None:
    """Return the best set of GPUs, or None. `order`: residents that may be evicted, from cold to hot."""
    rank = {resident.profile: position for position, resident in enumerate(order)}

    def cost(choice: Choice) -> tuple[int, int, list[int], int, int, tuple[int, ...]]:
        hottest_first = [rank[victim.profile] for victim in reversed(choice.victims)]
        same_model = sum(gpu in option.same_model for gpu in choice.gpus)
        anti_affinity = same_model if option.anti_affinity else 0
        return anti_affinity, len(hottest_first), hottest_first, same_model, sum(choice.left.values()), choice.gpus

    return min((_sparing(option, gpus, order) for gpus in sets_of_gpus(option, order)), key=cost, default=None)


def sets_of_gpus(option: PlacementOption, order: Sequence[Resident]) -> Iterator[tuple[int, ...]]:
    """Yield the sets of GPUs that are compared.

    Of GPUs that are alike, with the same residents and as much room, one set stands for all that have as many of them:
    16 that are all alike have one set of 8, and not 12,870. Beyond MOST_SETS, GPUs are left out whose eviction alone
    would cost the most.
    """
    there = _open(option, order)
    if len(there) <= option.size:  # as mostly
        if len(there) == option.size:
            yield tuple(there)
        return
    grain = max(1, option.need // ALIKE)
    alike: dict[tuple[tuple[str, ...], int, bool], list[int]] = {}
    for gpu in there:
        here = tuple(resident.profile for resident in order if gpu in resident.gpus)
        alike.setdefault((here, option.room[gpu] // grain, gpu in option.same_model), []).append(gpu)
    rank = {resident.profile: position for position, resident in enumerate(order)}
    # The first to be left out comes first: most residents, then the hottest.
    kinds = sorted(alike, key=lambda kind: (len(kind[0]), [rank[name] for name in reversed(kind[0])]), reverse=True)
    groups = [sorted(alike[kind], key=lambda gpu: -option.room[gpu]) for kind in kinds]
    while _number(option.size, [len(group) for group in groups]) > MOST_SETS:
        groups[0].pop()
        groups = groups if groups[0] else groups[1:]
    for counts in _shares(option.size, [len(group) for group in groups]):
        taken = {gpu for group, count in zip(groups, counts, strict=True) for gpu in group[:count]}
        yield tuple(gpu for gpu in option.room if gpu in taken)


def _shares(size: int, groups: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every way to take `size` out of groups of these sizes: how many of each."""
    if not groups:
        yield from ((),) if not size else ()
        return
    for first in range(max(0, size - sum(groups[1:])), min(size, groups[0]) + 1):
        for rest in _shares(size - first, groups[1:]):
            yield (first, *rest)


def _number(size: int, groups: Sequence[int]) -> int:
    """Return the number of ways to take `size` out of groups of these sizes."""
    ways = [1] + [0] * size
    for group in groups:
        ways = [sum(ways[max(0, taken - group) : taken + 1]) for taken in range(size + 1)]
    return ways[size]


def _sparing(option: PlacementOption, gpus: tuple[int, ...], order: Sequence[Resident]) -> Choice:
    """Evict everybody on these GPUs, then spare the hottest first. The GPUs must have room without them."""
    left = {gpu: option.room[gpu] - option.need for gpu in gpus}
    if min(left.values()) >= 0:
        return Choice(gpus, (), left)
    here = [(resident, [gpu for gpu in resident.gpus if gpu in left]) for resident in order]
    for resident, shared in here:
        for gpu in shared:
            left[gpu] += resident.held
    victims = []
    for resident, shared in reversed(here):
        if all(left[gpu] >= resident.held for gpu in shared):
            for gpu in shared:
                left[gpu] -= resident.held
        else:
            victims.append(resident)
    return Choice(gpus, tuple(reversed(victims)), left)


def _level(victim: Resident, host: int) -> Level | None:
    """Return the level at which a victim sleeps with `host` bytes of host memory left; None: stop it instead."""
    if victim.state is not RUNNING:
        return None
    levels: tuple[Level, ...] = (1, 2)
    worth = [level for level in levels if victim.wake_seconds[level - 1] < victim.load_seconds]
    return chosen_level(victim.sleep_levels, host_fits=_host(victim) <= host, worth=worth)


def _host(victim: Resident) -> int:
    """Bytes of host memory that a victim would take at level 1 beyond those it has."""
    return max(0, victim.host_bytes - victim.host_held)


def _could(options: Sequence[PlacementOption], evictable: Sequence[Resident]) -> bool:
    """Whether one of the options would have room if all of `evictable` were evicted."""
    return any(len(_open(option, evictable)) >= option.size for option in options)
