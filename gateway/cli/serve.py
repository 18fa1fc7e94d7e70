"""`gateway serve`: flags to the options of a gateway. Every mistake is found before anything starts."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from gateway.cli import PROFILES
from gateway.cli.files import TOKEN_VARIABLE, admin_tokens, checked
from gateway.cli.init import shipped
from gateway.core.engines.origin import engine_id
from gateway.core.policy.advice import in_the_clear
from gateway.core.policy.policy import EngineEntry, Policy
from gateway.decider.file_modes import unwise_of
from gateway.serve.embedded import MOST, EmbeddedFleet, parse_embedded
from gateway.serve.run import NO_ENGINE, run
from gateway.serve.starting import Options, Running, StartError, announcement
from gateway.shared.addresses import is_loopback, split_address
from gateway.shared.certificate import Certificate
from gateway.shared.command_line import Mistake, argument
from gateway.shared.fields import made_of
from gateway.shared.files.checked import spelled
from gateway.shared.files.modes import unwise
from gateway.shared.lines import LineWriter
from gateway.shared.notice import Notice
from gateway.shared.operator_log import as_text, plain
from gateway.shared.printable import printable
from gateway.shared.tokens import Tokens
from gateway.upstream.client import parse_origin

MISTAKES = (StartError,)
MOST_WORKERS = 64
TRACES = "/v1/traces"  # OTLP's path, where the address has none of its own
DEMO = "demo"  # --engine demo: a sidecar of our own

DESCRIPTION = "Run the gateway until SIGTERM or Ctrl-C."
EXAMPLES = """\
The policy says how calls are treated: classes, budgets, routing, retries, time-outs, engines; flags only where to
listen and what to read. `gateway init` writes one to begin with, `gateway init default --out -` prints every field
with its default, explained; `gateway check` finds mistakes.

examples:
  gateway serve --engine sim:4:a100-8b                           four simulated engines with the profile a100-8b
  gateway serve --policy policy.yaml --sidecar sidecar.yaml      models that take turns on this machine's GPUs
  gateway serve --policy policy.yaml --listen 0.0.0.0:8000       reachable from other machines
  gateway serve --policy policy.yaml --listen unix:/run/weir.sock --log /var/log/weir.jsonl
  WEIR_ADMIN_TOKEN=... gateway serve --policy policy.yaml --control 0.0.0.0:8001

SIGTERM or Ctrl-C drains: answers in flight finish, within timeouts.drain; a second one ends it at once.
SIGUSR2 starts this command line again, with --take-over: an upgrade that no client notices.
Sockets of a systemd socket unit are taken in place of --listen; one with FileDescriptorName=control, of --control."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        type=argument(_file),
        metavar="FILE",
        help="the policy, YAML; left out: the defaults, and with --engine demo those of `gateway init demo`",
    )
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        type=argument(_engine),
        metavar="URL|sim[:N[:PROFILE]]|demo",
        help="an engine, beside the policy's: http://, https:// or unix:///PATH, or N simulated ones, PROFILE "
        "a name or a file of `gateway calibrate`; demo: a sidecar with four models on simulated GPUs; repeatable",
    )
    parser.add_argument(
        "--sidecar",
        type=argument(_file),
        metavar="FILE",
        help="run the sidecar of this file too: models that take turns on this machine's GPUs, in one command; it ends "
        "with the gateway, its engines too",
    )
    _add_processes(parser)
    _add_secrets_and_logs(parser)


