"""Child of a gateway's parent, as the parent sees it: its signs of life, and how long there has been none."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

from gateway.serve.processes.place import ALIVE, END, Place

SILENT = 4.0  # looks without a sign of life after which a process hangs
STARTS = 50.0  # the same, before its first sign
STARVED = 0.1  # least of a look that counts while a process waits for a core


class Process:
    """Child of the gateway. `beats`: signs of life from it; `silent`: looks since the last, as far as they count."""

    def __init__(self, place: Place, pid: int, beats: socket.socket) -> None:
        self.place = place
        self.pid = pid
        self.beats = beats
        self.silent = SILENT - STARTS
        self.at = self._looked = time.monotonic()
        self._ran = 0.0

    def look(self) -> None:
        """Count a look without a sign of life.

        Where the main thread waits for a core, a look counts by the share of its time in which that thread ran: others
        have the machine, and a restart would need a core too. An endless loop runs, and a deadlock waits for no core.
        """
        now = time.monotonic()
        between, self._looked = now - self._looked, now
        waits, ran = _main_thread(self.pid)
        share = (ran - self._ran) / between if waits and between > 0.0 else 1.0
        self._ran = ran
        self.silent += min(1.0, max(STARVED, share))

    def hear(self) -> bytes:
        """Return what the child has said since; b"": nothing, or it has ended."""
        try:
            signs = self.beats.recv(4096)
        except OSError:
            signs = b""
        if ALIVE in signs:
            self.silent = 0.0
        return signs

    def order_end(self) -> None:
        """Order the process to end, as SIGTERM to the gateway does."""
        with contextlib.suppress(OSError):  # it has ended, or hangs and is killed soon
            self.beats.send(END)

    def __str__(self) -> str:
        place = self.place
        return f"{place.role if place.role == 'decider' else f'relay {place.number}'} (pid {self.pid})"


def _main_thread(pid: int) -> tuple[bool, float]:
    """Whether a process's main thread runs or waits for a core, and the seconds that it has run; by Linux's proc(5)."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/stat").read_bytes()
    except OSError:  # gone, or another system
        return False, 0.0
    fields = text.rpartition(b")")[2].split()  # the name before it may hold anything
    return fields[0] == b"R", (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
