"""Parts of starting a gateway that each of its processes needs: options, signals, the call log, the certificate,
open files, and the message at the terminal once it serves."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import secrets
import shlex
import signal
import ssl
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from gateway.core.policy.policy import EngineEntry, Policy
from gateway.decider.call_log import CallLog
from gateway.serve.embedded import EmbeddedFleet
from gateway.shared.addresses import reachable
from gateway.shared.certificate import Certificate, Contents
from gateway.shared.files.token_file import tokens_of
from gateway.shared.lines import LineWriter, open_to_append, say
from gateway.shared.operator_log import as_text
from gateway.shared.tokens import AcceptedTokens, Tokens
from gateway.shared.watched_file import WatchedFile

if TYPE_CHECKING:
    from gateway.relay.issuer import Issuer
    from gateway.serve.otlp import SpanExport
    from gateway.serve.processes.last_good import LastGood

T = TypeVar("T")
NO_OTEL = "--otlp-traces-endpoint: OpenTelemetry is not installed: pip install 'WEIR.whl[otel]'"


class Running(msgspec.Struct, frozen=True):
    """Addresses of a running gateway, for a person or a test to read."""

    data: list[str]  # addresses of the data port: URLs, or `unix:PATH`
    control: str
    engines: list[str]
    models: list[str]
    sidecar: Path | None = None  # the file of one of our own
    in_turn: tuple[str, ...] = ()  # the demo's models, in the order in which they are worth being asked for
    keyed: bool = False  # callers show a key


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the command line. `log`: a file, `-` for standard error, `none`."""

    announce: Callable[[Running], None]  # called once everything listens
    policy: Path | None = None
    default_policy: Policy = Policy()  # where there is no policy file
    engines: tuple[EngineEntry, ...] = ()
    embedded: tuple[EmbeddedFleet, ...] = ()
    demo: bool = False  # a sidecar of our own, with simulated GPUs
    sidecar: Path | None = None  # the file of one of our own, with this machine's
    listen: str = "127.0.0.1:8000"
    control: str = "127.0.0.1:8001"
    certificate: Certificate | None = None  # of the data port; None: plain HTTP
    control_certificate: Certificate | None = None  # of the control port; None: plain HTTP
    admin_tokens: Tokens = ()  # of the control port, where no file has them
    admin_token_file: Path | None = None  # None: there is none, or a pipe
    log: str = "-"
    log_format: str | None = None  # json, text; None: text on a terminal, else json
    epp: str | None = None  # where Envoy asks for endpoints; None: nowhere
    take_over: str | None = None  # the meeting point of the gateway that runs; empty: that of `control`
    traces: str | None = None  # where spans are posted; None: no call is traced
    advertise: str | None = None  # in place of the policy's cluster.advertise
    relays: int = 0  # processes that carry bytes, beside one that decides; 0: one process does it all


OTHER_CLUSTER = "cluster: it takes effect at a start: restart this gateway, or leave it as it was"


class ApplyError(Exception):
    """A policy that is well-formed and cannot be used here; the message says why."""


class StartError(Exception):
    """The gateway cannot start; the message says what to change."""


def lost_lines(errors: LineWriter, log: CallLog | None) -> int:
    return errors.lost + (log.lines.lost if log is not None and log.lines is not errors else 0)


