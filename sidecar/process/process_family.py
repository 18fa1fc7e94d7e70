"""Process family of an engine: its spawning, its members by /proc, its adoption by a record, and the end of orphans.

A process is known by its number *and* its start time, since numbers are used again: no signal reaches a stranger. An
engine's family is its leader's session and process group, every process with its marker in the environment (a child
that left the session), and the descendants of all these. A session or group counts only while its number cannot have
passed to a stranger: as long as the leader lives, or is a zombie of ours. A number is not given out again while either
holds it.

vLLM names its processes by setproctitle, which writes over the environment that /proc shows: measured, the marker of
`VLLM::EngineCore` was gone. SPT_NOENV=1 keeps it, at the price of a shorter title, so `marked` sets both.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from sidecar.core.engine_records import ProcessRecord

MARKER = "WEIR_SIDECAR_ENGINE"
ENVIRONMENT_MOST = 2 * 1024 * 1024  # bytes; Linux allows an environment more only with an unusual stack limit
LOOK_EVERY = 0.02  # seconds between two looks at what has got SIGKILL


class SpawnFailed(Exception):
    """The engine's program could not be started; the message says why."""


class NotOurs(Exception):
    """No such process exists any more, or its number belongs to another process."""


class ProcessSnapshot(msgspec.Struct, frozen=True):
    """State of a process at one moment, by /proc/PID/stat. `started`: clock ticks since boot. `ran`: clock ticks of CPU
    time of the process and of its children that have ended."""

    pid: int
    parent: int
    group: int
    session: int
    state: str
    started: int
    ran: int = 0

    @property
    def ended(self) -> bool:
        """Whether it is dead: a zombie waits only to be reaped."""
        return self.state in "ZXx"


def marked(environment: Mapping[str, str], engine: str) -> dict[str, str]:
    """`environment` with the marker of `engine`, kept visible whatever the process calls itself."""
    return {**environment, MARKER: engine, "SPT_NOENV": "1"}


def boot_id() -> str:
    """Id of this boot of the machine: numbers and start times mean something only within one."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def look(pid: int) -> ProcessSnapshot | None:
    """The process with this number now; None where there is none, or /proc hides it from us as another user's."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # the last where it is mounted with hidepid=1
        return None
    fields = text.rpartition(b")")[2].split()  # the name before it may hold anything, also spaces and brackets
    parent, group, session = map(int, fields[1:4])
    ran = sum(map(int, fields[11:15]))
    return ProcessSnapshot(pid, parent, group, session, fields[0].decode(), int(fields[19]), ran)


