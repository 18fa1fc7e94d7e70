"""Engine (`residency.machine.Engine`): one vLLM process, started or adopted, and the steps it is put through.

A failure of the process, an address or an answer comes out as EngineFailed, in words for an operator. The words quote
the line of the engine's output that tells most, since "exit status 1" tells nothing. After a failure the process may
still run; `stop` ends it.
"""

from __future__ import annotations

import contextlib
import math
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from gateway.shared.files.units import GIB
from gateway.shared.tasks import done_within
from gateway.shared.threads import in_thread
from sidecar.core.diagnosis import diagnosis
from sidecar.core.engine_records import EngineFacts, EngineFailed, EngineRecord
from sidecar.core.profile import Profile, pooling
from sidecar.core.sleep import Level
from sidecar.core.start_progress import StartProgress
from sidecar.core.vllm import Completion
from sidecar.process import ports
from sidecar.process.engine_api import LIVENESS, NO_COMPLETIONS, ApiError, EngineApi
from sidecar.process.output import LINES
from sidecar.process.ports import AddressTaken
from sidecar.process.process import Process, Unkillable
from sidecar.process.process_family import NotOurs, SpawnFailed
from sidecar.process.start_evidence import StartEvidence, ready

T = TypeVar("T")
FAILURES = (ApiError, SpawnFailed, AddressTaken, Unkillable, NotOurs, OSError)
_CACHE = re.compile(r"Available KV cache memory: ([0-9]{1,5}\.[0-9]{1,3}) GiB")
STEP_WITHIN = 60.0  # seconds for an engine that answers no probe and computes
COMPUTES = 0.2  # of a core's time, that its processes use together where they compute
DYING = 2.0  # seconds for a process to end that has just dropped a connection
SLEEPS: dict[str, Literal[0, 1, 2]] = {"awake": 0, "weights_offloaded": 1, "discard_all": 2}