class ProcessSignals:
    """SIGTERM and SIGINT as two events: the first asks for a drain, the second ends it. SIGHUP asks for a reload.
    `child`: a parent alone hears the two, and tells this process to `end`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, child: bool) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self._loop = loop
        self._heard = (signal.SIGHUP,) if child else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
        if not child:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.end)
            self.on_upgrade(lambda: None)  # else it would end the process, before there is a way to do it
        self.on_hangup(lambda: None)  # without a policy file there is nothing to reload, and no reason to end either

    def on_hangup(self, ask: Callable[[], None]) -> None:
        self._loop.add_signal_handler(signal.SIGHUP, ask)

    def end(self) -> None:
        """Take note that the process is to end, or to end sooner."""
        (self.second if self.first.is_set() else self.first).set()

    async def hurried(self, within: float) -> None:
        """Wait for the second signal, for `within` seconds at most."""
        try:
            await asyncio.wait_for(self.second.wait(), within)
        except TimeoutError:
            return

    def on_upgrade(self, start: Callable[[], None]) -> None:
        """SIGUSR2 has another gateway started, which takes over."""
        self._loop.add_signal_handler(signal.SIGUSR2, start)

    def close(self) -> None:
        for number in self._heard:
            self._loop.remove_signal_handler(number)


def call_log(
    options: Options, errors: LineWriter, say: Callable[[str], None] = say, *, later: bool = False
) -> CallLog | None:
    """Open the log of calls; None: none is wanted. `later`: of a process that is started again. It serves, and its
    lines are lost until the log can be opened. Raises StartError."""
    if options.log == "none":
        return None
    try:
        if options.log == "-":
            return CallLog(errors, text=as_text(options.log_format))
        path, text = Path(options.log), options.log_format == "text"
        return CallLog(LineWriter.at(path, say, text=text), text=text)
    except OSError as error:
        if later:
            nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # takes no line, until the path can be opened
            return CallLog(LineWriter(nothing, path, say, text=text), text=text)
        raise StartError(f"--log {options.log}: {error.strerror or error}") from error


def span_export(endpoint: str | None, stack: AsyncExitStack) -> SpanExport | None:
    """The export of spans to `endpoint` until the stack ends. Raises StartError where OpenTelemetry is missing."""
    if endpoint is None:
        return None
    try:
        from gateway.serve.otlp import SpanExport  # noqa: PLC0415 # OpenTelemetry is an extra
    except ModuleNotFoundError as error:
        raise StartError(NO_OTEL) from error
    export = SpanExport(endpoint, say)
    stack.callback(export.close)
    return export


def certificate_of(
    flag: str,
    certificate: Certificate | None,
    stack: AsyncExitStack,
    apply: Callable[[ssl.SSLContext], None] | None = None,
    last: LastGood[Contents] | None = None,
) -> tuple[WatchedFile | None, ssl.SSLContext | None]:
    """The certificate's files, watched until the stack ends, and the context of what they hold. `apply` takes a newer
    one; None: the first context is renewed. `last`: what a process of before has had of them, which counts where they
    are faulty. Raises StartError, which names the flags that begin with `flag`."""
    if certificate is None:
        return None, None
    watched = WatchedFile(certificate.chain, certificate.loaded, say, name=flag.strip("-"))
    before = None if last is None else last.load()
    try:
        context, contents = _first(flag, certificate, watched.first)
    except StartError:
        if before is None:
            raise
        context, contents = certificate.context_of(before), before
        watched.refuse()  # so that the fault is told
    renew = apply or partial(certificate.renew, context)

    def applied(loaded: tuple[ssl.SSLContext, Contents]) -> None:
        renew(loaded[0])
        if last is not None:
            last.save(loaded[1])

    if last is not None:
        last.save(contents)
    watched.start(applied)
    stack.push_async_callback(watched.aclose)
    return watched, context


def admin_tokens_of(options: Options, stack: AsyncExitStack) -> tuple[WatchedFile | None, AcceptedTokens]:
    """The file of the control port's tokens, watched until the stack ends, and those that the port accepts. A file that
    cannot be used at the start of a later process lets nobody in, as it may have been changed to keep somebody out."""
    file, accepted = options.admin_token_file, AcceptedTokens(options.admin_tokens)
    if file is None:
        return None, accepted
    watched = WatchedFile(file, partial(tokens_of, file), say, name="admin-token")
    try:
        accepted.renew(watched.first())
    except (OSError, ValueError) as error:
        accepted.renew([secrets.token_hex()])
        say(f"--admin-token-file: the control port lets nobody in until this is mended: {error}")
    watched.start(accepted.renew)
    stack.push_async_callback(watched.aclose)
    return watched, accepted


def certificate_now(flag: str, certificate: Certificate | None) -> None:
    """Look whether the certificate can be used. Raises StartError, as `certificate_of` does."""
    if certificate is not None:
        _first(flag, certificate, WatchedFile(certificate.chain, certificate.context, say).first)


def _first(flag: str, certificate: Certificate, loaded: Callable[[], T]) -> T:
    flags = f"{flag}cert, {flag}key" + (f", {flag}client-ca" if certificate.client_ca else "")
    try:
        return loaded()
    except OSError as error:
        raise StartError(f"{flags}: {error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise StartError(f"{flags}: {error}") from error


def issuer_of(policy: Policy, jwks: bytes, before: Issuer | None, say: Callable[[str], None]) -> Issuer | None:
    """Return the policy's issuer; None: it has none. `jwks`: the content of `auth.jwks`. Raises ValueError for a
    file without keys, ModuleNotFoundError without PyJWT."""
    if policy.auth is None:
        return None
    if before is not None and (before.auth, before.jwks) == (policy.auth, jwks):
        return before
    from gateway.relay.issuer import Issuer  # noqa: PLC0415 # PyJWT is an extra

    return Issuer(policy.auth, jwks, say, before=before)


def freeze() -> None:
    """Exempt what lives as long as the process from garbage collection, which is rarer and shorter then."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def try_relays(options: Options) -> None:
    """Find what would keep a relay from its start, before another gateway stops for it. Raises StartError."""
    if options.log not in {"-", "none"}:
        try:
            os.close(open_to_append(Path(options.log)))
        except OSError as error:
            raise StartError(f"--log {options.log}: {error.strerror}") from error
    certificate_now("--tls-", options.certificate)


