"""`gateway serve | init | check | key | top | bench | simulate | calibrate`: flags and files in. A mistake is one line
and exit status 2.

Everything a person can get wrong is found here, before anything starts: addresses, URLs, the policy file, tokens.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from gateway import __version__
from gateway.cli import checking, starter
from gateway.cli.checking import Mistake, checked, read
from gateway.cli.keys import KeysError, run_add, run_list, run_revoke
from gateway.core.engines.fleet import engine_id
from gateway.core.policy.policy import EngineEntry, Policy
from gateway.decider.file_modes import refused, unwise, unwise_of
from gateway.serve.announcement import announcement
from gateway.serve.certificate import Certificate
from gateway.serve.embedded import EmbeddedFleet, parse_embedded
from gateway.serve.run import NO_ENGINE, Options, Running, StartError, run
from gateway.shared.control.listener import is_loopback, split_address
from gateway.shared.files.checked import InvalidFile, spelled
from gateway.shared.files.units import SECONDS
from gateway.shared.lines import LineWriter
from gateway.shared.printable import printable
from gateway.top.command import EXAMPLES as TOP_EXAMPLES
from gateway.top.command import TopError, show
from gateway.upstream.client import parse_origin
from loadtest.bench import command as bench
from loadtest.calibrate import command as calibrate
from loadtest.engine.profile_file import profile_of
from loadtest.simulate import command as simulate

TOKEN_VARIABLE = "WEIR_ADMIN_TOKEN"  # noqa: S105 # the name of a variable, not what it holds
TOKEN_LENGTH = 16
DEMO = "demo"  # --engine demo: a sidecar of our own

DESCRIPTION = """\
Weir: a traffic gateway for self-hosted LLM engines.

It stands between OpenAI-compatible clients and a fleet of vLLM engines, holds every engine's KV cache at a set level,
and decides for each request whether, when, where and how large it runs."""

EXAMPLES = """\
examples:
  gateway serve --engine sim:2                                   try it: two simulated engines, no GPU needed
  gateway serve --engine demo                                    the same, with four models that take turns on two GPUs
  gateway serve --engine http://10.0.0.11:8000 --engine unix:///run/vllm/b.sock
  gateway init                                                   write policy.yaml, commented, to begin with
  gateway check policy.yaml                                      find every mistake in a policy before it is used
  gateway serve --policy policy.yaml
  gateway top                                                    watch it: classes, queues, engines, calls a second
  gateway bench --engines sim:4 --compare direct,round_robin     what it is worth, on simulated engines
  gateway simulate --policy next.yaml --trace last-week.csv --engines 4       what it would have done to last week
  gateway calibrate --target http://10.0.0.11:8000 --out mine.yaml            an engine of yours, to simulate with"""

SERVE_EXAMPLES = """\
The policy says how calls are treated: classes, budgets, routing, retries, time-outs, engines; flags only where to
listen and what to read. `gateway init` writes one to begin with, `gateway init default --out -` prints every field
with its default, explained; `gateway check` finds mistakes.

examples:
  gateway serve --engine sim:4:a100-8b                           four simulated engines with the profile a100-8b
  gateway serve --policy policy.yaml --sidecar sidecar.yaml      models that take turns on this machine's GPUs
  gateway serve --policy policy.yaml --listen 0.0.0.0:8000       reachable from other machines
  gateway serve --policy policy.yaml --listen unix:/run/weir.sock --log /var/log/weir.jsonl
  gateway serve --policy now.yaml --shadow next.yaml             try next.yaml on real traffic before it is enforced
  WEIR_ADMIN_TOKEN=... gateway serve --policy policy.yaml --control 0.0.0.0:8001

With --shadow the second policy decides too, with limits and modes of its own, on what the enforced one has met:
weir_shadow_decisions_total{decision,enforced,shadow} counts both, weir_shadow_differences_total where they differ.
Its file is reloaded as the policy's is; its engines, routing and sizes of bodies are not looked at.

SIGTERM or Ctrl-C drains: answers in flight finish, within timeouts.drain; a second one ends it at once."""

KEY_EXAMPLES = """\
A key is sent as `Authorization: Bearer KEY` or `x-api-key: KEY`. The policy names the file of their hashes
(`keys_file: keys.txt`, relative to the policy) and who there is (`tenants`). A key is shown once, when it is made.

examples:
  gateway key add acme --policy policy.yaml                      a new key of the tenant acme, on standard output
  gateway key list --policy policy.yaml                          what keys there are, by the beginning of their hashes
  gateway key revoke 3f2a91c07be4 --policy policy.yaml           the key whose hash begins with this
  gateway key revoke --policy policy.yaml                        the key that is typed or piped in: never an argument"""


