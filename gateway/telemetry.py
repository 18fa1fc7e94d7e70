"""Asks every engine how it is, and tells the fleet: /health, /v1/models, /metrics.

Each engine has two loops of its own, so that neither a slow scrape nor a hung neighbour delays a health check. What
comes back is bounded in time and size; what cannot be read counts as not answered. Nothing is decided here: results
go to the fleet as they are, then `on_change` lets what waits move.

An engine is told to be healthy only once its models are known, so no call for one of them is answered with 404.
With the default interval of 2 s an engine that hangs is out 4.3 s later at the latest: 2 s until the next check, then
three checks of 0.5 s, 0.4 s apart. One that is down is asked every 0.4 s. A check that this process itself was too
busy to follow says nothing of the engine: an overloaded gateway must not take its fleet for dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx

from gateway.core.fleet import Engine, Fleet
from gateway.core.policy import FleetPolicy
from gateway.core.vllm import AnswerError, models_from, sample_from
from gateway.straight import client
from gateway.tasks import telling

MODELS_EVERY = 30.0  # seconds
MODELS_WITHIN = 2.0  # seconds
LEAST = 0.25  # seconds any answer may take, however short the intervals are
HEALTH_LIMIT = 64 * 1024  # bytes
BODY_LIMIT = 8 * 1024 * 1024  # bytes; vLLM's metrics are about 50 KiB, times data-parallel cores


class Telemetry:
    """All engines' watchers. `on_change` is told of each engine there is news of; `clock` gives monotonic seconds."""

    def __init__(self, fleet: Fleet, on_change: Callable[[Engine], None], clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._on_change = on_change
        self._clock = clock
        self._watchers: dict[str, Watcher] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._started = False

    def watch(self, engine: Engine, api_key: str | None) -> None:
        """Watch an engine, with this key from now on; the intervals are those of its policy."""
        watcher = self._watchers.get(engine.id)
        if watcher is not None and watcher.api_key == api_key:
            return
        if watcher is not None:
            self.forget(engine)
        self._watchers[engine.id] = watcher = Watcher(engine, self._fleet, self._on_change, self._clock, api_key)
        if self._started:
            watcher.start(0.0)

    def forget(self, engine: Engine) -> None:
        """Watch it no longer."""
        task = asyncio.get_running_loop().create_task(self._watchers.pop(engine.id).aclose())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def start(self) -> None:
        """Begin watching. Checks of different engines are spread over the interval."""
        self._started = True
        for index, watcher in enumerate(self._watchers.values()):
            watcher.start(index / len(self._watchers))

    async def first_contact(self) -> None:
        """Until every engine has been tried once; a few seconds at most, whatever state the fleet is in."""
        for watcher in list(self._watchers.values()):
            await watcher.tried.wait()

    async def aclose(self) -> None:
        await asyncio.gather(*self._ending, *(watcher.aclose() for watcher in self._watchers.values()))


class Watcher:
    """Asks one engine. `tried` is set once it has answered, or failed to, for the first time."""

    def __init__(
        self,
        engine: Engine,
        fleet: Fleet,
        on_change: Callable[[Engine], None],
        clock: Callable[[], float],
        api_key: str | None,
    ) -> None:
        self.engine = engine
        self.api_key = api_key
        self.tried = asyncio.Event()
        self._fleet = fleet
        self._on_change = on_change
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []
        self._opened: httpx.AsyncClient | None = None
        self._models_at = 0.0  # when the list of models was read last; matters only while the engine is up

    def start(self, share: float) -> None:
        """`share` of the interval passes before the second check, so that engines are not all asked at once."""
        loop = asyncio.get_running_loop()
        for watch in (self.watch_health(share), self.watch_metrics(share)):
            task = loop.create_task(watch)
            task.add_done_callback(telling("an engine's telemetry stopped"))
            self._tasks.append(task)

    @property
    def _client(self) -> httpx.AsyncClient:
        """Made when it is needed: it takes milliseconds, and a simulation of a large fleet needs none."""
        if self._opened is None:
            self._opened = _client(self.engine.url, self.api_key)
        return self._opened

    @property
    def _policy(self) -> FleetPolicy:
        return self.engine.policy.fleet

    async def watch_health(self, share: float) -> None:
        while True:
            interval = self._policy.health
            well = await self._check_health()
            if not self.tried.is_set():
                await self._scrape()
                self.tried.set()
                await asyncio.sleep(share * interval)
            for _ in range(5):
                await asyncio.sleep(interval / 5)
                if not (well and self.engine.up):
                    break

    async def watch_metrics(self, share: float) -> None:
        await self.tried.wait()
        await asyncio.sleep(share * self._policy.poll)
        while True:
            began = self._clock()
            await self._scrape()
            await asyncio.sleep(max(0.0, began + self._policy.poll - self._clock()))

    async def _check_health(self) -> bool:
        """Whether the engine is well; where it is not, or that cannot be told, it is asked again soon."""
        engine, within, began = self.engine, max(LEAST, 0.25 * self._policy.health), self._clock()
        ok = await self._get("/health", within, HEALTH_LIMIT) is not None
        if not ok and self._clock() - began > 1.5 * within:
            return False  # our own loop was too busy to end the wait in time, so it may have been to see the answer
        if ok and (not engine.up or self._clock() - self._models_at >= MODELS_EVERY):
            ok = await self._ask_models() or engine.up
        self._fleet.health(engine, ok, self._clock())
        self._on_change(engine)
        return ok

    async def _ask_models(self) -> bool:
        body = await self._get("/v1/models", MODELS_WITHIN, BODY_LIMIT)
        try:
            cards = models_from(body or b"")
        except AnswerError:
            return False
        self._fleet.has_models(self.engine, cards)
        self._models_at = self._clock()
        return True

    async def _scrape(self) -> None:
        if not self.engine.up:
            return
        body = await self._get("/metrics", max(LEAST, 3 * self._policy.poll), BODY_LIMIT)
        try:
            sample = sample_from(body or b"")
        except AnswerError:
            return  # the age of the last good one says it all
        self._fleet.sampled(self.engine, sample, self._clock())
        self._on_change(self.engine)

    async def _get(self, path: str, within: float, limit: int) -> bytes | None:
        """The body of a 200 of at most `limit` bytes, wholly here `within` seconds; else None."""
        body = bytearray()
        try:
            async with asyncio.timeout(within), self._client.stream("GET", path) as response:
                if response.status_code != httpx.codes.OK:
                    return None
                async for chunk in response.aiter_raw():
                    body += chunk
                    if len(body) > limit:
                        return None
        except (httpx.HTTPError, TimeoutError):
            return None
        return bytes(body)

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._opened is not None:
            await self._opened.aclose()


def _client(url: str, api_key: str | None) -> httpx.AsyncClient:
    """One connection or two, straight to the engine."""
    path = url.removeprefix("unix://")
    transport = httpx.AsyncHTTPTransport(
        uds=path if path != url else None,
        verify=url.startswith("https://"),  # reading the CA store takes 20 ms
        limits=httpx.Limits(max_connections=4, keepalive_expiry=4.0),  # vLLM closes idle connections after 5 s
        trust_env=False,
    )
    made = client(transport, base_url="http://localhost" if path != url else url)
    if api_key is not None:
        made.headers["authorization"] = f"Bearer {api_key}"
    return made
