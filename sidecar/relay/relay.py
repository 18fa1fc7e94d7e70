"""Relay: the one port by which gateways on other machines reach this machine's engines.

Engines listen on unix sockets or loopback. Every request shows the order token, which is compared in constant time
before anything else is said. Then `target_of` names the engine and its path, or the request is refused. A target is
`/engines/PROFILE` before one of an engine's own paths. It is compared as it came, byte for byte: no escape is undone,
no dot segment removed, no slash merged, so each target has one spelling. What reaches the engine is the table's own
path, never a caller's bytes. vLLM's other routes (sleep, collective_rpc, adapters, shutdown) are not in it.

HTTP is the gateway's own strict server and client (`gateway/relay/wire`, `gateway/upstream`): what passes was parsed
and is written anew, with bounds on heads, bodies, connections and time.

A call for a model that is not awake is refused, since a sleeping engine would hang. Calls through the relay end with
the sidecar; engines do not.
"""

from __future__ import annotations

import asyncio
import math
import re
import resource
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final, Literal, get_args

import msgspec

from gateway.core.request.body_memory import BodyMemory
from gateway.core.request.outcome import error_body
from gateway.core.request.routes import ROUTES
from gateway.relay.wire.messages import Request, ServerSettings, answer, with_token
from gateway.relay.wire.responder import Responder
from gateway.relay.wire.server import Server
from gateway.shared.certificate import Certificate
from gateway.shared.control.guard import shows
from gateway.shared.protocol import ENGINES_PATH, Ensured, ModelReport, encode
from gateway.shared.tasks import cancel, telling
from gateway.shared.tokens import AcceptedTokens
from gateway.shared.watched_file import WatchedFile
from gateway.upstream.client import Client, ClientSettings, EngineError, Reply, parse_origin
from sidecar.core.addresses import Address
from sidecar.core.config import RelaySettings
from sidecar.core.status import RelayOutcome, RelayUse

JSON: Final = b"content-type: application/json\r\n"
BODY: Final = 1024**3  # bytes of a call; the largest that a gateway's policy can allow
BODIES: Final = 2 * BODY  # bytes of all calls together, while they arrive and are sent
FILES: Final = 512  # open files that the sidecar's own work may need
CONNECTIONS: Final = 8192
# The gateway's own time-outs are shorter, and one that vanishes is noticed by TCP.
PATIENCE: Final = 6 * 3600.0  # seconds for an engine's first byte
STALL: Final = PATIENCE  # seconds without a byte of an engine
LOG: Final = 512 * 1024  # bytes of a log's last lines, in one answer
TEXT: Final = b"content-type: text/plain; charset=utf-8\r\n"
PASSED_ON = (
    "The relay passes on inference calls, /health, /v1/models and /metrics of engines, and takes `ensure` and "
    "GET /models/PROFILE/logs?lines=N."
)


Kind = Literal["call", "look", "ensure", "log"]

_ENGINES: Final = ENGINES_PATH.encode()
_MODELS: Final = b"/models/"
MOST_LINES: Final = 2000  # of a log, in one answer
_LINES: Final = re.compile(rb"lines=([1-9][0-9]{0,3})")
CALLS: Final = frozenset(path for path, route in ROUTES.items() if not route.here)
LOOKS: Final = frozenset({b"/health", b"/v1/models", b"/metrics"})


class RelayTarget(msgspec.Struct, frozen=True):
    """Target of a request for a profile. `call`: inference; `look`: a query that a sleeping engine answers too;
    `ensure`: the order, and `log`: the last `lines` lines of an engine, both for the sidecar itself. `path`: path at
    the engine; empty for these two."""

    kind: Kind
    profile: str
    path: bytes = b""
    lines: int = 0


class RelayedEngine(msgspec.Struct, frozen=True):
    """An engine of this machine: its own address, and whether it may be sent calls."""

    url: str
    awake: bool


def certificate_of(settings: RelaySettings, folder: Path) -> Certificate | None:
    """Certificate that the relay of a file in `folder` shows; None: it speaks plain HTTP."""
    if settings.certificate_file is None:
        return None
    return Certificate(folder / settings.certificate_file, folder / settings.key_file if settings.key_file else None)