def announcement(running: Running, watch: str = "") -> str:
    """The text, without a last newline. `watch`: the command that shows what a sidecar of this process does."""
    data, control, models, keyed = running.data, running.control, running.models, running.keyed
    lines = [*(f"data port {address}" for address in data), f"control port {control}"]
    lines += [f"engines {' '.join(running.engines)}"] if running.engines else []
    waits = f"no engine has answered yet: {control}/readyz tells when one has"
    lines += [f"models {' '.join(models)}" if running.in_turn or models else waits, f"console {control}/"]
    if running.in_turn:
        return "\n".join([*lines, "", *_demo(data[0], running.in_turn, watch, keyed)])
    if not models:
        return "\n".join(lines)
    lines += [*([f"sidecar: {watch}"] if watch else []), "", *_curl(data[0], models[0], keyed)]
    if not data[0].startswith("unix:"):
        lines += ["", *_python(data[0], models[0], keyed)]
    return "\n".join(lines)


def _demo(address: str, models: Sequence[str], watch: str, keyed: bool) -> list[str]:
    return [
        "None is awake yet. A sidecar starts each when it is called, in about 10 seconds, on two simulated GPUs of",
        "24 GB. They do not all fit: call them in turn, and the least recently used one goes to sleep to make room.",
        "Calling that one again wakes it in a second or two. This shows it, in another terminal:",
        "",
        watch,
        "",
        *(line for model in (*models, models[0]) for line in _curl(address, model, keyed)),
    ]


def _curl(given: str, model: str, keyed: bool) -> list[str]:
    address, path = reachable(given), given.removeprefix("unix:")
    where = address if path == given else f"--unix-socket {shlex.quote(path)} http://localhost"
    key = ' -H "authorization: Bearer $KEY"' if keyed else ""
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "Say hello."}]}
    return [
        f"curl -N {where}/v1/chat/completions -H 'content-type: application/json'{key} \\",
        f"  -d {shlex.quote(json.dumps(body))}",
    ]


def _python(address: str, model: str, keyed: bool) -> list[str]:
    key = 'os.environ["KEY"]' if keyed else '"none"'
    return [
        *(["import os"] if keyed else []),
        "from openai import OpenAI  # pip install openai",
        f'client = OpenAI(base_url="{reachable(address)}/v1", api_key={key})',
        'messages = [{"role": "user", "content": "Say hello."}]',
        f"answer = client.chat.completions.create(model={json.dumps(model)}, messages=messages)",
        "print(answer.choices[0].message.content)",
    ]


# -- open files -------------------------------------------------------------------------------------------------------

# Open files of the process, shared out. A call that runs needs a descriptor for its client and one for its engine:
# engines have half of what is left, up to `ENGINE_FILES`, which is more than most fleets run at once. Beyond their own
# share clients are refused in words, as over `server.max_connections`; a process without descriptors can only reset
# them, and reaches no engine either.
LEAST_FILES = 100  # files, of which clients have 12
OWN_FILES = 64  # the log, the policy and its keys, look-ups, engines' health checks
ENGINE_FILES = 4096  # connections
CONTROL_FILES = 1200  # connections of the control port, and an eighth of all at most


def shared_out(limit: int) -> tuple[int, int]:
    """Connections of clients and of the control port, in a process that may have `limit` files open."""
    control = max(1, min(CONTROL_FILES, limit // 8))
    rest = limit - OWN_FILES - control
    return max(1, rest - min(ENGINE_FILES, rest // 2)), control


def raised_files() -> int:
    """The hard limit of open files, which is then the soft one too: the usual 1,024 is there for users of select().
    Raises StartError for one that leaves no room to serve."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < LEAST_FILES:
        needed = f"expected {LEAST_FILES} at least: raise it, as with LimitNOFILE= or ulimit -Hn"
        raise StartError(f"open files: the hard limit is {hard}, {needed}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def files_warning(limit: int, wanted: int) -> str | None:
    """Return a line for the operator about a limit that leaves fewer clients than the policy's `wanted`."""
    clients, _ = shared_out(limit)
    if clients >= wanted:
        return None
    return (
        f"open files: the hard limit of {limit} leaves room for {clients} client connections, and the policy has "
        f"server.max_connections: {wanted}; raise it, as with LimitNOFILE= or ulimit -Hn, or lower that"
    )
