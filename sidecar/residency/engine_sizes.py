"""Sizes of engines: what each will take by its model's files, by lessons of failed starts, and as it was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec

from gateway.shared.files.units import GIB
from sidecar.core.engine_records import EngineFacts, EngineFailed, Unusable
from sidecar.core.inventory import Size
from sidecar.core.lesson import AGAIN, FailedStart, Lesson, Measured, learn, lower_share, measurement
from sidecar.core.model_state import ModelState
from sidecar.core.sleep import MeasuredSleep
from sidecar.residency.shared import SharedState

Shown = TypeVar("Shown", Measured, Lesson, MeasuredSleep)
LESS = 0.95  # of what a guessed claim was, at most, or it is not worth another start


def current(known: Mapping[str, Shown], name: str, settings: str) -> Shown | None:
    """Measurement or lesson of a model's engines with these settings; None: none yet."""
    found = known.get(name)
    return found if found is not None and found.settings == settings else None


class EngineSizes:
    """Sizes of all models of a sidecar."""

    def __init__(self, shared: SharedState) -> None:
        self._engines, self._monitor, self._host = shared.engines, shared.monitor, shared.host
        self._known, self._say, self._touch = shared.known, shared.say, shared.touch
        self._refused: dict[str, tuple[str, str]] = {}  # by profile: the settings that vLLM refused, and why

    async def size(self, model: ModelState) -> None:
        """Find out what its engine will take, on GPUs of each size that it may run on."""
        sizes: dict[int, Size] = {}
        why = ""
        model.slept = current(self._known.sleeps, model.name, self._engines.settings(model.name))
        model.unified = self._monitor.unified
        for total in self._monitor.sizes(model.profile.gpus, model.profile.tensor_parallel):
            try:
                sizes[total] = await self._sized(model, total)
            except Unusable as error:
                why = str(error)
        if sizes:
            model.sizes, model.size = sizes, sizes[min(sizes)]
        elif why != model.unusable:
            self._say(f"{model.name} cannot be run: {why}")
        model.sized, model.unusable = bool(sizes), "" if sizes else why
        self._touch()

    async def _sized(self, model: ModelState, total: int) -> Size:
        settings = self._engines.settings(model.name)
        refused, why = self._refused.get(model.name, ("", ""))
        if why and refused == settings:
            raise Unusable(why)
        measured = current(self._known.measured, model.name, settings)
        lesson = current(self._known.lessons, model.name, settings)
        present, unified = len(self._monitor.gpus), self._monitor.unified
        size = await self._engines.sizing.size(model.name, total, present, measured, lesson, unified=unified)
        if size.pools > self._host.bound:
            kept, bound = size.pools / GIB, self._host.bound / GIB
            raise Unusable(
                f"its flags keep {kept:.1f} GiB of host memory (KV offloading, cpu-offload-gb), and engines may have "
                f"{bound:.1f} (host_memory_for_sleep)"
            )
        return size.with_sleep(model.slept)

    async def smaller(self, model: ModelState) -> Size | None:
        """The size of a model whose start is a guess, where its files have come with that and it claims less by them;
        None: not so."""
        try:
            size = await self._sized(model, self._monitor.smallest(model.gpus))
        except Unusable:
            return None  # it may be so in the middle of a download; if not, its own failure tells more
        return size if not size.guessed and size.claim < LESS * model.size.claim else None

    async def learns(self, model: ModelState, error: EngineFailed, free: int) -> bool:
        """Learn what its failed start says of memory, of which so much was `free` before. Whether the next start
        differs."""
        if error.found is None or error.found.kind == AGAIN:
            return error.found is not None
        total = self._monitor.smallest(model.gpus)
        failed = FailedStart(size=model.size, found=error.found, total=total, free=free)
        lesson = learn(self._known.lessons.get(model.name), failed, self._engines.settings(model.name))
        if lesson is None:
            return False
        self._known.lessons[model.name] = lesson
        try:
            size = await self._sized(model, total)
        except Unusable:
            return False
        if size.starts_as(model.size):
            return False
        self._say(f"{model.name} failed for memory; the next start claims {size.arithmetic}")
        return True

    def refuse(self, model: ModelState, error: EngineFailed) -> None:
        """Mark a model unusable whose arguments vLLM refused: until its settings change, or somebody asks for it."""
        if error.found is None or not error.found.refused_arguments:
            return
        why = f"vLLM refuses its arguments: {error.found.line}. {error.found.advice}"
        self._refused[model.name] = (self._engines.settings(model.name), why)

    def lower_share(self, model: ModelState, error: EngineFailed) -> str:
        """Advice where a start with an operator's own share ran out of memory: nobody else changes that share."""
        share, lesson = model.profile.gpu_memory, self._known.lessons.get(model.name)
        if error.found is None or error.found.kind != "oom" or not isinstance(share, float) or lesson is None:
            return ""
        lower = lower_share(share, lesson, self._monitor.smallest(model.gpus))
        return f"its gpu_memory of {share:.0%} leaves too little beside it: try gpu_memory: {lower:.0%}"

    def forget_lesson(self, model: ModelState) -> None:
        """Forget what failed starts have taught, because another vLLM or other GPUs may have changed it."""
        self._known.lessons.pop(model.name, None)
        self._refused.pop(model.name, None)

    def measure(self, model: ModelState, facts: EngineFacts, claim: int, *, peak: int, settled: int) -> None:
        """Record the measured bytes of an engine that serves: its `claim`, its `peak` while it started, and `settled`
        since."""
        model.size = msgspec.structs.replace(model.size, claim=claim)
        kv = self._engines.sizing.kv_bytes(model.name, facts)
        settings = self._engines.settings(model.name)
        measured = None if kv is None else measurement(settings, peak, settled, kv)
        if measured is not None:
            self._known.measured[model.name] = measured
        if model.name in self._known.lessons:
            self._known.lessons[model.name] = self._known.lessons[model.name].after(
                measured, self._monitor.smallest(model.gpus)
            )
