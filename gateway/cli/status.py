"""`gateway status`: what a running gateway does now, as its console's first page has it."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from gateway.cli.control_client import NoAnswer, Unfit, ask
from gateway.cli.files import TOKEN_VARIABLE, admin_tokens
from gateway.control.cluster import ClusterView
from gateway.shared.command_line import Mistake, argument
from gateway.shared.formatting import columns, seconds, shown
from gateway.upstream.client import parse_origin

EVERY = 1.0  # seconds between two looks of `--watch`
CLEAR = "\x1b[H\x1b[2J"
HALF_A_DAY = 12 * 3600.0  # seconds after which a time has its date
MOST = 30  # rows of one table

DESCRIPTION = "Show what a running gateway does now."
EXAMPLES = """\
Asks the control port: what is wrong and what to change; who leads the cluster, and who is there; classes, models,
engines, sidecars, tenants. Rates and times to the first token are of the last ten seconds. Engines in trouble come
first.

examples:
  gateway status                                                 the gateway on this machine
  gateway status --watch                                         again every second, until Ctrl-C
  gateway status --url http://10.0.0.5:8001 --token-file admin.token
  gateway status --json                                          for programs, as GET /status of the control port

Exit status 2: a wrong token, or nothing that is a gateway; 1: no answer."""

Entry = Mapping[str, Any]


class StatusView(msgspec.Struct, frozen=True):
    """Answer of `GET /status`: entries by name, as `gateway/control/console/reading.py` makes them. `at`: its
    clock. `cluster`: as this gateway knows it; None: it is alone."""

    gateway: Entry
    policy: Entry
    headline: list[Entry]
    at: float
    classes: dict[str, Entry] = {}
    models: dict[str, Entry] = {}
    engines: dict[str, Entry] = {}
    sidecars: dict[str, Entry] = {}
    tenants: dict[str, Entry] = {}
    providers: dict[str, Entry] = {}
    mirrors: dict[str, Entry] = {}
    cluster: ClusterView | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = "its control port (default: %(default)s)"
    parser.add_argument("--url", default="http://127.0.0.1:8001", type=argument(_control_url), help=where)
    parser.add_argument("--token-file", metavar="FILE", help=f"its admin token, else ${TOKEN_VARIABLE}")
    parser.add_argument("--json", action="store_true", help="as JSON, a line each time")
    parser.add_argument("--watch", action="store_true", help="again every second; one that does not answer is asked on")


def _control_url(text: str) -> str:
    try:
        origin = parse_origin(text)
    except ValueError:
        origin = None
    if origin is None or origin.unix:
        raise ValueError(f"{text!r}: write http://HOST:PORT or https://HOST:PORT, the control port of a gateway")
    return text


def command(given: argparse.Namespace) -> int:
    """Print the status. Raises Mistake."""
    token = next(iter(admin_tokens(given.token_file, "--token-file")), None)
    while True:
        try:
            status = asyncio.run(ask(given.url, "/status", token, StatusView))
        except Unfit as error:
            raise Mistake(f"{given.url}: {error}") from None
        except NoAnswer as error:
            print(f"gateway: {given.url}: {error}", file=sys.stderr)
            if not given.watch:
                return 1
        else:
            text = msgspec.json.encode(status).decode() if given.json else table(status, given.url)
            print(f"{CLEAR if given.watch and sys.stdout.isatty() else ''}{text}", flush=True)
            if not given.watch:
                return 0
        time.sleep(EVERY)


def table(status: StatusView, url: str) -> str:
    """The status for a person, without a last newline."""
    policy = status.policy
    file = f"version {policy['version']} of {policy['file']}" if policy["file"] else policy["origin"] or "none"
    lines = [f"weir {status.gateway['version']} at {url}, policy: {shown(file)}", ""]
    for line in status.headline:
        lines.append(f"{'' if line['level'] == 'good' else '! '}{shown(line['what'])}")
        if line.get("since"):
            lines.append(f"    since {_when(line['since'], status.at)}")
        lines += [f"    {shown(line[part])}" for part in ("why", "change") if line[part]]
    if status.cluster is not None:
        lines += ["", *_cluster(status.cluster)]
    for heading, rows in (
        (CLASS, map(_class, status.classes.items())),
        (MODEL, map(_model, status.models.items())),
        (ENGINE, (_engine(each, status.at) for each in sorted(status.engines.items(), key=_trouble))),
        (SIDECAR, _sidecars(status.sidecars)),
        (TENANT, map(_tenant, status.tenants.items() if len(status.tenants) > 1 else ())),
        (PROVIDER, _providers(status.providers)),
    ):
        lines += _section(heading, rows)
    return "\n".join(lines)


RATES = ("offered", "answered", "refused", "failed")
CLASS = ("CLASS", *(f"{rate.upper()}/s" for rate in RATES), "RUNNING", "QUEUED", "WAIT", "TTFT p50", "p99", "TARGET")
MODEL = ("MODEL", "MODE", "ENGINES", "WANTED", "QUEUED", "WAIT", "ROOM FOR CALLS")
ENGINE = ("ENGINE", "STATE", "CALLS", "HELD", "KV CACHE", "MODELS")
SIDECAR = ("SIDECAR", "MODEL", "STATE", "READY IN", "")
TENANT = ("TENANT", "CALLS", "ANSWERED", "TOKENS")
PROVIDER = ("PROVIDER", "WINDOW", "SPENT", "RESERVED", "BUDGET")


def _section(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The table with an empty line before it; nothing where there are no rows."""
    found = list(rows)
    if found:
        yield ""
        yield from columns([heading, *found[:MOST]])
        if len(found) > MOST:
            yield f"and {len(found) - MOST} more"


