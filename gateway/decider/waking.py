"""Wake-up of models: asks sidecars to start or wake models that calls wait for and no engine serves.

There is one task for each wanted model, however many calls wait for it, and one request in flight. The request goes to
the sidecar that can have the model ready soonest, by the sidecars' reports. A sidecar that does not answer is asked
again after a pause, and meanwhile the next best is asked. A sidecar that has begun is not asked again while its reports
show progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import quote

import httpx

from gateway.core.sidecars.sidecar import Outlook, awake, beginning
from gateway.decider.dispatch import Dispatch
from gateway.shared.control.http_client import AnswerTooLarge, exchange, request_headers
from gateway.shared.protocol import MAX_BYTES, ProtocolError, ensured
from gateway.shared.tasks import cancel, done_within, telling
from gateway.upstream.trust import Trust

WITHIN = 3.0  # seconds for a whole answer
FIRST_PAUSE, LAST_PAUSE = 1.0, 8.0  # seconds before a sidecar that agreed but has not begun is asked again
LOOK = 1.0  # seconds between two checks of whether calls still wait
LIMITS = httpx.Limits(max_connections=64, max_keepalive_connections=16, keepalive_expiry=4.0)
RESULTS = ("awake", "begun", "cannot", "failed")


Transport = httpx.AsyncBaseTransport


class Waking:
    """The wake-up tasks of all models. `token`: the order token, which sidecars are shown.

    `results` counts requests by result: the model was awake, is being made ready, cannot be had there, or the answer
    made no sense or did not come.
    """

    def __init__(self, dispatch: Dispatch, say: Callable[[str], None], transport: Transport | None = None) -> None:
        self.token: str | None = None
        self.trust: Trust | None = None
        self.transport = transport  # in place of sockets
        self._given = transport is not None
        self._spent: list[Transport] = []  # of a trust that was changed
        self.results = dict.fromkeys(RESULTS, 0)
        self._dispatch = dispatch
        self._registry = dispatch.sidecars
        self._say = say
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._until: dict[str, float] = {}
        self._news = asyncio.Event()

    def go_by(self, token: str | None, trust: Trust | None) -> None:
        """Show sidecars this token, and trust these certificates, from now on."""
        if trust != self.trust and self.transport is not None and not self._given:
            self._spent.append(self.transport)
            self.transport = None
        self.token, self.trust = token, trust

    @property
    def models(self) -> tuple[str, ...]:
        """The models that sidecars are being asked for."""
        return tuple(self._tasks)

    def wanted(self, model: str, seconds: float) -> None:
        """Ask for a model while calls wait for it, and for at least `seconds`, when refused calls will come back."""
        until = self._dispatch.clock() + seconds
        self._until[model] = max(until, self._until.get(model, until))
        if model not in self._tasks:
            task = asyncio.get_running_loop().create_task(self._have(model))
            self._tasks[model] = task
            task.add_done_callback(telling("asking for a model stopped"))

    def heard(self) -> None:
        """Look again: a sidecar has reported, or has become stale."""
        self._news.set()

    async def _have(self, model: str) -> None:
        """Ask until the model is awake or no longer wanted."""
        registry, clock = self._registry, self._dispatch.clock
        pause, again_at, last = FIRST_PAUSE, 0.0, ("", "")
        try:
            while True:
                now = clock()
                outlook = registry.outlook(model, now)
                if outlook is None or outlook.ready_in is None or not self._is_wanted(model, now):
                    return
                target = (outlook.sidecar, outlook.profile)
                if target != last:
                    last, pause, again_at = target, FIRST_PAUSE, 0.0
                sidecar = registry.sidecars[outlook.sidecar]
                begun = beginning(sidecar.latest(outlook.profile)[0])
                if begun or sidecar.pause(now) or now < again_at:
                    await self._wait(now, sidecar.pause(now), again_at)
                    continue
                registry.waking[model] = target
                result = await self._ask(outlook)
                self.results[result] += 1
                if result == "failed":
                    registry.waking.pop(model, None)
                else:
                    again_at, pause = clock() + pause, min(LAST_PAUSE, 2 * pause)
                self._dispatch.waiting.reconsider(model)
        finally:
            del self._tasks[model], self._until[model]
            registry.waking.pop(model, None)

    def _is_wanted(self, model: str, now: float) -> bool:
        """Whether calls wait for the model, or will come back for it. The model is ready for the latter only if the
        gateway asks for it. One engine is enough for them: a second is a copy, see core/sidecars/copies.py."""
        told = now < self._until[model] and not self._dispatch.control.fleet.serves(model)
        return told or self._dispatch.estimates.unserved(model)

    async def _wait(self, now: float, pause: float, again_at: float) -> None:
        """Wait for a report, or until a sidecar may be asked again."""
        within = min(LOOK, max(pause, again_at - now) or LOOK)
        self._news.clear()
        await done_within(self._news.wait(), within)

    async def _ask(self, outlook: Outlook) -> str:
        """Send one request. Returns its result, one of RESULTS."""
        sidecar, now = self._registry.sidecars[outlook.sidecar], self._dispatch.clock
        url = f"{sidecar.report.control.rstrip('/')}/models/{quote(outlook.profile, safe='')}/ensure"
        try:
            status, body = await self._exchanged(url)
            if status != httpx.codes.OK:
                raise ProtocolError(f"it answered {status}")
            model = ensured(body).model
            if model.profile != outlook.profile:
                raise ProtocolError(f"an answer about {model.profile!r}")
        except (httpx.HTTPError, httpx.InvalidURL, ProtocolError, TimeoutError) as error:
            if not sidecar.failures:
                self._say(f"sidecar {outlook.sidecar} was asked for {outlook.profile!r}: {_words(error)}")
            sidecar.failed(now())
            return "failed"
        sidecar.answered(model, now())
        if awake(model):
            return "awake"
        return "cannot" if model.ready_in is None else "begun"

    async def order(self, sidecar: str, profile: str, what: str) -> tuple[int, bytes]:
        """Pass an operator's order on; status and body of the answer. Raises LookupError for a sidecar or profile that
        is not known, ConnectionError for a sidecar that may not be asked or does not answer."""
        return await self._ask_sidecar("POST", sidecar, profile, what)

    async def read_log(self, sidecar: str, profile: str, lines: int) -> tuple[int, bytes]:
        """The last `lines` lines of a model's engine, as its sidecar answers: status and body. Raises as `order`."""
        return await self._ask_sidecar("GET", sidecar, profile, f"logs?lines={lines}")

    async def _ask_sidecar(self, method: str, sidecar: str, profile: str, what: str) -> tuple[int, bytes]:
        known = self._registry.sidecars.get(sidecar)
        if known is None or profile not in known.models:
            raise LookupError(f"No sidecar {sidecar!r} has reported a profile {profile!r}.")
        if not known.control_allowed:
            raise ConnectionError(f"The policy does not let this gateway call {known.report.control}: {known.refused}")
        url = f"{known.report.control.rstrip('/')}/models/{quote(profile, safe='')}/{what}"
        try:
            status, body = await self._exchanged(url, method)
        except (httpx.HTTPError, httpx.InvalidURL, ProtocolError, TimeoutError) as error:
            raise ConnectionError(f"The sidecar {sidecar} did not answer: {_words(error)}.") from error
        if status in (401, 403, 421):
            raise ConnectionError(
                f"The sidecar {sidecar} does not take this gateway's order token (it answered {status})."
            )
        return status, body

    async def _exchanged(self, url: str, method: str = "POST") -> tuple[int, bytes]:
        """Status and body of an answer, bounded in time and size."""
        trust = self.trust or Trust()
        if self.transport is None:
            self.transport = httpx.AsyncHTTPTransport(limits=LIMITS, trust_env=False, verify=trust.context())
        named = {} if trust.name is None else {"sni_hostname": trust.name}
        request = httpx.Request(method, url, headers=request_headers("weir", self.token), extensions=named)
        try:
            async with asyncio.timeout(WITHIN):
                return await exchange(self.transport, request, MAX_BYTES)
        except AnswerTooLarge:
            raise ProtocolError(f"an answer of more than {MAX_BYTES} bytes") from None

    async def aclose(self) -> None:
        """Stop all tasks."""
        await cancel(*self._tasks.values())
        for transport in (*self._spent, self.transport):
            if transport is not None:
                await transport.aclose()


def _words(error: Exception) -> str:
    return str(error)[:200] or type(error).__name__
