"""Callers of a sidecar's models through the gateway's own decisions, in virtual time and without a socket.

The gateway is the one that `gateway serve` builds: its admission, queues and registry of sidecars, and the answers to
reports. Reports and orders go by the protocol's bytes. An engine runs as many calls at once as the policy's
`budget.max_concurrency` says, each for as long as it was told.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any, Literal, cast
from urllib.parse import unquote

import msgspec

from gateway.core.policy.file import decode
from gateway.core.request.call import Call
from gateway.core.request.outcome import Refused
from gateway.core.request.routes import ROUTES
from gateway.decider.loading import Configuration
from gateway.decider.waking import Transport
from gateway.serve.assembly import Gateway
from gateway.shared.protocol import Ensured, encode
from loadtest.lab.residency.site import Site

TOKEN = "in-memory-alone"  # noqa: S105 # nobody else is there
TELL_EVERY = 1.0  # seconds between two reports
TOKENS = 200  # of prompt and of answer each


class Orders:
    """Transport of a gateway's requests to the sidecar of `site`, without a connection; its answers are responses."""

    def __init__(self, site: Site, body: bytes = b"") -> None:
        self._site = site
        self._body = body
        self.status_code = 200

    async def handle_async_request(self, request: Any) -> Orders:
        """POST /models/PROFILE/ensure: the one request that a gateway makes."""
        await asyncio.sleep(0)
        profile = unquote(request.url.path.split("/")[2])
        return Orders(self._site, encode(Ensured(model=self._site.manager.orders.ensure(profile))))

    async def aiter_raw(self) -> AsyncIterator[bytes]:
        """The body, as it comes over a socket."""
        yield self._body

    async def aclose(self) -> None:
        """Nothing is open."""


class GatewayCall(msgspec.Struct, frozen=True, kw_only=True):
    """End of a call: `waited` seconds until an engine had it, or until it was refused."""

    model: str
    ending: Literal["served", "refused", "broken"]
    waited: float


class GatewayCallers:
    """A gateway of the policy `text` over the machine of `site`. `log`: what it says. `cut`: no report reaches it."""

    def __init__(self, site: Site, text: str, seed: int = 1) -> None:
        configuration = Configuration(decode(text.encode(), "policy"), sidecar_tokens=(TOKEN,))
        self.log: list[tuple[float, str]] = []
        self.cut = False
        self._site = site
        self.gateway = Gateway(
            configuration,
            (),
            None,
            random.Random(seed),  # ties, no secrets
            say=lambda line: self.log.append((site.now, line)),
            sidecar_transport=cast("Transport", Orders(site)),  # it has all of the surface that is used
        )
        self.gateway.apply(configuration)

    async def run(self) -> None:
        """Take reports, every second and at once on change, until cancelled."""
        while True:
            changed = self._site.manager.changed
            if not self.cut:
                report = self._site.manager.report("machine", "boot", "http://127.0.0.1:8002")
                self._site.manager.heard(self.gateway.sidecars.report(encode(report), local=True))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TELL_EVERY):
                    await changed.wait()
            changed.clear()

    async def call(self, model: str, seconds: float) -> GatewayCall:
        """Make a call that an engine needs `seconds` for."""
        dispatch, began = self.gateway.dispatch, self._site.now
        call = self._made(model, began)
        try:
            grant = await dispatch.ask(call)
        except Refused:
            return GatewayCall(model=model, ending="refused", waited=self._site.now - began)
        with grant:
            waited = self._site.now - began
            engine = next(each for each in self._site.engines.all.values() if each.url == grant.engine.url)
            if not engine.serves:
                return GatewayCall(model=model, ending="broken", waited=waited)
            engine.requests += 1
            try:
                await asyncio.wait((engine.process,), timeout=seconds)
            finally:
                engine.requests -= 1
            grant.first_byte(self._site.now)
            dispatch.sidecars.used(grant.engine.id, self._site.now)
        return GatewayCall(model=model, ending="served" if engine.alive_now else "broken", waited=waited)

    def _made(self, model: str, now: float) -> Call:
        settings = self.gateway.policy.classes["default"]
        return Call(
            request_id="",
            route=ROUTES[b"/v1/chat/completions"],
            model=model,
            tenant="anonymous",
            class_name="default",
            arrived=now,
            deadline=now + settings.deadline,
            ttft_by=now + (settings.ttft or settings.deadline),
            stream=False,
            wants_usage=False,
            max_tokens=TOKENS,
            n=1,
            ascii_bytes=4 * TOKENS,
            cjk_bytes=0,
            other_bytes=0,
            media=0,
            messages=1,
            prefix=(),
            body=b"%d" % int(now * 1e6),
            prompt_tokens=TOKENS,
            output_tokens=TOKENS,
        )
