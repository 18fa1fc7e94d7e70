"""HTTP client of one vLLM, over TCP on loopback or a unix socket. It asks, and decides nothing.

Every question ends within its time, reads at most its limit of bytes, and fails with `ApiError` alone. Each has a
connection of its own: vLLM closes idle ones after 5 s, which is the interval of the liveness probe, so a kept one would
be stale when it is wanted. An EngineApi belongs to one process; a restarted engine gets a new one.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Literal, TypeVar

import httpx
import msgspec

from gateway.shared.control.http_client import AnswerTooLarge, exchange, request_headers, transport_to
from gateway.shared.vllm import answers
from sidecar.core import vllm

T = TypeVar("T")
# refused: nobody listens, nothing was asked; lost: it went away before it had answered, and may have done what was
# asked; timeout: likewise, but it may still do it; status: it answered and says no; garbage: no answer of a vLLM.
Kind = Literal["refused", "lost", "timeout", "status", "garbage"]

QUICK = 5.0  # seconds for what the API server answers by itself
LIVENESS = 10.0  # seconds for what needs EngineCore
GENERATE = 300.0  # seconds for one warm-up request: the first may compile
# Seconds to fall asleep or to wake: whoever orders that bounds it by what is expected, which may be hours where level 2
# reads the weights again.
STEP = 6 * 3600.0
FIRST_PAUSE, LAST_PAUSE = 0.05, 1.0  # seconds between two looks at what is not so yet
METRICS_LIMIT = 8 * 1024 * 1024  # bytes; about 50 KiB, times data-parallel cores
ANSWER_LIMIT = 1024 * 1024  # bytes of any other answer
QUOTED = 300  # bytes of an answer in an error
# What an API server says by itself to a completion that cannot be: of a model that only pools (400, 404, 501, by the
# version), of a prompt that is too long.
NO_COMPLETIONS = frozenset((400, 404, 405, 422, 501))
# Under a KV block of 16 tokens, so no answer ever depends on what the prefix cache holds.
CANARY = "The capital of France is"
CANARY_TOKENS = 16

WAKE_STEPS: dict[int, tuple[tuple[str, object], ...]] = {
    1: (("/wake_up", None),),
    2: (
        ("/wake_up?tags=weights", None),
        ("/collective_rpc", {"method": "reload_weights"}),
        ("/wake_up?tags=kv_cache", None),
        ("/reset_prefix_cache", None),
    ),
}


class ApiError(Exception):
    """An engine did not do what it was asked. `status` is that of its answer, None where there was none."""

    def __init__(self, kind: Kind, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status


class EngineApi:
    """`origin` is `http://127.0.0.1:8000` or `unix:///run/engine.sock`; ValueError where it is neither.

    `dev_mode`: whether the process was started with VLLM_SERVER_DEV_MODE=1; without it there is no sleeping.
    """

    def __init__(self, origin: str, served_name: str, *, dev_mode: bool = True) -> None:
        self.origin = origin
        self.served_name = served_name
        self._dev_mode = dev_mode
        self._transport, self._base = _transport(origin)
        self._headers = request_headers("weir-sidecar") | {"connection": "close"}

    async def aclose(self) -> None:
        """No question may be asked any more."""
        await self._transport.aclose()

    # -- health, models, gauges ---------------------------------------------------------------------------------------

    async def health(self, within: float = QUICK) -> None:
        """Whether the API server is there and EngineCore has not died. A hung or sleeping one passes: see `alive`."""
        await self._ask("GET", "/health", within)

    async def models(self, within: float = QUICK) -> dict[str, int | None]:
        """Served names (adapters too), each with its longest context in tokens where told."""
        cards = _read(answers.models_from, "/v1/models", await self._ask("GET", "/v1/models", within))
        return {card.id: card.max_model_len for card in cards}

    async def gauges(self, within: float = QUICK) -> answers.EngineSample:
        """Read /metrics once. A text that is read in part is none: an engine half read looks idle, and is put to
        sleep. Gauges lag under load: seconds, at worst."""
        return _read(answers.sample_from, "/metrics", await self._metrics(within))

    async def _metrics(self, within: float) -> bytes:
        return await self._ask("GET", "/metrics", within, limit=METRICS_LIMIT)

    async def is_sleeping(self, within: float = LIVENESS) -> bool:
        """Whether it sleeps or is paused, as it is while `sleep` waits. EngineCore itself answers, in dev mode."""
        return _read(vllm.sleeping_from, "/is_sleeping", await self._ask("GET", "/is_sleeping", within))

    async def alive(self, within: float = LIVENESS) -> None:
        """Hears from EngineCore itself, which may hang while /health says 200; ApiError(timeout) where it does.

        In dev mode EngineCore is asked. Else its counters must move while it has work, and while it has none it is
        given some: one token.
        """
        if self._dev_mode:
            await self.is_sleeping(within)
            return
        end, pause, before = _now() + within, FIRST_PAUSE, None
        while True:
            text = await self._metrics(end - _now())
            gauges, steps = _read(answers.sample_from, "/metrics", text), _read(vllm.steps_from, "/metrics", text)
            if not (gauges.running or gauges.waiting):
                await self._token(end - _now())
                return
            if before is not None and steps != before:
                return
            before = steps
            if _now() + pause >= end:
                work = f"{gauges.running} running and {gauges.waiting} waiting requests"
                raise ApiError("timeout", f"no step in {within:g} s with {work}: EngineCore hangs")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)

    async def _token(self, within: float) -> None:
        try:
            await self._complete(CANARY, 1, within)
        except ApiError as error:
            # A pooling model generates nothing, and its API server says so by itself: nothing is learnt of EngineCore.
            if error.status not in NO_COMPLETIONS:
                raise

    # -- completions --------------------------------------------------------------------------------------------------

    async def warm_up(self, prompt: str, requests: int, within: float = GENERATE) -> None:
        """Request `requests` short completions, one after the other, each within `within` seconds."""
        for _ in range(requests):
            await self._complete(prompt, CANARY_TOKENS, within)

    async def canary(self, within: float = GENERATE) -> vllm.Completion:
        """The same as long as the weights are; to be asked of an idle engine, as batches change the arithmetic."""
        return await self._complete(CANARY, CANARY_TOKENS, within)

    async def _complete(self, prompt: str, tokens: int, within: float) -> vllm.Completion:
        asked = {"model": self.served_name, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "seed": 0}
        asked |= {"ignore_eos": True, "return_token_ids": True}  # unknown fields are ignored
        body = await self._ask("POST", "/v1/completions", within, asked)
        return _read(vllm.said_from, "/v1/completions", body)

    # -- orders -------------------------------------------------------------------------------------------------------

    async def sleep(self, level: Literal[1, 2], within: float = STEP) -> None:
        """Sleep; back once it does. After `timeout` and `lost` it may yet: `gauges().sleep_state` tells (since 0.12).

        Before 0.17 the mode is ignored and what runs is lost or worse, so the engine must be idle.
        """
        # A JSON body would be ignored without a word, and level 2 be level 1.
        done = await self._do(f"/sleep?level={level}&mode=wait", within)
        if done.level not in (None, level):
            raise ApiError("status", f"/sleep?level={level}: it says that it sleeps at level {done.level}")

    async def wake(self, level: Literal[1, 2], within: float = STEP) -> None:
        """Wake from sleep of this level; an error begins with the step that failed. Can be repeated as a whole.

        After level 2 compare the canary: an engine whose weights are not there answers nonsense with status 200.
        """
        end = _now() + within
        for target, body in WAKE_STEPS[level]:
            done = await self._do(target, end - _now(), body)
            if done.status == "sleeping" and target != "/wake_up?tags=weights":
                raise ApiError("status", f"{target}: it says that it still sleeps")

    async def _do(self, target: str, within: float, body: object = None) -> vllm.Acknowledgement:
        answer = await self._ask("POST", target, within, body)
        done = _read(vllm.done_from, target, answer)
        if done.success is False:
            raise ApiError("status", f"{target}: it says that it did not: {_quoted(answer)}")
        return done

    # -- one question -------------------------------------------------------------------------------------------------

    async def _ask(
        self, method: str, target: str, within: float, body: object = None, *, limit: int = ANSWER_LIMIT
    ) -> bytes:
        """The body of a 200 of at most `limit` bytes, wholly here `within` seconds. Raises ApiError."""
        content, headers = None, self._headers
        if body is not None:
            content, headers = msgspec.json.encode(body), headers | {"content-type": "application/json"}
        request = httpx.Request(method, self._base + target, headers=headers, content=content)
        try:
            async with asyncio.timeout(within):
                status, answer = await exchange(self._transport, request, limit)
        except AnswerTooLarge:
            raise ApiError("garbage", f"{target}: an answer of more than {limit} bytes") from None
        except TimeoutError:
            raise ApiError("timeout", f"{target}: no whole answer within {within:.1f} s") from None
        except httpx.HTTPError as error:
            raise _failure(target, self.origin, error) from error
        if status != httpx.codes.OK:
            raise ApiError("status", f"{target}: it answered {status}: {_quoted(answer)}", status)
        return answer


def _now() -> float:
    return asyncio.get_running_loop().time()


# h11 and httpcore have one exception for a connection that ends too early and for what is not HTTP; the text tells.
_CUT_OFF = re.compile("closed connection|disconnected")


def _failure(target: str, origin: str, error: httpx.HTTPError) -> ApiError:
    if isinstance(error, httpx.ConnectError):
        return ApiError("refused", f"{target}: nobody listens at {origin}")
    if isinstance(error, httpx.RemoteProtocolError) and not _CUT_OFF.search(str(error)):
        return ApiError("garbage", f"{target}: what answers is not HTTP: {str(error)[:QUOTED]}")
    return ApiError("lost", f"{target}: the connection ended before the answer did")


def _quoted(answer: bytes) -> str:
    return repr(answer[:QUOTED].decode(errors="replace")) if answer else "without a word"


def _read(reader: Callable[[bytes], T], target: str, answer: bytes) -> T:
    try:
        return reader(answer)
    except answers.AnswerError as error:
        raise ApiError("garbage", f"{target}: cannot read the answer: {error}: {_quoted(answer)}") from None


def _transport(origin: str) -> tuple[httpx.AsyncHTTPTransport, str]:
    """Connections to an engine, and the beginning of its URLs. Raises ValueError for an origin that is no engine's."""
    path = origin.removeprefix("unix://")
    unix = path != origin
    if not (path.startswith("/") if unix else origin.startswith("http://")):
        raise ValueError(f"{origin!r} is no engine's address: http://HOST:PORT or unix:///PATH is")
    # Each question has a connection, and its own time.
    transport = transport_to(origin, uds=path if unix else None, limits=httpx.Limits(max_connections=None))
    return transport, "http://localhost" if unix else origin.rstrip("/")