class VllmEngine:
    """Engine of vLLM, or a simulated engine (residency.machine.Engine). `record`: of its start. `profile`: None if the
    profile is gone; such an engine can only be ended. `folders`: of its model's download. `released`: called once, when
    its address is free again. `url`: for gateways. `gpus`: numbers of its GPUs; empty on CPU."""

    def __init__(
        self,
        process: Process,
        record: EngineRecord,
        name: str,
        profile: Profile | None,
        *,
        folders: Sequence[Path],
        clock: Callable[[], float],
        say: Callable[[str], None],
        released: Callable[[], None],
    ) -> None:
        self.url, self.gpus = process.record.address.url, record.gpus
        self._process, self._record, self._name, self._given = process, record, name, profile
        # Only an engine that may sleep was started in vLLM's development mode.
        self._sleeps = profile is not None and profile.sleeps is not None
        self._folders, self._clock, self._say, self._released = folders, clock, say, released
        served = profile.served_name if profile is not None else None
        self._api = EngineApi(self.url, served or name, dev_mode=self._sleeps)

    def record(self, *, level: Literal[0, 1, 2], told: EngineFacts) -> EngineRecord:
        """For the state file."""
        return msgspec.structs.replace(self._record, told=told, level=level)

    def held(self, processes: dict[int, int]) -> int:
        """Sum the bytes of this engine's processes, by the bytes of each pid on one GPU."""
        total = 0
        for pid, size in processes.items():
            with contextlib.suppress(OSError):  # /proc does not answer: as if it were another's
                total += size if self._process.has(pid) else 0
        return total

    def host_held(self) -> int:
        """Bytes of host memory of all its processes together; 0: not told."""
        try:
            return self._process.host_held()
        except OSError:
            return 0

    def lines(self, most: int) -> list[str]:
        """The last lines it has written."""
        return self._process.output.ring.lines(most)

    # -- its start --------------------------------------------------------------------------------------------------

    async def ready(self, gpu_bytes: Callable[[], int] = lambda: 0) -> EngineFacts:
        """Until it serves: healthy, its name served, warmed up, the canary recorded. `gpu_bytes`: the most that it has
        held of a GPU so far. Raises EngineFailed."""
        profile = self._profile()
        async with self._failing("it did not get ready", memory=True):
            canary = await self._warmed_up(profile, gpu_bytes)
            gauges = await self._api.gauges(LIVENESS)
            served = await self._api.models(LIVENESS)
        most = profile.flags.get("max-num-seqs")
        return EngineFacts(
            kv_tokens=gauges.capacity_tokens,
            kv_bytes=_kv_bytes(self.lines(LINES)),
            context_length=served.get(self._api.served_name),
            max_concurrency=most if isinstance(most, int) and most > 0 else None,
            priorities=profile.flags.get("scheduling-policy") == "priority",
            canary=canary,
        )

    async def _warmed_up(self, profile: Profile, gpu_bytes: Callable[[], int]) -> Completion | None:
        """Wait until the engine is ready and warmed up. Return its canary; None if it can have none, or needs none."""
        pools = pooling(profile)
        requests = 0 if pools else profile.warmup.requests
        progress = StartProgress(self._clock(), profile.load_stall)
        evidence = StartEvidence(self._process, progress, self._clock, gpu_bytes, self._folders)
        try:
            await ready(
                self._api,
                progress,
                None if profile.load_timeout is None else max(profile.load_timeout, profile.load_stall),
                self._clock,
                dead=self._process.wait(),
                look=evidence.look,
                prompt=profile.warmup.prompt,
                requests=requests,
            )
            return None if pools or profile.sleeps is None else await self._api.canary()
        except ApiError as error:
            if error.status not in NO_COMPLETIONS:
                raise
            self._say(f"{self._name} serves, and was not warmed up: {error}")
            return None
        finally:
            evidence.close()

    async def check(self) -> None:
        """Check that the engine itself answers at its address. After adoption. Raises EngineFailed."""
        async with self._failing("it does not answer"):
            await self._api.health(LIVENESS)
            served = await self._api.models(LIVENESS)
        if self._api.served_name not in served:
            raise EngineFailed(f"it serves {', '.join(list(served)[:5])}, not {self._api.served_name}")

    # -- its sleep --------------------------------------------------------------------------------------------------

    async def awake(self) -> Literal[0, 1, 2]:
        """Sleep level, by its own word; 0: awake. Raises EngineFailed, also of one that is paused."""
        async with self._failing("it cannot be asked whether it sleeps"):
            return await self._depth()

    async def _depth(self) -> Literal[0, 1, 2]:
        if not self._sleeps or not await self._patiently(self._api.is_sleeping):
            return 0
        state = (await self._api.gauges(LIVENESS)).sleep_state
        if state is None:  # before vLLM 0.12 only we know; waking from level 2 is right for both
            return self._record.level or 2
        if not SLEEPS.get(state):
            raise EngineFailed("it is paused, which frees nothing, and the sidecar has not paused it")
        return SLEEPS[state]

    async def sleep(self, level: Level) -> None:
        """Back once it does; what runs in it is finished first. Raises EngineFailed."""
        if not self._sleeps:
            raise EngineFailed(f"{self._name} was started so that it cannot sleep: its profile has no sleep")
        async with self._failing(f"it did not go to sleep at level {level}"):
            try:
                await self._api.sleep(level)
            except ApiError as error:
                # The answer may be late or lost where the sleep is not.
                if error.kind not in ("timeout", "lost") or not self._process.alive or await self._depth() != level:
                    raise

    async def wake(self, level: Level, told: EngineFacts) -> None:
        """Back once it serves; after level 2 its canary must be `told`'s. Raises EngineFailed."""
        profile = self._profile()
        doing = f"it did not wake from level {level}"
        async with self._failing(doing, memory=True):
            await self._api.wake(level)
            if await self._depth():
                raise EngineFailed(f"{doing}: it says that it is awake, and that it sleeps")
            if level == 1 or told.canary is None:
                return
            await self._api.warm_up(profile.warmup.prompt, profile.warmup.requests)
            said = await self._api.canary()
        if said != told.canary:
            raise EngineFailed(
                f"{doing}: its weights are not what they were, since to the same words it said "
                f"{told.canary.text[:80]!r} before and says {said.text[:80]!r} now",
                wrong=True,
            )

    # -- health -----------------------------------------------------------------------------------------------------

    async def busy(self) -> int:
        """Requests running and waiting in it, by its own gauges. Raises EngineFailed."""
        async with self._failing("it does not say how busy it is"):
            gauges = await self._patiently(self._api.gauges)
        return gauges.running + gauges.waiting

    async def alive(self) -> None:
        """Probe the process, and EngineCore itself, which says more than /health does. Raises EngineFailed."""
        if not self._process.alive:
            raise EngineFailed(await self.ended())
        async with self._failing("it hangs or is dead"):
            await self._patiently(self._api.alive)

    async def _patiently(self, ask: Callable[[float], Awaitable[T]]) -> T:
        """Return the answer to `ask`, which is told its seconds. Raises ApiError.

        An engine whose processes compute meanwhile has STEP_WITHIN seconds: a kernel may be compiled, or a CPU may read
        a long prompt, in one step.
        """
        until, used = self._clock() + STEP_WITHIN, -math.inf
        while True:
            try:
                return await ask(LIVENESS / 2)
            except ApiError as error:
                if error.kind != "timeout" or self._clock() >= until:
                    raise
                before, used = used, await in_thread(self._used, within=LIVENESS / 2)
                if used - before < COMPUTES * LIVENESS / 2:
                    raise

    def _used(self) -> float:
        """Seconds that its processes have run for together; 0 where nothing can be read of them."""
        try:
            return self._process.usage()[0]
        except OSError:
            return 0.0

    async def ended(self) -> str:
        """Until its process has ended, by itself or not: how, in words."""
        await self._process.wait()
        with contextlib.suppress(Unkillable):
            await self._process.gone()  # its last lines are read by then
        status = self._process.returncode
        if status is None:
            how = "it ended"
        elif status < 0:
            how = f"it was ended by {_signal(-status)}"
        else:
            how = f"it ended with exit status {status}"
        line = diagnosis(self.lines(LINES)).line
        return f"{how}; it said: {line}" if line else f"{how} and had said nothing"

    # -- its end ----------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        """End it and all its processes, and wait for that. Raises EngineFailed where some do not end."""
        try:
            await self._process.terminate()
        except (Unkillable, OSError) as error:
            raise EngineFailed(f"it cannot be ended: {error}") from error
        finally:
            await self._api.aclose()
            self._released()
        uds = self._process.record.address.uds
        if uds is not None:
            with contextlib.suppress(AddressTaken):  # the next one's by now, or gone: either way not ours to say
                ports.clear_socket(Path(uds))

    async def leave(self) -> None:
        """Let it run and know nothing of it any more."""
        await self._process.leave()
        await self._api.aclose()
        self._released()

    # -- failures ---------------------------------------------------------------------------------------------------

    def _profile(self) -> Profile:
        if self._given is None:
            raise EngineFailed(f"there is no profile {self._name} any more")
        return self._given

    @asynccontextmanager
    async def _failing(self, doing: str, *, memory: bool = False) -> AsyncIterator[None]:
        """Turn failures inside into EngineFailed. `memory`: the failure may have been for want of GPU memory."""
        try:
            yield
        except FAILURES as error:
            why = str(error)
            if isinstance(error, ApiError) and error.kind in ("refused", "lost"):
                await done_within(self._process.wait(), DYING)
            if not self._process.alive:
                why = await self.ended()
            found = diagnosis(self.lines(LINES))
            if found.line and found.line not in why:
                why = f"{why}; it said: {found.line}"
            raise EngineFailed(f"{doing}: {why}", found=found if memory else None) from error


def _kv_bytes(lines: Sequence[str]) -> int | None:
    """Return the bytes of the KV cache on each GPU, as the workers have reported; the least of them, because all
    workers keep to that. None if no worker has reported."""
    sizes = [float(found[1]) for line in lines if (found := _CACHE.search(line))]
    return int(min(sizes) * GIB) if sizes and min(sizes) > 0 else None


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