class Parser(argparse.ArgumentParser):
    """argparse with one line for a mistake, where it has a paragraph."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0, or 2 for a mistake in a flag or a file."""
    options = _parser().parse_args(argv)
    try:
        return int(options.command(options))
    except (
        *(Mistake, StartError, KeysError, InvalidFile, TopError),
        *(bench.BenchError, simulate.SimulateError, calibrate.CalibrateError),
    ) as error:
        print("\n".join(f"gateway: {line}" for line in str(error).splitlines()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # of a command that has nothing left to end well
        return 130


def _parser() -> Parser:
    def parser(add: Callable[..., Parser], *name: str, epilog: str, description: str, **more: Any) -> Parser:
        return add(
            *name,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **more,
        )

    top = parser(Parser, prog="gateway", description=DESCRIPTION, epilog=EXAMPLES)
    top.add_argument("--version", action="version", version=f"weir {__version__}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    serve = parser(
        commands.add_parser,
        "serve",
        help="run the gateway",
        description="Run the gateway until SIGTERM or Ctrl-C.",
        epilog=SERVE_EXAMPLES,
    )
    serve.add_argument("--policy", metavar="FILE", help="the policy, YAML; left out: the defaults")
    serve.add_argument(
        "--shadow",
        metavar="FILE",
        help="a second policy that is asked about every call and never obeyed: /metrics counts where it differs",
    )
    serve.add_argument(
        "--engine",
        action="append",
        default=[],
        type=_argument(_engine),
        metavar="URL|sim[:N[:PROFILE]]|demo",
        help="an engine, beside the policy's: http://, https:// or unix:///PATH, or N simulated ones, PROFILE "
        "a name or a file of `gateway calibrate`; demo: a sidecar with four models on simulated GPUs; repeatable",
    )
    serve.add_argument(
        "--sidecar",
        metavar="FILE",
        help="run the sidecar of this file too: models that take turns on this machine's GPUs, in one command; it ends "
        "with the gateway, its engines too",
    )
    serve.add_argument(
        "--listen",
        default="127.0.0.1:8000",
        type=_argument(_listen),
        metavar="HOST:PORT|unix:PATH",
        help="where clients connect; port 0: any free one (default: %(default)s)",
    )
    serve.add_argument(
        "--control",
        default="127.0.0.1:8001",
        type=_argument(_control),
        metavar="HOST:PORT",
        help="where operators connect: /readyz /metrics /fleet (default: %(default)s)",
    )
    serve.add_argument("--tls-cert", metavar="FILE", help="serve HTTPS with this PEM certificate chain")
    serve.add_argument("--tls-key", metavar="FILE", help="its private key, if not in the same file")
    serve.add_argument(
        "--tls-client-ca", metavar="FILE", help="clients must show a certificate that one of these has signed"
    )
    serve.add_argument(
        "--admin-token-file",
        metavar="FILE",
        help=f"the control port's token, else ${TOKEN_VARIABLE}; needed where --control is not a loopback address",
    )
    serve.add_argument(
        "--log", default="-", metavar="FILE|-|none", help="one JSON line per call; -: standard error (default)"
    )
    serve.set_defaults(command=_serve)

    begin = parser(
        commands.add_parser,
        "init",
        help="write a commented policy to begin with",
        description="Write a commented policy to begin with.",
        epilog=starter.EXAMPLES,
    )
    starter.add_arguments(begin)
    begin.set_defaults(command=starter.command)

    check = parser(
        commands.add_parser,
        "check",
        help="find the mistakes in policy files, and in scenarios",
        description="Read policy files and report every mistake, and what is unwise. Or scenarios of a load test.",
        epilog=checking.EXAMPLES,
        usage=checking.USAGE,
    )
    checking.add_arguments(check)
    check.set_defaults(command=checking.command)

    key = parser(
        commands.add_parser,
        "key",
        help="make, list and revoke API keys",
        description="Make, list and revoke API keys.",
        epilog=KEY_EXAMPLES,
    )
    actions = key.add_subparsers(title="commands", required=True, metavar="add | list | revoke")

    def action(name: str, does: str, command: Callable[[argparse.Namespace], int]) -> Parser:
        added = parser(actions.add_parser, name, help=does, description=f"{does.capitalize()}.", epilog=KEY_EXAMPLES)
        added.add_argument("--policy", required=True, metavar="FILE", help="the policy that says whose keys, and where")
        added.set_defaults(command=command)
        return added

    add = action("add", "make a key and print it, once", lambda given: run_add(given.tenant, Path(given.policy)))
    add.add_argument("tenant", metavar="TENANT", help="whose key it is")
    action("list", "list the keys", lambda given: run_list(Path(given.policy)))
    revoke = action("revoke", "revoke a key", lambda given: run_revoke(given.hash, Path(given.policy)))
    revoke.add_argument("hash", nargs="?", metavar="HASH", help="how its hash begins; left out: read the key itself")

    live = parser(
        commands.add_parser,
        "top",
        help="watch a running gateway",
        description="Watch a running gateway.",
        epilog=TOP_EXAMPLES,
    )
    _add_top(live)
    live.set_defaults(command=_top)

    measure = parser(
        commands.add_parser,
        "bench",
        help="measure servers under a load",
        description=bench.DESCRIPTION,
        epilog=bench.EXAMPLES,
    )
    bench.add_arguments(measure)
    measure.set_defaults(command=bench.command)

    virtual = parser(
        commands.add_parser,
        "simulate",
        help="what a policy would have done to a load, in virtual time",
        description=simulate.DESCRIPTION,
        epilog=simulate.EXAMPLES,
    )
    simulate.add_arguments(virtual)
    virtual.set_defaults(command=simulate.command)

    fitting = parser(
        commands.add_parser,
        "calibrate",
        help="fit a simulated engine to a live one",
        description=calibrate.DESCRIPTION,
        epilog=calibrate.EXAMPLES,
    )
    calibrate.add_arguments(fitting)
    fitting.set_defaults(command=calibrate.command)
    return top


def _add_top(live: Parser) -> None:
    live.add_argument(
        "--url",
        default="http://127.0.0.1:8001",
        type=_argument(_gateway_url),
        help="its control port (default: %(default)s)",
    )
    live.add_argument("--token-file", metavar="FILE", help=f"its admin token, else ${TOKEN_VARIABLE}")
    live.add_argument(
        "--interval",
        default="1s",
        type=_argument(_interval),
        metavar="TIME",
        help="between two looks: 100ms to 1h (default: %(default)s)",
    )
    live.add_argument("--once", action="store_true", help="one frame as plain text, after one interval")
    live.add_argument("--json", action="store_true", help="what there is to show as JSON, a line each time")


# -- arguments --------------------------------------------------------------------------------------------------------


def _argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """For argparse, which hides the message of a ValueError but shows that of an ArgumentTypeError."""

    def converted(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return converted


def _engine(text: str) -> EngineEntry | EmbeddedFleet | str:
    if text == DEMO:
        return DEMO
    embedded = parse_embedded(text)
    if embedded is not None:
        profile_of(embedded.profile)
        return embedded
    if text.startswith("sim") and "://" not in text:
        raise ValueError(f"{text!r} is not sim, sim:N or sim:N:PROFILE")
    parse_origin(text)
    return EngineEntry(url=text)


def _listen(text: str) -> str:
    if not text.startswith("unix:"):
        split_address(text)
    elif not text.removeprefix("unix:"):
        raise ValueError("unix: needs a path")
    return text


def _control(text: str) -> str:
    split_address(text)
    return text


def _gateway_url(text: str) -> str:
    try:
        origin = parse_origin(text)
    except ValueError:
        origin = None
    if origin is None or origin.unix:
        raise ValueError(f"{text!r}: write http://HOST:PORT or https://HOST:PORT, the control port of a gateway")
    return text


def _interval(text: str) -> float:
    value = SECONDS.parse(text if text[-1:].isalpha() else f"{text}s")
    if value is None or not 0.1 <= value <= 3600:
        raise ValueError(f"{text!r} is not a time from 100ms to 1h")
    return value


# -- commands ---------------------------------------------------------------------------------------------------------


def _serve(given: argparse.Namespace) -> int:
    engines = tuple(engine for engine in given.engine if isinstance(engine, EngineEntry))
    embedded = tuple(engine for engine in given.engine if isinstance(engine, EmbeddedFleet))
    policy = checked(Path(given.policy)) if given.policy else Policy()
    if given.shadow:
        checked(Path(given.shadow))
    demo = DEMO in given.engine
    if not (policy.fleet.engines or policy.fleet.sidecars or engines or embedded or demo or given.sidecar):
        raise Mistake(NO_ENGINE)
    if demo and given.sidecar:
        raise Mistake(f"--sidecar {given.sidecar}: --engine demo has a sidecar of its own")
    if given.sidecar and not Path(given.sidecar).is_file():
        raise Mistake(f"--sidecar {given.sidecar}: there is no such file; `sidecar init` writes one")
    ids = Counter(engine_id(engine.url) for engine in engines)
    twice = [id for id, times in ids.items() if times > 1]
    if twice:
        raise Mistake(f"--engine: {twice[0]} is there twice")
    if not given.tls_cert and (given.tls_key or given.tls_client_ca):
        raise Mistake(f"{'--tls-key' if given.tls_key else '--tls-client-ca'}: there is no --tls-cert for it")
    token = _admin_token(given.admin_token_file)
    certificate = _certificate(given)
    _warn_of_modes(given, policy, certificate)
    if token is None and not is_loopback(given.control):
        raise Mistake(
            f"--control {given.control} can be reached from other machines: "
            f"give --admin-token-file FILE or set {TOKEN_VARIABLE}"
        )
    run(
        Options(
            announce=_announce,
            policy=Path(given.policy) if given.policy else None,
            shadow=Path(given.shadow) if given.shadow else None,
            engines=engines,
            embedded=embedded,
            demo=demo,
            sidecar=Path(given.sidecar) if given.sidecar else None,
            listen=given.listen,
            control=given.control,
            certificate=certificate,
            admin_token=token,
            log=given.log,
        )
    )
    return 0


def _certificate(given: argparse.Namespace) -> Certificate | None:
    if not given.tls_cert:
        return None
    key, client_ca = given.tls_key, given.tls_client_ca
    return Certificate(Path(given.tls_cert), Path(key) if key else None, Path(client_ca) if client_ca else None)


def _warn_of_modes(given: argparse.Namespace, policy: Policy, certificate: Certificate | None) -> None:
    """Tell whose eyes and hands the secrets' files are open to."""
    found = unwise_of(policy, Path(given.policy).parent) if given.policy else []
    told = [f"{given.policy}: {spelled(field)}: {text}" for field, text in found]
    flags = [("--admin-token-file", Path(given.admin_token_file))] if given.admin_token_file else []
    flags += [("--tls-key" if given.tls_key else "--tls-cert", certificate.private)] if certificate else []
    told += [f"{flag}: {text}" for flag, file in flags if (text := unwise(file)) is not None]
    for line in told:
        print(f"gateway: warning: {line}", file=sys.stderr)


def _announce(running: Running) -> None:
    file = running.sidecar
    watch = "" if file is None else shlex.join([*_sidecar(), "status", "--watch", "--config", str(file)])
    text = announcement(
        running.data, running.control, running.engines, running.models, in_turn=running.in_turn, watch=watch
    )
    # Whoever reads it may have read enough, as `| head -1`, or not read at all: calls are served all the same.
    LineWriter(1).write(f"{printable(text)}\n".encode(), hurry=True)


def _sidecar() -> list[str]:
    """The command `sidecar` of this installation, as short as it can be written here."""
    script = Path(sys.executable).with_name("sidecar")
    if not script.exists():
        return [sys.executable, "-m", "sidecar.cli"]
    return [str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script)]


def _top(given: argparse.Namespace) -> int:
    token = _admin_token(given.token_file, "--token-file")
    return show(given.url, token, given.interval, just_once=given.once, as_json=given.json)


def _admin_token(file: str | None, flag: str = "--admin-token-file") -> str | None:
    """From the file, else from the environment; never from argv, which every user of the machine can read."""
    source = f"{flag} {file}" if file else TOKEN_VARIABLE
    text = read(Path(file), f"{flag} ", 4096).decode("latin-1") if file else os.environ.get(TOKEN_VARIABLE)
    wrong = refused(Path(file)) if file else None
    if wrong is not None:
        raise Mistake(f"{source}: {wrong}")
    if text is None:
        return None
    token = text.strip()
    if len(token) < TOKEN_LENGTH or not (token.isascii() and token.isprintable() and " " not in token):
        raise Mistake(f"{source}: a token is at least {TOKEN_LENGTH} visible ASCII characters")
    return token