def _add_processes(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say where and in how many processes the gateway serves."""
    parser.add_argument(
        "--listen",
        default="127.0.0.1:8000",
        type=argument(_listen),
        metavar="HOST:PORT|unix:PATH",
        help="where clients connect; port 0: any free one (default: %(default)s)",
    )
    parser.add_argument(
        "--control",
        default="127.0.0.1:8001",
        type=argument(_control),
        metavar="HOST:PORT",
        help="where operators connect: /readyz /metrics /fleet (default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        default=1,
        type=argument(_workers),
        metavar="N|auto",
        help="processes that carry bytes: 1 (default) is one process for all; from 2 on one more decides for them; "
        "auto: one for each core but one, of those that a container's quota leaves",
    )
    parser.add_argument(
        "--take-over",
        nargs="?",
        const="",
        metavar="SOCKET",
        help="serve in place of the gateway that runs with this --control, on its sockets: it finishes what it has and "
        "ends, and no connection is refused; SOCKET: where it is found otherwise",
    )
    parser.add_argument(
        "--advertise",
        type=argument(_control),
        metavar="HOST:PORT",
        help="where other members of the policy's cluster reach this one, in place of cluster.advertise",
    )
    parser.add_argument(
        "--epp",
        type=argument(_control),
        metavar="HOST:PORT",
        help="where Envoy asks to which engine a request goes: the endpoint picker of the Gateway API Inference "
        "Extension (docs/epp.md), with TLS where --tls-cert is given; needs the extra epp; left out: nowhere",
    )


def _add_secrets_and_logs(parser: argparse.ArgumentParser) -> None:
    """Add the flags for certificates, tokens, logs, metrics and traces."""
    for flag, does in (
        ("--tls-cert", "serve HTTPS with this PEM certificate chain"),
        ("--tls-key", "its private key, if not in the same file"),
        ("--tls-client-ca", "clients must show a certificate that one of these has signed"),
        ("--control-tls-cert", "the control port is HTTPS, with this PEM certificate chain"),
        ("--control-tls-key", "its private key, if not in the same file"),
    ):
        parser.add_argument(flag, type=argument(_file), metavar="FILE", help=does)
    parser.add_argument(
        "--admin-token-file",
        metavar="FILE",
        help=f"the control port's token, else ${TOKEN_VARIABLE}; needed where --control is not a loopback address",
    )
    parser.add_argument(
        "--log", default="-", metavar="FILE|-|none", help="one line per call; -: standard error (default)"
    )
    parser.add_argument(
        "--log-format",
        choices=("json", "text"),
        help="of those lines, and of all others on standard error: json for programs, text for people (default: text "
        "where standard error is a terminal, else json)",
    )
    parser.add_argument(
        "--otlp-traces-endpoint",
        dest="traces",
        type=argument(_endpoint),
        metavar="URL",
        help="send spans of sampled calls to this OpenTelemetry collector, by OTLP over HTTP, such as "
        "http://127.0.0.1:4318; logging.traces in the policy is the share; needs the extra otel",
    )


def command(given: argparse.Namespace) -> int:
    """Run the gateway until a signal ends it. Raises Mistake, StartError."""
    engines = tuple(engine for engine in given.engine if isinstance(engine, EngineEntry))
    embedded = tuple(engine for engine in given.engine if isinstance(engine, EmbeddedFleet))
    demo = DEMO in given.engine
    default_policy = checked(shipped(DEMO)) if demo else Policy()
    policy = checked(given.policy) if given.policy else default_policy
    fleet = policy.fleet
    of_policy = fleet.engines or fleet.sidecars or fleet.inference_pool
    if not (of_policy or engines or embedded or demo or given.sidecar):
        raise Mistake(NO_ENGINE)
    _check_together(given, policy, own_engines=bool(embedded or demo or given.sidecar))
    twice = [id for id, times in Counter(engine_id(engine.url) for engine in engines).items() if times > 1]
    if twice:
        raise Mistake(f"--engine: {twice[0]} is there twice")
    tokens, file = _admin_tokens(given), Path(given.admin_token_file or "")
    certificate = Certificate(given.tls_cert, given.tls_key, given.tls_client_ca) if given.tls_cert else None
    of_control = Certificate(given.control_tls_cert, given.control_tls_key) if given.control_tls_cert else None
    say = plain(text=as_text(given.log_format))
    for line in _warnings(given, policy, certificate, of_control):
        say(Notice(line, "configuration", "warning"))
    return run(
        made_of(
            Options,
            given,
            announce=_announce,
            default_policy=default_policy,
            engines=engines,
            embedded=embedded,
            demo=demo,
            certificate=certificate,
            control_certificate=of_control,
            admin_tokens=tokens,
            admin_token_file=file if file.is_file() else None,
            relays=given.workers if given.workers > 1 else 0,
        )
    )


def _admin_tokens(given: argparse.Namespace) -> Tokens:
    """The control port's tokens; empty: only this machine reaches the port. Raises Mistake."""
    tokens = admin_tokens(given.admin_token_file, "--admin-token-file")
    if not tokens and not is_loopback(split_address(given.control)[0]):
        raise Mistake(
            f"--control {given.control} can be reached from other machines: "
            f"give --admin-token-file FILE or set {TOKEN_VARIABLE}"
        )
    return tokens


def _check_together(given: argparse.Namespace, policy: Policy, *, own_engines: bool) -> None:
    """Check flags that need or exclude another. `own_engines`: engines or a sidecar end with this gateway. Raises
    Mistake."""
    if given.sidecar and DEMO in given.engine:
        raise Mistake(f"--sidecar {given.sidecar}: --engine demo has a sidecar of its own")
    if given.sidecar and not given.sidecar.is_file():
        raise Mistake(f"--sidecar {given.sidecar}: there is no such file; `sidecar init` writes one")
    if not given.tls_cert and (given.tls_key or given.tls_client_ca):
        raise Mistake(f"{'--tls-key' if given.tls_key else '--tls-client-ca'}: there is no --tls-cert for it")
    if given.control_tls_key and not given.control_tls_cert:
        raise Mistake("--control-tls-key: there is no --control-tls-cert for it")
    if given.workers > 1 and given.sidecar:
        raise Mistake(
            f"--workers {given.workers}: a sidecar of a gateway's own is for one process: start it by itself, or leave "
            "--workers out"
        )
    if given.take_over is not None and given.epp:
        raise Mistake("--take-over: an endpoint picker cannot be handed over: restart the gateway, or leave --epp out")
    if given.take_over is not None and own_engines:
        raise Mistake(
            "--take-over: engines and sidecars of a gateway's own end with it: start them by themselves, and name them "
            "in the policy"
        )
    if given.advertise and policy.cluster is None:
        raise Mistake(f"--advertise {given.advertise}: the policy has no cluster")


def _warnings(
    given: argparse.Namespace, policy: Policy, certificate: Certificate | None, of_control: Certificate | None
) -> Iterator[str]:
    """Yield a line for each file with secrets that others may read or change, for keys that are not there yet, and for
    keys and tokens that would cross a network readable."""
    fields = [*(unwise_of(policy, given.policy.parent) if given.policy else []), *in_the_clear(policy)]
    yield from [f"{given.policy}: {spelled(field)}: {text}" for field, text in fields]
    keys = None if policy.keys_file is None else given.policy.parent / policy.keys_file
    if keys is not None and not keys.exists():
        yield f"keys_file: {keys} does not exist: its callers get 401 until `gateway key add` makes it"
    flags = [("--admin-token-file", Path(given.admin_token_file))] if given.admin_token_file else []
    flags += [("--tls-key" if given.tls_key else "--tls-cert", certificate.private)] if certificate else []
    if of_control is not None:
        flags.append(("--control-tls-key" if given.control_tls_key else "--control-tls-cert", of_control.private))
    yield from [f"{flag}: {text}" for flag, file in flags if (text := unwise(file)) is not None]
    if not (given.control_tls_cert or is_loopback(split_address(given.control)[0])):
        yield f"--control {given.control}: tokens cross the network to it in the clear: --control-tls-cert hides them"
    if given.epp and not is_loopback(split_address(given.epp)[0]) and not given.tls_client_ca:
        yield (
            f"--epp {given.epp}: whoever reaches it can ask for engines, and engines' keys are not told there: "
            "--tls-client-ca lets proxies with a certificate in, and tells them the keys"
        )


def _announce(running: Running) -> None:
    file = running.sidecar
    watch = "" if file is None else shlex.join([*_sidecar(), "status", "--watch", "--config", str(file)])
    text = announcement(running, watch)
    # Whoever reads it may have read enough, as `| head -1`, or not read at all: calls are served all the same.
    LineWriter(1).write(f"{printable(text)}\n".encode(), hurry=True)


def _sidecar() -> list[str]:
    """The command `sidecar` of this installation, as short as it can be written here."""
    script = Path(sys.executable).with_name("sidecar")
    if not script.exists():
        return [sys.executable, "-m", "sidecar.cli"]
    return [str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script)]


