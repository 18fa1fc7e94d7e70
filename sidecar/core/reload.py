"""Reload of the sidecar's file while it runs: what a newer file changes, and what of it takes effect.

Fields of AT_START cannot change while the sidecar runs: those of the newer file are told by name, and the rest of it
takes effect. A profile whose engine would be started otherwise is applied once that engine has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from gateway.shared.files.checked import Fault
from sidecar.core.addresses import LONGEST_SOCKET
from sidecar.core.config import SidecarConfig, faults_of, read_config

# Sockets, files and GPUs that the sidecar has opened once, by which gateways and its engines know it.
AT_START = (
    *("id", "gpus", "gateways", "token_file", "order_token_file", "ca_file", "listen", "relay", "engine_addresses"),
    *("state_file", "log_dir"),
)


# Kinds of changes by a newer file, in words: each has the names of its profiles, or fields.
NEW = "new"
GONE = "gone, and their engines end once their calls have"
RESTARTED = "with settings that need another engine, once the calls of this one have ended"
CHANGED = "changed, without a restart"
LATER = "not before the sidecar is started again"
Changes = dict[str, tuple[str, ...]]


def newer(data: bytes, name: str, started: SidecarConfig, folder: str) -> tuple[SidecarConfig, SidecarConfig]:
    """A newer file as it is, and as it takes effect in a sidecar that was `started` with another one. `folder`: of the
    file. Raises InvalidFile with every mistake, also those that what stays as it was makes of it."""
    reading = read_config(data, name)
    file = reading.good()
    taken = msgspec.structs.replace(file, **{field: getattr(started, field) for field in AT_START})
    if taken != file:
        reading.judge(faults_of(taken))
    reading.judge(_unready(taken, started, folder))
    reading.good()
    return file, taken


def _unready(taken: SidecarConfig, started: SidecarConfig, folder: str) -> Iterator[Fault]:
    """Models that the sidecar, as it was started, cannot have."""
    pool, on_gpus = started.pool(folder), on_gpu(started)
    for name in taken.models:
        length = len((pool.on_socket(name).uds or "").encode()) if pool.sockets is not None else 0
        if length > LONGEST_SOCKET:
            found = f"a path of {length} bytes for the socket of {name}"
            yield Fault(("models", name), found, f"at most {LONGEST_SOCKET} bytes, or a restart of the sidecar")
        if not on_gpus and taken.engine_of(name).device == "gpu":
            found = "a model on GPUs, where the sidecar was started for models on CPU alone"
            yield Fault(("models", name), found, "device: cpu, or a restart of the sidecar")


def on_gpu(config: SidecarConfig) -> bool:
    """Whether any model runs on GPUs."""
    return any(config.engine_of(name).device == "gpu" for name in config.models)


def changes(
    before: SidecarConfig, file: SidecarConfig, taken: SidecarConfig, same_engine: Callable[[str], bool]
) -> Changes:
    """Changes from the file `before`, as it took effect, to `file`, of which `taken` does, by kind. `same_engine`:
    whether the engine of a profile would be started as before."""
    both = [name for name in before.models if name in taken.models]
    other = [name for name in both if not same_engine(name)]
    changed = [name for name in both if name not in other and before.models[name] != taken.models[name]]
    if before.host_memory_for_sleep != taken.host_memory_for_sleep:
        changed.append("host_memory_for_sleep")
    return {
        NEW: tuple(name for name in taken.models if name not in before.models),
        GONE: tuple(name for name in before.models if name not in taken.models),
        RESTARTED: tuple(other),
        CHANGED: tuple(changed),
        LATER: tuple(field for field in AT_START if getattr(file, field) != getattr(taken, field)),
    }
