"""Server of the simulated engine: a real socket, in real time.

    async with SimServer(sim_config("h100-8b", models=("m",))) as url: ...

`SimServer` owns the clock: it makes a step, waits until the step ends, hands every sequence that wrote a token to the
request it belongs to, and makes the next one. No coroutine runs per request or per step. What a request is answered
with is in `routes.py` and the API modules.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING

from loadtest.engine.api.checks import BROKEN, DEAD, ApiError
from loadtest.engine.api.generate import Choice, Generation
from loadtest.engine.api.http import Connection
from loadtest.engine.api.routes import Routes
from loadtest.engine.api.side_channel import SideChannel
from loadtest.engine.config import SimConfig
from loadtest.engine.engine import Engine
from loadtest.engine.engine_memory import Resident
from loadtest.engine.faults import Faults, faults_of
from loadtest.engine.kv_transfer import TransferParams
from loadtest.engine.latency import Front
from loadtest.engine.scheduler import EngineStep
from loadtest.engine.sequence import Sequence, SequenceState
from loadtest.engine.sleeping import Sleeping

if TYPE_CHECKING:
    from loadtest.engine.publisher import Publisher

BACKLOG = 4096
SHUTDOWN = 0.5  # seconds that an API server is still there after its EngineCore has died
CATCH_UP = 0.05  # seconds behind the model's clock that later steps may make good; the rest is forgotten


class SimServer:
    """Engine and its HTTP server. `url` once started; `faults` may be replaced through `set_faults`.

    On simulated GPUs `load` comes first, and `died` is set when it has to end for want of memory. Raises ValueError
    where there are no such GPUs.
    """

    def __init__(self, config: SimConfig) -> None:
        self.config = config
        self.engine = Engine(config.engine, engine_id=secrets.token_hex(8))
        self.transfers = SideChannel(self)
        self.faults = Faults()
        self.dead = False  # out of memory: EngineCore is gone
        self.died = asyncio.Event()
        share = config.share
        profile = config.engine.profile
        self.resident = None if share is None else Resident(share, profile.weights, profile.max_num_seqs)
        self._tasks: set[asyncio.Task[None]] = set()  # answers that EngineCore owes
        self.url = ""
        self.connections: set[Connection] = set()
        self._front = Front(profile, config.speed)
        self._coming: dict[Generation, asyncio.TimerHandle] = {}  # the scheduler does not have them yet
        self.rng = random.Random(config.engine.seed)  # noqa: S311 - faults and ids
        self._routes = Routes(self)
        self._server: asyncio.Server | None = None
        self._timer: asyncio.Handle | None = None
        self._due = 0.0
        self._address: tuple[str, int] = (config.host, config.port)
        self.sleeping = Sleeping(self)
        self._publisher: Publisher | None = None

    def __repr__(self) -> str:
        return f"<SimServer {self.url} {self.engine!r}>"

    async def __aenter__(self) -> str:
        await self.start()
        return self.url

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def load(self, say: Callable[[str], None]) -> None:
        """Take memory and time as a start does, where GPUs are simulated. Raises StartFailed, and ValueError for a file
        of faults that cannot be read."""
        if self.resident is not None and self.config.share is not None:
            await self.resident.start(self.config.models, self.config.speed, say)
            self.set_faults(faults_of(self.config.share.folder, self.config.models[0]))

    async def start(self) -> None:
        """Listen. Raises OSError where the address is taken, ValueError where events need a library that is absent."""
        self._loop = asyncio.get_running_loop()
        if self.config.kv_events is not None:
            self._publisher = _publisher(self.config.kv_events)
            self.engine.scheduler.blocks.log = self._publisher.log
        await self._listen()
        self.url = f"unix://{self.config.uds}" if self.config.uds else f"http://{self.config.host}:{self._address[1]}"

    async def stop(self) -> None:
        """Stop listening, drop every connection and every sequence, give the memory back."""
        for task in list(self._tasks):
            task.cancel()
        self.transfers.close()
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self.connections):
            connection.transport.abort()
        if self._timer is not None:
            self._timer.cancel()
        for handle in self._coming.values():
            handle.cancel()
        if self._publisher is not None:
            self._publisher.close()
        if self.resident is not None:
            self.resident.release()
        await asyncio.sleep(0)

    async def _listen(self) -> None:
        def connection() -> Connection:
            return Connection(self._routes.handle, self.connections)

        if self.config.uds:
            self._server = await self._loop.create_unix_server(connection, self.config.uds, backlog=BACKLOG)
        else:
            host, port = self._address
            self._server = await self._loop.create_server(connection, host, port, backlog=BACKLOG)
            self._address = self._server.sockets[0].getsockname()[:2]

    def set_faults(self, faults: Faults) -> None:
        """Replace all faults; what has healed works again at once."""
        self.faults = faults
        self._routes.frozen_metrics = self._routes.metrics_text() if faults.stale_metrics else None
        (self.sleeping.healed.clear if faults.hang else self.sleeping.healed.set)()
        self.work()

    def owe(self, answer: Coroutine[None, None, None]) -> None:
        """Let an answer come once EngineCore has given it."""
        task = self._loop.create_task(answer)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def adapters(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the LoRA adapters with running requests, and the adapters with waiting requests."""
        running: dict[str, None] = {}
        waiting: dict[str, None] = {}
        for sequence in self.engine.unfinished():
            model = sequence.owner.answer.form.model
            if model in self.config.adapters:
                (running if sequence in self.engine.scheduler.running else waiting)[model] = None
        return tuple(running), tuple(waiting)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on."""
        return (self.config.uds, 0) if self.config.uds else self._address

    def submit(self, answer: Generation, request_id: str = "", transfer: TransferParams | None = None) -> None:
        """Put every sequence of a request into the engine; the client leaving takes them out again. `transfer`: its
        prompt is read for another engine, or was read by another."""
        now = self._loop.time()
        answer.connection.gone = lambda: self.withdraw(answer)
        answer.garbled = self.engine.garbage
        if answer.stream:
            answer.begin()
        if transfer is not None:
            if transfer.do_remote_prefill:
                self.transfers.fetch(answer, transfer, now)
                return
            self.transfers.keep(answer, request_id)
        reaches = self._front.reaches(now)
        if reaches > now:
            self._coming[answer] = self._loop.call_at(reaches, self.enter, answer, now)
        else:
            self.enter(answer, now)

    def enter(self, answer: Generation, came: float) -> None:
        """Give the scheduler the sequences of a request that came then."""
        self._coming.pop(answer, None)
        for choice in answer.choices:
            self.sleeping.add(choice.sequence, came)
        self.work()

    def withdraw(self, answer: Generation) -> None:
        """Abort what is left of a request and free its blocks at once."""
        if self.transfers.withdraw(answer):
            return
        coming = self._coming.pop(answer, None)
        if coming is not None:
            coming.cancel()
            return
        for choice in answer.choices:
            self.engine.abort(choice.sequence)
        self.sleeping.forget(answer)

    def work(self) -> None:
        """Make steps while there is something to do. One is under way at most."""
        if self._timer is None and self.engine.busy and not self.faults.hang and not self.dead:
            self._due = self._loop.time()
            # Not at once: what arrived together is scheduled together.
            self._timer = self._loop.call_soon(self._step)

    def _step(self) -> None:
        if not self.engine.busy or self.faults.hang:
            self._timer = None
            return
        now = self._loop.time()
        result = self.engine.step(now)
        if self._publisher is not None:
            self._publisher.publish()  # with the step, as vLLM does: what a reset clears is told with the next one
        wrote = self.engine.scheduler.decoding()
        self._due = max(self._due, now - CATCH_UP) + result.duration * self.faults.slow / self.config.speed
        self._timer = self._loop.call_at(self._due, self._hand_out, wrote, result)

    def _hand_out(self, wrote: list[Sequence], result: EngineStep) -> None:
        for sequence in wrote:
            # A client may have left while the step ran.
            if sequence.state is SequenceState.RUNNING or sequence.state is SequenceState.WAITING:
                choice: Choice = sequence.owner
                choice.answer.token(choice)
        for sequence in result.finished:
            choice = sequence.owner
            if not choice.answer.connection.closed:
                choice.answer.finished(choice)
        if not self.engine.busy:
            self.sleeping.ran_dry()
        self._step()

    def die(self) -> None:
        """EngineCore is gone: what runs fails, and on simulated GPUs the whole process has to end."""
        self.dead = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        lost = {sequence.owner.answer: None for sequence in self.engine.unfinished()}
        for answer, handle in self._coming.items():
            handle.cancel()
            answer.failed(ApiError(500, DEAD, type=BROKEN))
        self._coming.clear()
        for answer in lost:
            for choice in answer.choices:
                self.engine.abort(choice.sequence)
            answer.failed(ApiError(500, DEAD, type=BROKEN))
        if self.resident is not None:
            self.resident.release()
            self._loop.call_later(SHUTDOWN / self.config.speed, self.died.set)


def _publisher(endpoint: str) -> Publisher:
    try:
        from loadtest.engine.publisher import Publisher  # noqa: PLC0415 # pyzmq is there only where events are wanted
    except ModuleNotFoundError as error:
        raise ValueError(f"--kv-events needs {error.name}: pip install 'WEIR.whl[kv-events]'") from error
    return Publisher(endpoint)
