"""Engines of a gateway that are pods of an InferencePool, as the policy in force names it."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Mapping

from gateway.core.engines.origin import engine_id
from gateway.core.policy.policy import EngineEntry
from gateway.decider.kubernetes.api import KubernetesApi, ServiceAccount
from gateway.decider.kubernetes.watch import PoolWatch
from gateway.shared.tasks import lasting


class PodEngines:
    """Engines that the API server tells of. `changed` is called after each change of `entries`.

    `account`: of the pod that this gateway runs in. Raises Unreachable outside of one.
    """

    def __init__(
        self,
        changed: Callable[[], None],
        say: Callable[[str], None],
        rng: random.Random,
        account: Callable[[], ServiceAccount] = lambda: ServiceAccount.of(os.environ),
    ) -> None:
        self.entries: dict[str, EngineEntry] = {}  # by engine id
        self._changed = changed
        self._say = say
        self._rng = rng
        self._account = account
        self._pool: str | None = None
        self._api: KubernetesApi | None = None
        self._watching: asyncio.Task[None] | None = None

    def apply(self, pool: str | None) -> None:
        """Watch this pool from now on; None: none. Raises Unreachable, and then nothing has changed."""
        if pool == self._pool:
            return
        api = None if pool is None else KubernetesApi(self._account())
        self._stop()
        self._pool, self._api = pool, api
        self.entries = {}
        if pool is not None and api is not None:
            watch = PoolWatch(api, pool, self._told, self._say, self._rng)
            self._watching = lasting("the watch of Kubernetes' pods", watch.run)

    async def aclose(self) -> None:
        self._stop()
        if self._api is not None:
            await self._api.aclose()

    def _stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None

    def _told(self, urls: Mapping[str, str]) -> None:
        self.entries = {engine_id(url): EngineEntry(url=url, name=name) for url, name in urls.items()}
        self._changed()
