"""Origin of a state file: what is used of one that came from another machine, or is another sidecar's in copy.

The engines in it are not this sidecar's. Their process numbers may be strangers' here. On the same machine they are the
engines of the sidecar that it was copied from, which may run.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from sidecar.process.process_family import boot_id
from sidecar.residency.state_file import Origin, SavedState

MACHINE_ID = Path("/etc/machine-id")  # machine-id(5): kept over starts of the machine; a container may have none


def own_state(known: SavedState, path: Path, say: Callable[[str], None]) -> SavedState:
    """Return what the state file at `path` knows of this sidecar. `say` gets a line on everything that is left out.

    Of another sidecar's state only measurements and lessons stay, because they belong to the model and not to the
    machine. The key is dropped too, because gateways would take two sidecars with one key for one sidecar.
    """
    here = Origin(machine=machine(), path=os.path.realpath(path))
    why = _another(known.origin, here)
    if why:
        say(
            f"the state file {path} {why}: no engine in it is taken over or ended; what models were measured to take "
            "is kept"
        )
        return SavedState(origin=here, measured=known.measured, lessons=known.lessons, sleeps=known.sleeps)
    boot = boot_id() if known.engines else ""
    engines = {name: record for name, record in known.engines.items() if record.process.boot == boot}
    if gone := ", ".join(sorted(known.engines.keys() - engines.keys())):
        say(
            f"the state file {path} is from before the machine's last start, or from another machine: no engine of "
            f"that time is taken over or ended ({gone})"
        )
    return msgspec.structs.replace(known, origin=here, engines=engines)


def machine(file: Path = MACHINE_ID) -> str:
    """A digest of the machine's id, as machine-id(5) wants the id itself kept in confidence; empty: it has none."""
    try:
        found = file.read_bytes().strip()
    except OSError:
        return ""
    return hashlib.sha256(b"weir sidecar " + found).hexdigest()[:32] if found else ""


def _another(was: Origin, here: Origin) -> str:
    """The reason why a file is another sidecar's; empty: it is this one's, perhaps under a new name."""
    if "" not in {was.machine, here.machine} and was.machine != here.machine:
        return "was written on another machine"
    if was.path and os.path.realpath(was.path) != here.path and os.path.exists(was.path):
        return f"is a copy of {was.path}"
    return ""
