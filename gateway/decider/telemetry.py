"""Health checks and metrics scraping of the engines: /health, /v1/models and /metrics, polled for the fleet.

Each engine has two loops of its own, so neither a slow scrape nor a hung neighbour delays a health check. Requests use
a client like that of its calls, with the same host names and certificates. Answers are bounded in time and size. An
unreadable answer counts as none. Nothing is decided here: results go to the fleet, with the reason of a failure, and
then `on_change` lets waiting calls move.

An engine counts as healthy only once its models are known, so that no call for one of them gets a 404.

At the default interval of 2 s an engine that hangs is out after at most 4.3 s. That is 2 s until the next check, then
three checks of 0.5 s, 0.4 s apart. An engine that is down is checked every 0.4 s, and less often where more than 80
are down, OUT_PER_SECOND of them in all. A check that this process was too busy to follow is ignored: an overloaded
gateway must not take its engines for dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from functools import partial

from gateway.core.engines.engine import Engine
from gateway.core.engines.fleet import Fleet
from gateway.core.engines.trouble import OWN, Trouble, asleep
from gateway.core.policy.policy import FleetPolicy
from gateway.shared.tasks import cancel, lasting, wait_until
from gateway.shared.vllm.answers import AnswerError, ModelCard, models_from, sample_from
from gateway.upstream.client import Client, ClientSettings, EngineError, parse_origin
from gateway.upstream.names import Names
from gateway.upstream.trust import Trust

MODELS_EVERY = 30.0  # seconds
DOUBTED_FOR = 2.0  # seconds between two lists at least, whatever calls are answered
MODELS_WITHIN = 2.0  # seconds
NO_METRICS_EVERY = 30.0  # seconds between two questions to an engine that has none
OUT_PER_SECOND = 200  # checks of all engines that are out
LEAST = 0.25  # seconds that every answer may take, however short the intervals are
HEALTH_LIMIT = 64 * 1024  # bytes
BODY_LIMIT = 8 * 1024 * 1024  # bytes; vLLM's metrics are about 50 KiB, times data-parallel cores
LINES = b"user-agent: weir\r\n"


class Unanswered(Exception):
    """An engine gave no acceptable answer to a request. `reason`: the kind of failure."""

    def __init__(self, reason: str, words: str) -> None:
        super().__init__(words)
        self.reason = reason


class Questions:
    """The requests of health checks to one engine, each with a time limit in seconds. All raise Unanswered."""

    def __init__(self, url: str, api_key: str | None, names: Names | None = None, trust: Trust | None = None) -> None:
        self._url = url
        self._api_key = api_key
        self._trust = trust
        self._names = names
        self._opened: Client | None = None

    async def health(self, within: float) -> None:
        """Check its health."""
        await self._get("/health", within, HEALTH_LIMIT)

    async def models(self, within: float) -> list[ModelCard]:
        """The models that it serves."""
        body = await self._get("/v1/models", within, BODY_LIMIT)
        try:
            return list(models_from(body))
        except AnswerError as error:
            raise Unanswered("models", f"GET /v1/models was not answered with a list of models: {error}") from error

    async def metrics(self, within: float) -> bytes:
        return await self._get("/metrics", within, BODY_LIMIT)

    @property
    def _client(self) -> Client:
        """The HTTP client, made at the first request: reading the CA store takes 20 ms, and simulations of large fleets
        need none.
        """
        if self._opened is None:
            settings = ClientSettings(max_idle=2)
            origin = parse_origin(self._url)
            self._opened = Client(origin, settings, api_key=self._api_key, names=self._names, trust=self._trust)
        return self._opened

    async def _get(self, path: str, within: float, limit: int) -> bytes:
        """The body of an answer with status 200 and at most `limit` bytes, received within `within` seconds."""
        loop = asyncio.get_running_loop()
        until = loop.time() + within
        try:
            with closing(await self._client.send(b"GET", path.encode(), LINES, b"", timeout=within)) as reply:
                if reply.status != 200:
                    raise Unanswered("status", f"GET {path} was answered {reply.status}{_ADVICE.get(reply.status, '')}")
                async with asyncio.timeout_at(until):
                    return await reply.read(limit)
        except EngineError as error:
            if error.reason == "timeout":
                raise Unanswered("timeout", f"GET {path} was not answered within {within:g} s ({error})") from error
            raise Unanswered(error.reason, str(error).removeprefix("cannot connect: ")) from error
        except TimeoutError:
            raise Unanswered("timeout", f"the answer to GET {path} did not end within {within:g} s") from None

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()


_ADVICE = {
    401: ": it wants its key, see api_key_file",
    403: ": it wants its key, see api_key_file",
    404: ": is this a vLLM, and its URL without a path?",
}


def unmeasured(error: Unanswered | AnswerError) -> str:
    """Reason why an engine whose sample met `error` has no metrics; empty if the next sample may succeed."""
    if isinstance(error, Unanswered):
        return str(error).partition(": is this")[0] if error.reason == "status" else ""
    return f"GET /metrics was answered without vLLM's metrics: {error}"


class Telemetry:
    """The watchers of all engines. `on_change` gets each engine with new results; `clock` gives monotonic seconds."""

    def __init__(self, fleet: Fleet, on_change: Callable[[Engine], None], clock: Callable[[], float]) -> None:
        self.fleet = fleet
        self.on_change = on_change
        self.clock = clock
        self.names = Names()
        self._watchers: dict[str, Watcher] = {}
        self.out: set[str] = set()  # ids of the engines that are out
        self._ending: set[asyncio.Task[None]] = set()
        self._started = False
        self._news = asyncio.Event()  # pulses after the first check of each engine

    def watch(self, engine: Engine, api_key: str | None, trust: Trust | None = None) -> None:
        """Watch an engine with this API key, and trust in certificates, from now on. The intervals are those of its
        policy."""
        watcher = self._watchers.get(engine.id)
        if watcher is not None and (watcher.api_key, watcher.trust) == (api_key, trust):
            return
        if watcher is not None:
            self.forget(engine)
        watcher = Watcher(self, engine, api_key, trust)
        self._watchers[engine.id] = watcher
        if self._started:
            self._start(watcher, 0.0)

    def forget(self, engine: Engine) -> None:
        """Stop watching an engine."""
        task = asyncio.get_running_loop().create_task(self._watchers.pop(engine.id).aclose())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def start(self) -> None:
        """Start watching. Checks of different engines are spread over the interval."""
        self._started = True
        for index, watcher in enumerate(self._watchers.values()):
            self._start(watcher, index / len(self._watchers))

    def _start(self, watcher: Watcher, share: float) -> None:
        if not watcher.engine.models:
            self.fleet.unasked.add(watcher.engine.id)
        watcher.start(share)

    def asked_once(self, engine: Engine) -> None:
        """The engine has been checked for the first time."""
        self.fleet.unasked.discard(engine.id)
        self._news.set()
        self._news.clear()  # waiters are woken all the same

    async def asked(self, enough: Callable[[], object], within: float) -> None:
        """Wait until every engine has been checked once, or `enough` is true; for `within` seconds at most."""
        await wait_until(lambda: not self.fleet.unasked or enough(), self._news, within)

    async def first_contact(self) -> None:
        """Wait until every engine has been checked once. Takes a few seconds at most."""
        for watcher in list(self._watchers.values()):
            await watcher.tried.wait()

    async def aclose(self) -> None:
        await asyncio.gather(*self._ending, *(watcher.aclose() for watcher in self._watchers.values()))


class Watcher:
    """The loops of one engine. `tried` is set after its first check, whatever the result."""

    def __init__(self, telemetry: Telemetry, engine: Engine, api_key: str | None, trust: Trust | None = None) -> None:
        self._telemetry = telemetry
        self.engine = engine
        self.api_key = api_key
        self.trust = trust
        self.tried = asyncio.Event()
        self._on_change, self._clock = telemetry.on_change, telemetry.clock
        self._tasks: list[asyncio.Task[None]] = []
        self._questions = Questions(engine.url, api_key, telemetry.names, trust)
        self._models_at = 0.0  # time of the last list of models; matters only while the engine is up

    def start(self, share: float) -> None:
        """Start the loops. `share` of the interval passes before the second check, so that engines are not all checked
        at once."""
        id = self.engine.id
        if self.engine.provider:  # nobody checks it: its calls alone tell how it does
            self.tried.set()
            self._tasks.append(lasting(f"turns of {id}", self._turns))
            return
        self._tasks += [
            lasting(f"health checks of {id}", partial(self.watch_health, share)),
            lasting(f"samples of {id}", partial(self.watch_metrics, share)),
        ]

    @property
    def _policy(self) -> FleetPolicy:
        return self.engine.policy.fleet

    async def watch_health(self, share: float) -> None:
        out = self._telemetry.out
        while True:
            interval = self._policy.health
            well = await self._check_health()
            down = not well and not self.engine.health.up
            if down:
                out.add(self.engine.id)
            else:
                out.discard(self.engine.id)
            if not self.tried.is_set():
                await self._scrape()
                self.tried.set()
                self._telemetry.asked_once(self.engine)
                await asyncio.sleep(share * interval)
            nap = max(interval / 5, len(out) / OUT_PER_SECOND) if down else interval / 5
            for _ in range(5):
                await asyncio.sleep(nap)
                if not (well and self.engine.health.up) or (
                    self.engine.health.doubted and self._models_due(self._clock())
                ):
                    break

    async def _turns(self) -> None:
        """Look at what waits for a provider from time to time, as its breaker may be due for a probe."""
        while True:
            self._on_change(self.engine)
            await asyncio.sleep(self._policy.health)

    async def watch_metrics(self, share: float) -> None:
        await self.tried.wait()
        await asyncio.sleep(share * self._policy.poll)
        while True:
            began = self._clock()
            await self._scrape()
            every = NO_METRICS_EVERY if self.engine.health.unmeasured else self._policy.poll
            await asyncio.sleep(max(0.0, began + every - self._clock()))

    async def _check_health(self) -> bool:
        """Whether the engine is healthy. If it is not, or if that is unknown, the next check comes soon."""
        engine, within, began = self.engine, max(LEAST, 0.25 * self._policy.health), self._clock()
        trouble = await self._well(within)
        now = self._clock()
        if trouble is not None and (now - began > 1.5 * within or trouble.reason == OWN):
            return False  # this process was too busy to end the wait in time, or has no file descriptor left
        ok = trouble is None
        if ok and (not engine.health.up or self._models_due(now)):
            trouble = await self._ask_models()
            if trouble is None and not engine.health.up and not engine.draining:
                trouble = await self._asleep()
            now = self._clock()
            ok = trouble is None or engine.health.up
        engine.check(ok, now, trouble)
        self._on_change(engine)
        return ok

    async def _well(self, within: float) -> Trouble | None:
        try:
            await self._questions.health(within)
        except Unanswered as error:
            return Trouble(error.reason, str(error), self._clock())
        return None

    async def _asleep(self) -> Trouble | None:
        """Whether it says that it sleeps, which /health does not. One that does not tell is awake."""
        try:
            return asleep(sample_from(await self._questions.metrics(MODELS_WITHIN)), self._clock())
        except (Unanswered, AnswerError):
            return None

    def _models_due(self, now: float) -> bool:
        """Whether the list of models is to be read again. An engine that answered 404 for a model is asked soon, since
        an adapter may have been unloaded there."""
        return now - self._models_at >= (DOUBTED_FOR if self.engine.health.doubted else MODELS_EVERY)

    async def _ask_models(self) -> Trouble | None:
        try:
            cards = await self._questions.models(MODELS_WITHIN)
        except Unanswered as error:
            return Trouble(error.reason, str(error), self._clock())
        self._telemetry.fleet.has_models(self.engine, cards)
        self._models_at = self._clock()
        self.engine.health.doubted = False
        return None

    async def _scrape(self) -> None:
        if not self.engine.health.up:
            return
        try:
            sample = sample_from(await self._questions.metrics(max(LEAST, 3 * self._policy.poll)))
        except (Unanswered, AnswerError) as error:
            words = unmeasured(error)
            if words and not self.engine.health.unmeasured and self.engine.sample is None:
                self.engine.health.unmeasured = words
                self._on_change(self.engine)
            return  # the fleet judges by the age of the last good sample
        self.engine.sampled(sample, self._clock())
        self._on_change(self.engine)

    async def aclose(self) -> None:
        await cancel(*self._tasks)
        self._telemetry.out.discard(self.engine.id)
        self._questions.close()