def spawn(argv: Sequence[str], env: Mapping[str, str], cwd: Path | None, output: int) -> ProcessSnapshot:
    """The leader of a new session. The caller reaps it. Raises SpawnFailed, and nothing runs then.

    `env` is its whole environment; `output` is the descriptor it writes to. No shell sees `argv`.
    """
    try:
        child = subprocess.Popen(  # noqa: S603 # the caller builds argv from an allowlist
            list(argv),
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise SpawnFailed(f"{argv[0]} could not be started: {error}") from error
    child.returncode = 0  # it is the caller's to reap from here on: Popen must neither try nor warn
    try:
        seen = look(child.pid)
        why = "/proc does not show it"
    except OSError as error:
        seen, why = None, str(error)
    if seen is None:
        os.killpg(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
        raise SpawnFailed(f"{argv[0]} was ended again, since the sidecar could not look after it: {why}")
    return seen


def everyone() -> list[ProcessSnapshot]:
    """Every process of the machine that we may see, but ourselves."""
    own = os.getpid()
    numbers = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [seen for pid in numbers if pid != own and (seen := look(pid)) is not None]


def marker_of(pid: int) -> str | None:
    """The engine whose marker a process carries; None where it has none, or we may not look, or it is a zombie."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read(ENVIRONMENT_MOST).split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    name = f"{MARKER}=".encode()
    return next((text[len(name) :].decode(errors="replace") for text in variables if text.startswith(name)), None)


def family(
    engine: str, since: int, leader: int | None, known: Collection[tuple[int, int]] = ()
) -> list[ProcessSnapshot]:
    """The processes of `engine`, zombies too, the leader among them.

    `since`: its leader's start time, before which none of them can have started. `leader`: the number of its session
    and group; None where that may be a stranger's by now. `known`: (pid, started) of those once found.
    """
    people = [seen for seen in everyone() if seen.started >= since]
    found = {
        seen.pid
        for seen in people
        if leader in (seen.group, seen.session) or (seen.pid, seen.started) in known or marker_of(seen.pid) == engine
    }
    while grown := {seen.pid for seen in people if seen.parent in found} - found:
        found |= grown
    return [seen for seen in people if seen.pid in found]


def usage(family: Iterable[ProcessSnapshot]) -> tuple[float, dict[int, int]]:
    """Seconds that these have run for, and bytes that each has read and written, by calls or by the disk where that
    is more, by pid; without those that may not be asked. Raises OSError."""
    seconds, moved = 0.0, {}
    for seen in family:
        seconds += seen.ran / os.sysconf("SC_CLK_TCK")
        try:
            text = Path(f"/proc/{seen.pid}/io").read_text()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        fields = dict(re.findall(r"^(\w+): (\d+)$", text, re.MULTILINE))  # gVisor has others than Linux
        # A call counts in both, a mapped file in the second alone.
        pairs = (("rchar", "read_bytes"), ("wchar", "write_bytes"))
        moved[seen.pid] = sum(max(int(fields.get(name, 0)) for name in pair) for pair in pairs)
    return seconds, moved


def belongs(pid: int, engine: str, since: int, leader: int | None) -> bool:
    """Whether one process is of the family of `engine`, as `family` has it, without a look at all the others."""
    seen = look(pid)
    while seen is not None and seen.started >= since:
        if leader in (seen.pid, seen.group, seen.session) or marker_of(seen.pid) == engine:
            return True
        seen = look(seen.parent)
    return False


def host_memory(pid: int) -> int:
    """Bytes of memory that a process holds and no file backs; 0 where that is not told."""
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return 0
    return sum(int(kib) * 1024 for kib in re.findall(rb"^Rss(?:Anon|Shmem):\s+(\d+) kB$", status, re.MULTILINE))


def orphans(sidecar: str) -> list[tuple[str, int, int]]:
    """The running processes of a sidecar's engines, whose names are `sidecar` + "/" + anything, found by their marker:
    engine, pid and start time of each.

    Asked when a sidecar starts, these are what an earlier one left. Only processes whose environment we may read.
    """
    marked = ((marker_of(seen.pid) or "", seen) for seen in everyone() if not seen.ended)
    return [(engine, seen.pid, seen.started) for engine, seen in marked if engine.startswith(f"{sidecar}/")]


def handle_of(pid: int) -> int | None:
    """A pidfd, which is of one process for ever; None where the system has none to give. Raises ProcessLookupError."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return None  # ENOSYS before Linux 5.3 and in some sandboxes; EMFILE


def send(pid: int, started: int, number: signal.Signals) -> bool:
    """Signal one process. False: it has ended, or its number is another's by now, or we may not signal it.

    The pidfd is opened before the start time is compared, so what is signalled is what was compared.
    """
    try:
        handle = handle_of(pid)
    except ProcessLookupError:
        return False
    try:
        seen = look(pid)
        if seen is None or seen.started != started:
            return False
        if handle is None:
            os.kill(pid, number)
        else:
            signal.pidfd_send_signal(handle, number)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        if handle is not None:
            os.close(handle)
    return True


# -- an earlier sidecar's engines -------------------------------------------------------------------------------------


def handle_for(record: ProcessRecord) -> int | None:
    """A pidfd of the process a record is of, opened before its start time is compared; None: the system has none to
    give. Raises NotOurs."""
    gone = f"{record.engine}: process {record.pid} has ended"
    try:
        handle = handle_of(record.pid)
    except ProcessLookupError:
        raise NotOurs(gone) from None
    seen = look(record.pid)
    marker = marker_of(record.pid)
    why = None
    if record.boot != boot_id():
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
        for engine, _, began in orphans(sidecar):
            if engine not in keep:
                kindred = family(engine, began, leader=None)
                known |= {seen.pid: seen.started for seen in kindred}
        left = [pid for pid, started in known.items() if _runs(pid, started)]
        if not left or clock() > until:
            return tuple(left)
        for pid in left:
            send(pid, known[pid], signal.SIGKILL)
        await asyncio.sleep(LOOK_EVERY)


def _runs(pid: int, started: int) -> bool:
    seen = look(pid)
    return seen is not None and seen.started == started and not seen.ended
