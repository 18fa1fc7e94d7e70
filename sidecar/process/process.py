"""Process of one engine: its leader, the process group and session it leads, and descendants that have left these.

The engine is started in a session of its own and outlives the sidecar; another sidecar adopts it by its record. One
class serves both: they differ only in who may reap the leader and learn its exit status.

When the leader has ended, for whatever reason, the rest of its family gets SIGKILL: the EngineCore of an API server
that was killed would hold its GPU for ever. A leader of ours stays a zombie until that is done, since its number is
also that of its session and group, and must not pass to a stranger meanwhile.

An ending that is cancelled in the middle hurries: SIGKILL at once, and the cancellation ends when nothing is left. If
the loop ends while nobody has asked for the engine's end, the engine runs on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from gateway.shared.tasks import done_within, telling
from sidecar.core.addresses import EngineAddress
from sidecar.core.engine_records import ProcessRecord
from sidecar.process import process_family
from sidecar.process.output import MOST, Output, Ring
from sidecar.process.process_family import SpawnFailed

GRACE = 30.0  # seconds from SIGTERM to SIGKILL
KILL_WITHIN = 10.0  # seconds; what SIGKILL has not ended by then hangs in the kernel
POLL = 0.1  # seconds between two looks at a leader, where the system has no pidfd


class Unkillable(Exception):
    """Processes that SIGKILL has not ended: they hang in the kernel, usually in the driver, or are not ours to end."""


class Process:
    """Running engine: create by `Process.spawn` or `Process.adopt`, then `terminate` or `leave`.

    `output` has its last lines. `returncode`: exit status of the leader, minus the signal's number if a signal ended
    it; None while the leader runs, and where the status is unknown, as of an adopted process. `left`: pids that SIGKILL
    has not ended.
    """

    def __init__(self, record: ProcessRecord, output: Output, *, handle: int | None, child: bool) -> None:
        self.record = record
        self.output = output
        self.returncode: int | None = None
        self.left: tuple[int, ...] = ()
        self._handle = handle
        self._child = child  # ours to reap, and not reaped yet
        self._ending = False  # somebody wants it ended
        self._known: set[tuple[int, int]] = set()
        self._exited = asyncio.Event()
        self._gone = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._follower = loop.create_task(output.follow())
        self._watcher = loop.create_task(self._watch())
        for task in (self._follower, self._watcher):
            task.add_done_callback(telling("the watch over an engine's process stopped"))
        self._watcher.add_done_callback(self._close)

    @classmethod
    def spawn(
        cls,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        engine: str,
        address: EngineAddress,
        log: Path,
        cwd: Path | None = None,
        ring: Ring | None = None,
        log_most: int = MOST,
    ) -> Process:
        """Start `argv`. Its environment is `env` and the marker, nothing of ours. Raises SpawnFailed."""
        asyncio.get_running_loop()
        try:
            boot = process_family.boot_id()
            output = Output(log, ring=ring, most=log_most)
        except OSError as error:
            raise SpawnFailed(f"{argv[0]} was not started: {error}") from error
        try:
            seen = process_family.spawn(argv, process_family.marked(env, engine), cwd, output.fd)
        except SpawnFailed:
            output.close()
            raise
        record = ProcessRecord(
            engine=engine, pid=seen.pid, started=seen.started, boot=boot, log=str(log), address=address
        )
        return cls(record, output, handle=process_family.handle_of(seen.pid), child=True)

    @classmethod
    def adopt(cls, record: ProcessRecord) -> Process:
        """Take over an engine that an earlier sidecar started. Raises NotOurs, and OSError for want
        of descriptors; nothing is signalled then."""
        asyncio.get_running_loop()
        handle = process_family.handle_for(record)
        try:
            output = Output(Path(record.log), writer=record.pid)
            seen = process_family.look(record.pid)
        except OSError:
            if handle is not None:
                os.close(handle)
            raise
        process = cls(record, output, handle=handle, child=seen is not None and seen.parent == os.getpid())
        process._family()  # known from now on, also where the leader dies and its session's number is worth nothing
        return process

    def __repr__(self) -> str:
        state = "running" if self.alive else f"exit {self.returncode}"
        return f"<Process {self.record.engine} pid {self.record.pid} {state}>"

    @property
    def alive(self) -> bool:
        """Whether the leader runs, as far as the loop has seen."""
        return not self._exited.is_set()

    @property
    def _leader(self) -> int | None:
        """The leader's number, while it cannot be a stranger's as far as the loop has seen."""
        return self.record.pid if self._child or self.alive else None

    def has(self, pid: int) -> bool:
        """Whether a process that runs is of its family."""
        return process_family.belongs(pid, self.record.engine, self.record.started, self._leader)

    def usage(self) -> tuple[float, dict[int, int]]:
        """Seconds that its processes have run for together, and bytes that each has read and written, by pid. For a
        thread. Raises OSError."""
        record, known = self.record, tuple(self._known)
        return process_family.usage(process_family.family(record.engine, record.started, self._leader, known))

    def host_held(self) -> int:
        """Bytes of host memory that no file backs, of all its processes. Raises OSError."""
        return sum(process_family.host_memory(seen.pid) for seen in self._family())

    async def wait(self) -> int | None:
        """Until the leader has ended, by itself or not: `returncode`. The rest of its family may still be there."""
        await self._exited.wait()
        return self.returncode

    async def gone(self) -> int | None:
        """Until nothing of it is left: `returncode`. Raises Unkillable."""
        await self._gone.wait()
        if self.left:
            raise Unkillable(f"{self!r}: SIGKILL did not end {', '.join(map(str, self.left))}")
        return self.returncode

    async def terminate(self, grace: float = GRACE) -> int | None:
        """End it: SIGTERM to the group, `grace` seconds, SIGKILL to all that is left. `returncode`; raises Unkillable.

        A stopped one is let go on, so that it can obey. Of one that has ended, only what is left of it is waited for.
        """
        asked, self._ending = self._ending, True
        try:
            if self.alive:
                if not asked:  # a second SIGTERM would kill in the middle of obeying the first
                    self._signal(signal.SIGTERM)
                    self._signal(signal.SIGCONT)
                await done_within(self._exited.wait(), grace)
            await self._end()
        except asyncio.CancelledError:
            await self._end()
            raise
        if not self._gone.is_set():
            raise Unkillable(f"{self!r}: SIGKILL did not end it")
        return await self.gone()

    async def _end(self) -> None:
        if self._gone.is_set():
            if self.left:
                await self._sweep()
            return
        self._signal(signal.SIGKILL)
        await done_within(self._gone.wait(), 2 * KILL_WITHIN)

    async def leave(self) -> None:
        """Let it run, and know nothing of it any more: the sidecar ends, its engines do not."""
        self._watcher.cancel()
        await asyncio.wait([self._watcher, self._follower])

    # -- the family ---------------------------------------------------------------------------------------------------

    def _family(self) -> list[process_family.ProcessSnapshot]:
        """All that runs of it. Zombies that have come to us, as they do where we are process 1, are reaped."""
        pid, started = self.record.pid, self.record.started
        leader = process_family.look(pid)
        pinned = self._child or (leader is not None and leader.started == started)
        leads = pid if pinned else None
        found = process_family.family(self.record.engine, started, leads, self._known)
        self._known = {(seen.pid, seen.started) for seen in found}
        for seen in found:
            if seen.ended and seen.parent == os.getpid() and seen.pid != pid:
                _reap(seen.pid)
        return [seen for seen in found if not seen.ended]

    def _signal(self, number: signal.Signals) -> None:
        """To the group and what has left it: at once to the group where its number is certain, else one by one.

        Looked at before the group's leader can die, which would hide whose child is whose. The group gets its signal
        also where /proc cannot be read.
        """
        try:
            family = self._family()
        finally:
            if self._child:
                # An error: nothing of it runs, or none of it may be signalled; a look afterwards finds what is left.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.record.pid, number)
        for seen in family:
            if not self._child or seen.group != self.record.pid:
                process_family.send(seen.pid, seen.started, number)

    # -- its end ------------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        try:
            await self._until_exit()
            await self._sweep()
        except asyncio.CancelledError:
            if self.alive and not self._ending:
                raise
            self._signal(signal.SIGKILL)
            try:
                async with asyncio.timeout(KILL_WITHIN):
                    await self._until_exit()
                    await self._sweep()
            except TimeoutError:
                self.left = (self.record.pid,)
            raise

    def _close(self, watcher: asyncio.Task[None]) -> None:
        """After the watch has ended, also where it never began. One that failed has seen nothing to its end."""
        if not watcher.cancelled() and watcher.exception() is not None:
            self.left = self.left or (self.record.pid,)
        self._follower.cancel()
        self.output.close()
        if self._handle is not None:
            os.close(self._handle)
        self._gone.set()

    async def _until_exit(self) -> None:
        loop = asyncio.get_running_loop()
        if self._handle is None:
            while not self._ended():  # noqa: ASYNC110 # another process's end: without a pidfd no event tells it
                await asyncio.sleep(POLL)
        elif not self._ended():
            readable = asyncio.Event()
            loop.add_reader(self._handle, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(self._handle)
            self._ended()
        self._exited.set()

    def _ended(self) -> bool:
        """Whether the leader has; its exit status is taken where it is ours, and it stays a zombie."""
        if self._child:
            try:
                status = os.waitid(os.P_PID, self.record.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:  # reaped by another part of this program
                self._child = False
                return True
            if status is None:
                return False
            self.returncode = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
            return True
        seen = process_family.look(self.record.pid)
        return seen is None or seen.started != self.record.started or seen.ended

    async def _sweep(self) -> None:
        """SIGKILL for all that is left, until a look finds nobody; then the leader is reaped."""
        clock = asyncio.get_running_loop().time
        until = clock() + KILL_WITHIN
        while family := self._family():
            self.left = tuple(seen.pid for seen in family)
            if clock() > until:
                break
            for seen in family:
                process_family.send(seen.pid, seen.started, signal.SIGKILL)
            await asyncio.sleep(process_family.LOOK_EVERY)
        else:
            self.left = ()
        if self._child and self._ended():
            _reap(self.record.pid)
            self._child = False


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return