# -- arguments --------------------------------------------------------------------------------------------------------


def _file(text: str) -> Path:
    if not text:
        raise ValueError("expected a file, found nothing")
    return Path(text)


def _engine(text: str) -> EngineEntry | EmbeddedFleet | str:
    if text == DEMO:
        return DEMO
    embedded = parse_embedded(text)
    if embedded is not None:
        import_module(PROFILES).profile_of(embedded.profile)
        return embedded
    if text.startswith("sim") and "://" not in text:
        raise ValueError(f"{text!r} is not sim, sim:N (1 to {MOST} engines) or sim:N:PROFILE")
    parse_origin(text)
    return EngineEntry(url=text)


def _workers(text: str) -> int:
    if text == "auto":
        return max(1, min(MOST_WORKERS, cores() - 1))
    workers = int(text) if text.isdecimal() else 0
    if not 1 <= workers <= MOST_WORKERS:
        raise ValueError(f"{text!r} is neither auto nor a number from 1 to {MOST_WORKERS}")
    return workers


def _listen(text: str) -> str:
    if not text.startswith("unix:"):
        split_address(text)
    elif not text.removeprefix("unix:"):
        raise ValueError("unix: needs a path")
    return text


def _endpoint(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username is not None:
        raise ValueError(f"{printable(text)!r} is not http://HOST:PORT or https://HOST:PORT")
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.exporter") is None:
        raise ValueError("OpenTelemetry is not installed: pip install 'WEIR.whl[otel]'")
    return parts._replace(path=TRACES).geturl() if parts.path in {"", "/"} else text


def _control(text: str) -> str:
    split_address(text)
    return text


# The quota is that of cgroup v2: `cpu.max`, microseconds of CPU in each period. In a container it lies at the root of
# what is mounted; on the machine itself there is none. Source: Linux, Documentation/admin-guide/cgroup-v2.rst.
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def cores(quota: Path = _QUOTA) -> int:
    """Whole cores, at least one; a quota of 2.5 cores counts as two."""
    usable = len(os.sched_getaffinity(0))
    try:
        allowed, period = quota.read_text().split()
        return max(1, min(usable, int(allowed) // int(period)))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return usable