def _cluster(view: ClusterView) -> Iterator[str]:
    """Lines about a cluster: its leader, its members, and those that are silent."""
    yield view.line
    for name in view.members:
        notes = ["leads" if name == view.leader else "stands by"]
        notes += ["has not told what its calls hold"] * (name in view.awaited)
        notes += ["this gateway"] * (name == view.member)
        yield f"  {name}   {', '.join(notes)}"
    for name in view.gone:
        yield f"  {name}   silent: forgotten 10 minutes after its last sign"


def _when(unix: float, now: float) -> str:
    """A time in this machine's time zone, and how long ago it was by the gateway's clock."""
    ago = max(0.0, now - unix)
    form = "%H:%M:%S" if ago < HALF_A_DAY else "%Y-%m-%d %H:%M:%S"
    return f"{time.strftime(form, time.localtime(unix))}, {seconds(ago)} ago"


def _seconds(value: float | None) -> str:
    return "-" if value is None else seconds(value)


def _class(item: tuple[str, Entry]) -> Sequence[str]:
    name, it = item
    now = it["now"]
    most = "" if it["most_running"] is None else f" of {it['most_running']}"
    rates = (f"{now[rate]:.1f}" for rate in RATES)
    times = (it["wait"], now["ttft_p50"], now["ttft_p99"], it["target"])
    return name, *rates, f"{it['running']}{most}", str(it["queued"]), *map(_seconds, times)


def _model(item: tuple[str, Entry]) -> Sequence[str]:
    id, it = item
    counts = (str(it[name]) for name in ("engines", "wanted", "queued"))
    return shown(id), it["mode"], *counts, seconds(it["wait"]), str(it["headroom"])


def _state(it: Entry, now: float) -> str:
    breaker = f"breaker {it['breaker']}" if "breaker" in it else ""
    why = f": {shown(it['why'])}" if it.get("why") else ""
    why += f" (since {_when(it['since'], now)})" if it.get("since") else ""
    return (breaker or ("draining" if it.get("draining") else it["state"])) + why


def _trouble(item: tuple[str, Entry]) -> bool:
    return _state(item[1], 0.0) == "up"


def _engine(item: tuple[str, Entry], now: float) -> Sequence[str]:
    _, it = item
    whole = max(1, it["capacity"])
    used = f"{it['used'] / whole:.0%}" if "used" in it else "-"
    calls = f"{it['calls']}/{it['slots']}"
    return shown(it["name"]), _state(it, now), calls, f"{it['held'] / whole:.0%}", used, shown(", ".join(it["models"]))


def _sidecars(sidecars: Mapping[str, Entry]) -> Iterator[Sequence[str]]:
    for id, it in sidecars.items():
        for gpu in it["gpus"]:
            memory = f"{gpu['used']} of {gpu['total']} GiB used"
            yield id, f"GPU {gpu['index']}", "not used" if gpu["refused"] else memory, "", shown(gpu["refused"])
        for model in it["models"]:
            state, ready = model["pending"] or model["state"], _seconds(model["ready_in"])
            yield id, shown(model["profile"]), state, ready, shown(model["why"])


def _tenant(item: tuple[str, Entry]) -> Sequence[str]:
    name, it = item
    return name, str(it["ended"]), str(it["answered"]), str(it["tokens"])


def _providers(providers: Mapping[str, Entry]) -> Iterator[Sequence[str]]:
    for name, it in providers.items():
        for window, *amounts in it["budgets"]:
            yield shown(name), window, *(f"{amount:.2f}" for amount in amounts)
