"""Side effects that the manager asks for: start, sleep, wake, stop an engine; size a model. Decides nothing.

Two implementations: `sidecar.process.engine`, with real processes, and `loadtest.lab.residency`, in virtual time.
Bytes are per GPU, times are seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal, Protocol

from sidecar.core.config import SidecarConfig
from sidecar.core.engine_records import EngineFacts, EngineRecord
from sidecar.core.inventory import Size
from sidecar.core.lesson import Lesson, Measured
from sidecar.core.sleep import Level


class Engine(Protocol):
    """Engine from its start to its end. Every method raises EngineFailed, and nothing else."""

    @property
    def url(self) -> str:
        """URL by which gateways reach the engine."""

    @property
    def gpus(self) -> tuple[int, ...]:
        """Numbers of its GPUs; empty on CPU."""

    def record(self, *, level: Literal[0, 1, 2], told: EngineFacts) -> EngineRecord:
        """For the state file."""

    def held(self, processes: dict[int, int]) -> int:
        """Bytes of this engine's processes together, by the bytes of each pid on one GPU."""

    def host_held(self) -> int:
        """Bytes of host memory of this engine's processes together; 0: not told."""

    def lines(self, most: int) -> list[str]:
        """The last lines it has written."""

    async def ready(self, gpu_bytes: Callable[[], int] = lambda: 0) -> EngineFacts:
        """Until it serves: healthy, its name served, warmed up, the canary recorded. `gpu_bytes`: the most that it has
        held of a GPU so far, whose growth is progress."""

    async def awake(self) -> Literal[0, 1, 2]:
        """Sleep level, by its own word; 0: awake. After adoption."""

    async def busy(self) -> int:
        """Requests running and waiting in it, by its own gauges."""

    async def alive(self) -> None:
        """Probe the process, and EngineCore itself."""

    async def sleep(self, level: Level) -> None:
        """Back once it does."""

    async def wake(self, level: Level, told: EngineFacts) -> None:
        """Back once it serves; after level 2 its canary must be `told`'s."""

    async def ended(self) -> str:
        """Until its process has ended, by itself or not: how, in words."""

    async def stop(self) -> None:
        """End it and all its processes, and wait for that."""

    async def leave(self) -> None:
        """Let it run and know nothing of it any more."""


class EngineSizing(Protocol):
    """Memory of engines by the files of their models."""

    async def size(
        self, name: str, total: int, present: int, measured: Measured | None, lesson: Lesson | None, *, unified: bool
    ) -> Size:
        """Memory of a profile's engine on GPUs of `total` bytes, of which there are `present`, by what engines with its
        settings have shown. `unified`: it is the host's too. Raises Unusable."""

    def kv_bytes(self, name: str, told: EngineFacts) -> int | None:
        """Bytes of an engine's KV cache on each GPU; None: that cannot be told."""


class Engines(Protocol):
    """Makes engines; the profile's name is all it takes."""

    @property
    def sizing(self) -> EngineSizing:
        """Sizes of the engines of the config in force."""

    def settings(self, profile: str, config: SidecarConfig | None = None) -> str:
        """A digest that changes when the profile's engine would be started otherwise; by another config than the one in
        force, where one is given. Raises KeyError."""

    def apply(self, config: SidecarConfig) -> None:
        """Size and start engines by this config from now on; those that there are stay as they are."""

    async def start(self, profile: str, gpus: tuple[int, ...], size: Size) -> Engine:
        """Start its process; it is not ready yet. Raises EngineFailed."""

    async def adopt(self, profile: str, record: EngineRecord) -> Engine:
        """Take over an engine that an earlier sidecar started. Raises EngineFailed where there is none."""

    async def sweep(self, keep: Collection[str]) -> None:
        """End the processes of an earlier sidecar's engines, but for these (`process.engine`)."""
