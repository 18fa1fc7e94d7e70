"""Adoption of engines that an earlier sidecar left, by their records; end of its orphans, by their markers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Collection

from sidecar.core.engine_records import ProcessRecord
from sidecar.process import process_family

LOOK_EVERY = 0.02  # seconds between two looks at what has got SIGKILL


class NotOurs(Exception):
    """No such process exists any more, or its number belongs to another process."""


def handle_for(record: ProcessRecord) -> int | None:
    """A pidfd of the process a record is of, opened before its start time is compared. Raises NotOurs."""
    gone = f"{record.engine}: process {record.pid} has ended"
    try:
        handle = process_family.handle_of(record.pid)
    except ProcessLookupError:
        raise NotOurs(gone) from None
    seen = process_family.look(record.pid)
    marker = process_family.marker_of(record.pid)
    why = None
    if record.boot != process_family.boot_id():
        why = f"{record.engine}: the machine was started anew since process {record.pid} was"
    elif seen is None or seen.ended:
        why = gone
    elif seen.started != record.started or marker not in {None, record.engine}:
        why = f"{record.engine}: the number {record.pid} is another process's by now"
    elif marker is None:
        why = f"{record.engine}: process {record.pid} does not bear the mark of an engine, so it is left alone"
    if why is not None:
        if handle is not None:
            os.close(handle)
        raise NotOurs(why)
    return handle


async def end_orphans(sidecar: str, *, keep: Collection[str] = (), within: float = 10.0) -> tuple[int, ...]:
    """SIGKILL what runs of this sidecar's engines, but for the engines named in `keep`, with all their descendants.

    The pids that are still there after `within` seconds.
    """
    clock = asyncio.get_running_loop().time
    until = clock() + within
    known: dict[int, int] = {}
    while True:
        found = {orphan.pid: orphan for orphan in process_family.orphans(sidecar) if orphan.engine not in keep}
        for orphan in found.values():
            kindred = process_family.family(orphan.engine, since=orphan.started, leader=None)
            known |= {seen.pid: seen.started for seen in kindred}
        left = [pid for pid, started in known.items() if _runs(pid, started)]
        if not left or clock() > until:
            return tuple(left)
        for pid in left:
            process_family.send(pid, known[pid], signal.SIGKILL)
        await asyncio.sleep(LOOK_EVERY)


def _runs(pid: int, started: int) -> bool:
    seen = process_family.look(pid)
    return seen is not None and seen.started == started and not seen.ended