class Relay:
    """`tokens`: order tokens. `engine` finds the engine of a profile, None where there is none. `ensure` has a model
    made ready and reports it, `log` gives the last lines of its engine; None where there is no such profile. `leaving`:
    no order is taken any more. `say` takes a line for the operator."""

    def __init__(
        self,
        tokens: AcceptedTokens,
        *,
        engine: Callable[[str], RelayedEngine | None],
        ensure: Callable[[str], ModelReport | None],
        log: Callable[[str, int], list[str] | None],
        leaving: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        self._tokens = tokens
        self._engine = engine
        self._ensure = ensure
        self._log = log
        self._leaving = leaving
        self._say = say
        self._certificate: WatchedFile | None = None
        self._clients: dict[str, Client] = {}  # by profile
        self._tasks: set[asyncio.Task[Exchanged]] = set()
        self._outcomes: dict[RelayOutcome, int] = dict.fromkeys(get_args(RelayOutcome), 0)
        self._server = Server(self, _settings(), BodyMemory(BODIES, 1.0))

    async def start(self, settings: RelaySettings, folder: Path) -> RelaySettings:
        """Listen; the settings with the port that was bound. `folder`: of the sidecar's file. A certificate that
        changes is used from then on. Raises OSError, and ValueError for a certificate that is none."""
        context = None
        if (certificate := certificate_of(settings, folder)) is not None:
            watched = WatchedFile(certificate.chain, certificate.context, self._say, name="relay's certificate")
            context = watched.first()
            watched.start(self._server.go_by)
            self._certificate = watched
        listen = settings.listen
        await self._server.listen(str(listen), ssl=context)
        bound = Address(listen.host, int(self._server.addresses[0].rpartition(":")[2]))
        return msgspec.structs.replace(settings, listen=bound)

    async def aclose(self, within: float = 0.0) -> None:
        """Take no more calls, and end once those under way have, in `within` seconds at most."""
        if self._certificate is not None:
            await self._certificate.aclose()
        await self._server.drain(within)
        await cancel(*self._tasks)
        for client in self._clients.values():
            client.close()

    @property
    def use(self) -> RelayUse:
        """Current use of the relay."""
        return RelayUse(self._server.connections, dict(self._outcomes))

    # -- the server's side ------------------------------------------------------------------------------------------

    def head(self, request: Request) -> bytes | None:
        """Judge a request before its body is read."""
        refused = self._judged(request)
        self._outcomes["refused"] += refused is not None
        return refused

    def _judged(self, request: Request) -> bytes | None:
        shown = request.fields.get(b"authorization")
        if shown is None or not shows({b"authorization": (shown,)}, self._tokens):
            body = _error(401, "invalid_api_key", "The relay wants the order token: Authorization: Bearer TOKEN.")
            return answer(401, JSON + b"www-authenticate: Bearer\r\n", body, close=True)
        request.known = True
        target = target_of(request.method, request.path, request.query)
        if target is None:
            return answer(404, JSON, _error(404, "not_found", PASSED_ON))
        request.limit = BODY if target.kind == "call" else 0
        if target.kind in ("ensure", "log"):
            return None
        refused = _refusal(target, self._engine(target.profile))
        return None if refused is None else answer(503, JSON, refused)

    def body_by(self, _: Request) -> float:
        """A body is of use for as long as the time-outs of bodies let it come."""
        return math.inf

    def call(self, request: Request, responder: Responder) -> None:
        """Answer a complete request: now, or by a task that ends with its client."""
        target = target_of(request.method, request.path, request.query)
        assert target is not None  # noqa: S101 # head() has refused the others
        if target.kind == "ensure":
            self._outcomes["ordered"] += 1
            responder.send(*self._ordered(target.profile))
            return
        if target.kind == "log":
            self._outcomes["answered"] += 1
            responder.send(*self._read(target.profile, target.lines))
            return
        engine = self._engine(target.profile)
        refused = _refusal(target, engine)  # again: it may have gone while the body came
        if engine is None or refused is not None:
            self._outcomes["refused"] += 1
            request.release()
            responder.send(503, JSON, refused or b"")
        else:
            client = self._client(target.profile, engine.url)
            task = asyncio.get_running_loop().create_task(exchange(request, responder, client, target.path))
            self._tasks.add(task)

            # By a callback: a task that is cancelled before it begins runs no `finally`.
            def ended(task: asyncio.Task[Exchanged]) -> None:
                self._tasks.discard(task)
                over = "left" if task.cancelled() else "broken" if task.exception() else task.result()
                self._outcomes[over] += 1
                request.release()
                responder.abort()  # unless it is answered

            def left(_: str) -> None:
                task.cancel()

            task.add_done_callback(ended)
            task.add_done_callback(telling("a relayed call stopped"))
            responder.watch(left)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _client(self, profile: str, url: str) -> Client:
        """Connections to the engine that the profile has now."""
        client = self._clients.get(profile)
        if client is None or client.origin.url != url:
            if client is not None:
                client.close()
            client = self._clients[profile] = Client(parse_origin(url), ClientSettings(stall_timeout=STALL))
        return client

    def _ordered(self, profile: str) -> tuple[int, bytes, bytes]:
        """Status, header lines and body of the answer to `ensure`."""
        if self._leaving():
            return 503, JSON, _error(503, "ending", "The sidecar is ending and takes no orders.")
        model = self._ensure(profile)
        if model is None:
            return 404, JSON, _error(404, "profile_not_found", "There is no such profile.")
        return 200, JSON, encode(Ensured(model=model))

    def _read(self, profile: str, lines: int) -> tuple[int, bytes, bytes]:
        """Status, header lines and body of a log's last lines: at most LOG bytes, from the beginning of a line."""
        found = self._log(profile, lines)
        if found is None:
            return 404, JSON, _error(404, "profile_not_found", "There is no such profile.")
        text = "".join([f"{line}\n" for line in found]).encode(errors="replace")
        if len(text) > LOG:
            text = text[-LOG:].partition(b"\n")[2]
        return 200, TEXT, text


def _refusal(target: RelayTarget, engine: RelayedEngine | None) -> bytes | None:
    """The body of a 503 for an engine that cannot be asked this now; None: it can."""
    if engine is None:
        return _error(503, "no_engine", "This profile has no engine now.")
    if target.kind == "call" and not engine.awake:
        return _error(503, "not_awake", "The engine of this profile does not run now: `ensure` wakes it.")
    return None


def _error(status: int, code: str, message: str) -> bytes:
    return error_body(message, "server_error" if status >= 500 else "invalid_request_error", code)


def _settings() -> ServerSettings:
    """Bounds of the port. The soft limit of open files becomes the hard one, as in a gateway: a call takes two."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = max(16, min(CONNECTIONS, (hard - FILES) // 2))
    return with_token(ServerSettings(max_connections=most, max_body=BODY))


def target_of(method: bytes, path: bytes, query: bytes) -> RelayTarget | None:
    """The target of a request; None: the relay has no such."""
    folder = next((folder for folder in (_ENGINES, _MODELS) if path.startswith(folder)), None)
    if folder is None:
        return None
    name, slash, rest = path[len(folder) :].partition(b"/")
    profile, asked = name.decode("latin-1"), slash + rest
    if folder is _ENGINES:
        if method == b"POST" and asked in CALLS and not query:
            return RelayTarget("call", profile, asked)
        return RelayTarget("look", profile, asked) if method == b"GET" and asked in LOOKS and not query else None
    if method == b"POST" and asked == b"/ensure" and not query:
        return RelayTarget("ensure", profile)
    lines = _LINES.fullmatch(query) if method == b"GET" and asked == b"/logs" else None
    return RelayTarget("log", profile, lines=int(lines[1])) if lines and int(lines[1]) <= MOST_LINES else None


# -- one exchange -----------------------------------------------------------------------------------------------------

# Bytes go on from the engine connection's own read callback, in whole chunks with their framing. Backpressure runs
# the other way: a gateway that does not read pauses the engine. A caller that leaves cancels the task, which closes
# the engine's connection, so vLLM aborts the request. An engine that fails in the middle breaks the caller's
# connection, so that a truncated answer never looks whole. The relay does not retry, because the gateway chooses
# among engines.
ASKED: Final = (b"content-type", b"x-request-id", b"traceparent", b"tracestate")  # passed on to the engine
ANSWERED: Final = (b"content-type", b"retry-after")  # passed on to the gateway


Exchanged = Literal["answered", "failed", "broken"]


async def exchange(request: Request, responder: Responder, client: Client, path: bytes) -> Exchanged:
    """Relay one request; `path`: of the engine. `failed`: it gave no answer; `broken`: it failed in the middle of one.
    Cancellation closes the engine's connection."""
    lines = _header_lines(request.fields, ASKED)
    try:
        reply = await client.send(request.method, path, lines, request.body, timeout=PATIENCE)
    except EngineError as error:
        responder.send(502, JSON, error_body(f"The engine has failed: {error}.", "server_error", "engine_failed"))
        return "failed"
    with closing(reply):
        request.release()
        return await _pass_on(reply, responder)


async def _pass_on(reply: Reply, responder: Responder) -> Exchanged:
    head = _header_lines(reply.headers, ANSWERED)
    over: asyncio.Future[EngineError | None] = asyncio.get_running_loop().create_future()

    def done(error: EngineError | None) -> None:
        if not over.done():
            over.set_result(error)

    if reply.complete:  # the common short answer: one write
        parts: list[bytes] = []
        reply.relay(parts.append, done)
        responder.send(reply.status, head, b"".join(parts))
        return "answered"
    responder.start(reply.status, head, reply.length)
    responder.flow(reply.pause, reply.resume)
    reply.relay(responder.write, done, responder.write_chunk)
    if await over is not None:
        responder.abort()
        return "broken"
    responder.end()
    return "answered"


def _header_lines(fields: dict[bytes, bytes], names: tuple[bytes, ...]) -> bytes:
    return b"".join(b"%b: %b\r\n" % (name, fields[name]) for name in names if name in fields)
