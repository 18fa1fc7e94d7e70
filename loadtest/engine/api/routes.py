"""Routes of a vLLM API server, and `/_faults`, which no vLLM has, for fault injection.

`Routes.handle` is called once per request, in order, and either answers or submits a request to the engine. Errors are
vLLM's objects; `--api-key` guards `/v1` only, as in vLLM: `/sleep` without a key works.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import parse_qs

import msgspec

from loadtest.engine import metrics
from loadtest.engine.api import anthropic, openai, pooling, rendering, responses
from loadtest.engine.api.checks import BROKEN, DEAD, ApiError, Limits, encode
from loadtest.engine.api.generate import Generation
from loadtest.engine.api.http import Connection, Request
from loadtest.engine.engine import SleepMode
from loadtest.engine.faults import Faults
from loadtest.engine.kv_transfer import TransferParams, transfer_of

if TYPE_CHECKING:
    from loadtest.engine.server import SimServer

Handler = Callable[[Request, Connection], None]
Api = Callable[[Connection, bytes, str, Limits], Generation]
VERSION = "0.32.0"
CREATED = 1_700_000_000  # of the models: when they "were loaded"
GUARDED = (b"/v1", b"/v2")


class Routes:
    """The route table over one server. `frozen_metrics`: what /metrics keeps saying while it is stale."""

    def __init__(self, server: SimServer) -> None:
        self._server = server
        config = server.config
        self.limits = Limits(
            models=(*config.models, *config.adapters),
            max_model_len=config.engine.profile.max_model_len,
            priorities=config.engine.policy == "priority",
            prompt_details=config.prompt_details,
        )
        self.frozen_metrics: bytes | None = None
        self._get: dict[bytes, Handler] = {
            b"/health": self._health,
            b"/ping": self._health,
            b"/version": self._version,
            b"/metrics": self._metrics,
            b"/v1/models": self._models,
            b"/is_sleeping": self._core(self._is_sleeping),
            b"/_faults": self._faults,
        }
        apis: dict[bytes, Api] = {
            b"/v1/chat/completions": openai.chat,
            b"/v1/completions": openai.completion,
            b"/v1/responses": responses.response,
            b"/v1/messages": anthropic.message,
            b"/v1/embeddings": pooling.embeddings,
            **dict.fromkeys((b"/v1/score", b"/score"), pooling.score),
            **dict.fromkeys((b"/v1/rerank", b"/v2/rerank", b"/rerank"), pooling.rerank),
        }
        self._post: dict[bytes, Handler] = {path: self._through(api) for path, api in apis.items()} | {
            b"/ping": self._health,
            b"/v1/messages/count_tokens": self._told(anthropic.count_tokens),
            b"/v1/chat/completions/render": self._told(rendering.chat),
            b"/v1/completions/render": self._told(rendering.completions),
            b"/sleep": self._core(self._sleep),
            b"/wake_up": self._core(self._wake_up),
            b"/collective_rpc": self._core(self._collective_rpc),
            b"/reset_prefix_cache": self._core(self._reset_prefix_cache),
            b"/_faults": self._set_faults,
            b"/_kv": self._hand_over,
        }

    def handle(self, request: Request, connection: Connection) -> None:
        """Answer one request, now or later."""
        path = request.path
        key = self._server.config.api_key
        if key is not None and path.startswith(GUARDED):
            given = request.headers.get(b"authorization", b"").partition(b" ")
            if given[0].lower() != b"bearer" or given[2] != key.encode():
                connection.send(401, b'{"error":"Unauthorized"}')
                return
        get = self._get.get(path)
        post = self._post.get(path)
        handler = post if request.method == b"POST" else get if request.method in (b"GET", b"HEAD") else None
        try:
            if handler is not None:
                handler(request, connection)
            elif get is None and post is None:
                raise ApiError(404, "Not Found", type="Not Found")
            else:
                raise ApiError(405, "Method Not Allowed", type="Method Not Allowed")
        except ApiError as error:
            body = anthropic.error_body(error) if path.startswith(b"/v1/messages") else error.body()
            connection.send(error.status, body)

    def metrics_text(self) -> bytes:
        config = self._server.config
        lora = None if not config.adapters else metrics.LoraInfo(config.max_loras, *self._server.adapters())
        return metrics.text(self._server.engine, config.models[0], lora)

    def _through(self, api: Api) -> Handler:
        """A request to the engine: its fault is drawn first, then it is parsed, then it runs."""

        def handler(request: Request, connection: Connection) -> None:
            server = self._server
            self._alive()
            faults = server.faults
            if faults.errors and server.rng.random() < faults.errors:
                raise ApiError(faults.status, "Injected fault.", type=BROKEN)
            given = request.headers.get(b"x-request-id")
            request_id = f"{server.rng.getrandbits(128):032x}" if given is None else given.decode("latin-1")
            answer = api(connection, request.body, request_id, self.limits)
            server.submit(answer, request_id, transfer_of(request.body) if server.config.kv_transfer else None)

        return handler

    def _health(self, request: Request, connection: Connection) -> None:
        connection.send(503 if self._server.dead else 200, b"", b"")

    def _version(self, request: Request, connection: Connection) -> None:
        connection.send(200, encode({"version": VERSION}))

    def _metrics(self, request: Request, connection: Connection) -> None:
        connection.send(200, self.frozen_metrics or self.metrics_text(), metrics.CONTENT_TYPE)

    def _models(self, request: Request, connection: Connection) -> None:
        models: list[dict[str, Any]] = [
            {
                "id": name,
                "object": "model",
                "created": CREATED,
                "owned_by": "vllm",
                "root": self.limits.models[0],
                "parent": self.limits.models[0] if name in self._server.config.adapters else None,
                "max_model_len": self.limits.max_model_len,
                "permission": [],
            }
            for name in self.limits.models
        ]
        connection.send(200, encode({"object": "list", "data": models}))

    def _told(self, tell: Callable[[bytes, Limits], bytes]) -> Handler:
        """An answer made of the body alone."""
        return lambda request, connection: connection.send(200, tell(request.body, self.limits))

    def _alive(self) -> None:
        if self._server.dead:
            raise ApiError(500, DEAD, type=BROKEN)

    def _core(self, answer: Callable[[Request], Coroutine[None, None, bytes]]) -> Handler:
        """An answer of EngineCore: in its order, and not while it hangs."""

        async def answered(request: Request, connection: Connection) -> None:
            try:
                connection.send(200, await answer(request))
            except ApiError as error:
                connection.send(error.status, error.body())
            except Exception:
                connection.transport.abort()
                raise

        def handler(request: Request, connection: Connection) -> None:
            self._alive()
            self._server.owe(answered(request, connection))

        return handler

    async def _is_sleeping(self, request: Request) -> bytes:
        async with self._server.sleeping.turn():
            return encode({"is_sleeping": bool(self._server.sleeping)})

    async def _sleep(self, request: Request) -> bytes:
        """The query string counts, a JSON body does not: that one surprises people."""
        query = parse_qs(request.query.decode("latin-1"))
        level, mode = query.get("level", ["1"])[-1], query.get("mode", ["abort"])[-1]
        if level not in ("1", "2"):
            raise ApiError(400, "1 validation error:\n  level must be 1 or 2", type="Bad Request", param="query.level")
        modes: dict[str, SleepMode] = {name: name for name in get_args(SleepMode)}
        if mode not in modes:
            raise ApiError(400, "1 validation error:\n  mode: abort or wait", type="Bad Request", param="query.mode")
        await self._server.sleeping.sleep(int(level), modes[mode])
        return encode({"status": "sleeping", "level": int(level)})

    async def _wake_up(self, request: Request) -> bytes:
        tags = parse_qs(request.query.decode("latin-1")).get("tags")
        awake = await self._server.sleeping.wake(tags)
        return encode({"status": "awake" if awake else "sleeping", "tags": tags})

    async def _collective_rpc(self, request: Request) -> bytes:
        body = _json_object(request.body)
        method = body.get("method")
        if method is None:
            raise ApiError(400, "Missing 'method' in request body", type="Bad Request")
        if method != "reload_weights":
            raise ApiError(500, f"Method '{method}' is not implemented.", type=BROKEN)
        await self._server.sleeping.reload_weights()
        return b'{"results":[null]}'

    async def _reset_prefix_cache(self, request: Request) -> bytes:
        async with self._server.sleeping.turn():
            return encode({"success": self._server.engine.scheduler.blocks.reset()})

    def _hand_over(self, request: Request, connection: Connection) -> None:
        """Another engine fetches a prompt."""
        params = msgspec.json.decode(request.body, type=TransferParams)
        kept = self._server.engine.kept.fetch(params.remote_engine_id, params.remote_request_id)
        connection.send(404 if kept is None else 200, b"%d" % (0 if kept is None else kept.prompt), b"")

    def _faults(self, request: Request, connection: Connection) -> None:
        connection.send(200, encode(self._server.faults))

    def _set_faults(self, request: Request, connection: Connection) -> None:
        try:
            faults = msgspec.json.decode(request.body or b"{}", type=Faults)
        except msgspec.DecodeError as error:
            raise ApiError(400, str(error)) from None
        connection.send(200, encode(faults))
        self._server.set_faults(faults)


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ApiError(400, f"JSON decode error: {error}", type="Bad Request") from None
