"""Engines of a gateway that are pods of an InferencePool, as the policy in force names it.

List, then watch from the list's version; a version that the server has forgotten (410) means to list anew. While the
server does not answer, the engines that are known stay, and health checks tell which of them work.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from contextlib import aclosing
from functools import partial

import msgspec

from gateway.core.engines.origin import engine_id
from gateway.core.policy.policy import EngineEntry
from gateway.decider.kubernetes.api import KubernetesApi, ServiceAccount, Unreachable
from gateway.decider.kubernetes.pool import BadObject, Gone, Pods, Pool
from gateway.shared.notice import Notice
from gateway.shared.tasks import cancel, lasting

GROUP = "/apis/inference.networking.k8s.io/v1"
WATCHED = 60.0  # seconds of one watch; then the pool itself is read again, whose selector may have changed
FIRST_PAUSE, LAST_PAUSE = 0.5, 15.0  # seconds before the server is asked again after a failure
AGAIN = 60.0  # seconds between two lines about one trouble


class PodEngines(msgspec.Struct, eq=False):
    """Engines that the API server tells of. `changed` is called after each change of `entries`.

    `account`: of the pod that this gateway runs in. Raises Unreachable outside of one.
    """

    _changed: Callable[[], None]
    _say: Callable[[str], None]
    _rng: random.Random
    _account: Callable[[], ServiceAccount] = lambda: ServiceAccount.of(os.environ)
    entries: dict[str, EngineEntry] = {}  # by engine id
    _name: str | None = None  # of the pool
    _watching: asyncio.Task[None] | None = None

    def apply(self, name: str | None) -> None:
        """Watch the pool of this name from now on; None: none. Raises Unreachable, and then nothing has changed."""
        if name == self._name:
            return
        account = None if name is None else self._account()
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        self._name, self.entries = name, {}
        if name is not None and account is not None:
            self._watching = lasting("the watch of Kubernetes' pods", partial(self._watch, account, name))

    async def aclose(self) -> None:
        await cancel(self._watching)

    async def _watch(self, account: ServiceAccount, name: str) -> None:
        """Watch the pool of this name until cancelled."""
        loop = asyncio.get_running_loop()
        pause, said, said_at = FIRST_PAUSE, "", 0.0
        pool: Pool | None = None
        pods: Pods | None = None
        async with aclosing(KubernetesApi(account)) as api:
            while True:
                began = loop.time()
                try:
                    namespace = account.text("namespace")
                    path = f"/api/v1/namespaces/{namespace}/pods"
                    found = Pool.read(await api.get(f"{GROUP}/namespaces/{namespace}/inferencepools/{name}"))
                    if pods is None or found != pool:
                        pods = Pods(await api.get(path, labelSelector=found.selector))
                        pool = found  # not before its pods are known
                        self._take(pods, found)
                    pause = FIRST_PAUSE
                    selected = {"labelSelector": found.selector, "resourceVersion": pods.version}
                    async for line in api.watch(path, WATCHED, **selected):
                        pods.take(line)
                        self._take(pods, found)
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

    def _take(self, pods: Pods, pool: Pool) -> None:
        """Make the entries what the pods of now say."""
        urls = pods.urls(pool.ports)
        entries = {engine_id(url): EngineEntry(url=url, name=name) for url, name in urls.items()}
        if entries != self.entries:
            self.entries = entries
            self._changed()
