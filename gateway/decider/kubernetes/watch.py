"""Watch of an InferencePool's pods: the engines of a gateway come and go with them.

List, then watch from the list's version; a version that the server has forgotten (410) means to list anew. While the
server does not answer, the engines that are known stay, and health checks tell which of them work.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping

from gateway.decider.kubernetes.api import KubernetesApi, Unreachable
from gateway.decider.kubernetes.pool import BadObject, Gone, Pods, Pool
from gateway.shared.notice import Notice

GROUP = "/apis/inference.networking.k8s.io/v1"
WATCHED = 60.0  # seconds of one watch; then the pool itself is read again, whose selector may have changed
FIRST_PAUSE, LAST_PAUSE = 0.5, 15.0  # seconds before the server is asked again after a failure
AGAIN = 60.0  # seconds between two lines about one trouble


class PoolWatch:
    """Watch of one pool. `tell` receives the names of its ready engines by URL, whenever they change."""

    def __init__(
        self,
        api: KubernetesApi,
        pool: str,
        tell: Callable[[Mapping[str, str]], None],
        say: Callable[[str], None],
        rng: random.Random,
    ) -> None:
        self._api = api
        self._pool = pool
        self._tell = tell
        self._say = say
        self._rng = rng
        self._told: Mapping[str, str] | None = None

    async def run(self) -> None:
        """Watch until cancelled."""
        loop = asyncio.get_running_loop()
        pause, said, said_at = FIRST_PAUSE, "", 0.0
        pool: Pool | None = None
        pods: Pods | None = None
        while True:
            began = loop.time()
            try:
                namespace = self._api.account.text("namespace")
                path = f"/api/v1/namespaces/{namespace}/pods"
                found = Pool.read(await self._api.get(f"{GROUP}/namespaces/{namespace}/inferencepools/{self._pool}"))
                if pods is None or found != pool:
                    pool = found
                    pods = Pods(await self._api.get(path, labelSelector=pool.selector))
                    self._changed(pods, pool)
                pause = FIRST_PAUSE
                async for line in self._api.watch(
                    path, WATCHED, labelSelector=found.selector, resourceVersion=pods.version
                ):
                    pods.take(line)
                    self._changed(pods, found)
                trouble = ""
            except Gone:
                pods, trouble = None, ""
            except Unreachable as error:
                trouble = str(error)
                if error.status == 410:
                    pods, trouble = None, ""
            except BadObject as error:
                pods, trouble = None, str(error)
            if not trouble:  # a server that ends each watch at once is not asked at once
                await asyncio.sleep(max(0.0, began + FIRST_PAUSE - loop.time()))
                continue
            if trouble != said or loop.time() >= said_at + AGAIN:
                said, said_at = trouble, loop.time()
                self._say(Notice(f"fleet.inference_pool: {trouble}", "kubernetes", "warning"))
            await asyncio.sleep(pause * (0.5 + self._rng.random()))
            pause = min(LAST_PAUSE, 2.0 * pause)

    def _changed(self, pods: Pods, pool: Pool) -> None:
        urls = pods.urls(pool.ports)
        if urls != self._told:
            self._told = urls
            self._tell(urls)
