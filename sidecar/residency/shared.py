"""State of one machine that the parts of its manager share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from sidecar.core.host_memory import HostMemory
from sidecar.core.model_state import ModelState
from sidecar.core.step_times import StepTimes
from sidecar.gpus.monitor import GpuMonitor
from sidecar.residency.demand import GatewayDemand
from sidecar.residency.effects import Engines
from sidecar.residency.gpu_tasks import GpuTasks
from sidecar.residency.state_file import SavedState


class SharedState(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """State and effects of one machine. The manager makes it; each part keeps what it uses of it."""

    models: dict[str, ModelState]  # by profile
    times: dict[str, StepTimes]  # of all models of the machine, see StepTimes
    engines: Engines
    monitor: GpuMonitor
    demand: GatewayDemand
    tasks: GpuTasks  # operations under way
    host: HostMemory  # ledger in which sleeps at level 1 are booked
    known: SavedState  # measurements, lessons and sleeps are read from it and written to it
    changed: asyncio.Event  # set at every change worth a report
    touch: Callable[[], None]  # called after every order and every change of a model's state
    keep: Callable[[], None]  # called when what the state file has to know has changed
    clock: Callable[[], float]  # monotonic seconds
    say: Callable[[str], None]  # takes one line for the operator
