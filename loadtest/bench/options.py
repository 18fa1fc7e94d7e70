"""Options of `gateway bench`: the flags, whose texts `help_text.py` has, and the scenario file together.

Every mistake in either is found before anything starts.
"""

from __future__ import annotations

import argparse
import os
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gateway.core.policy.file import decode
from gateway.shared.files.checked import InvalidFile
from loadtest.bench.fleet import Fleet, parse_fleet
from loadtest.bench.help_text import GROUPS
from loadtest.bench.rivals import absent, is_rival, parse_compared
from loadtest.bench.run import Load
from loadtest.clients.retries import Clients
from loadtest.clients.targets import Address, Target, parse_url, tls_of
from loadtest.load.scenario import Mistake, Scenario, key_header, keys_of, planned
from loadtest.load.scenario_flags import add_groups, overridden, policy_in, scenario_of, seconds, whole

DRAIN = 60.0  # seconds
MOST_REPEATS = 100
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


class Contender(msgspec.Struct, frozen=True, kw_only=True):
    """Side of a bench: `fixed`, a target that runs already, or the bench's own engines behind a `gateway` with
    `policy`, or behind another kind that `fleet.fronted` knows. `compared`: a baseline, which SLOs are not held
    against."""

    name: str
    fixed: Target | None = None
    before: str = "gateway"
    policy: Path | None = None
    compared: bool = False


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """All that is to be done. `folder`: where the scenario's files are."""

    scenario: Scenario
    source: str
    folder: Path
    keys: Mapping[str, str]
    contenders: Sequence[Contender]
    fleet: Fleet | None
    tls: ssl.SSLContext
    repeat: int
    drain: float
    find_capacity: bool
    named_model: bool  # the model is somebody's wish
    out: Path | None
    force: bool

    def load(self, scenario: Scenario, repeat: int, model: str | None = None) -> Load:
        """Return the load of one run of a scenario (the bench's own, or the same at another rate), with all requests
        for `model` if given."""
        if model is not None:
            mix = tuple(msgspec.structs.replace(kind, model=None) for kind in scenario.workload.mix)
            workload = msgspec.structs.replace(scenario.workload, model=model, mix=mix)
            scenario = msgspec.structs.replace(scenario, workload=workload)
        return Load(
            planned=planned(scenario, seed=scenario.seed + repeat, folder=self.folder, keys=self.keys),
            seconds=scenario.seconds,
            users=scenario.clients,
            drain=self.drain,
            clients=Clients(retries=scenario.retries, timeout=scenario.timeout),
        )


def bench_of(given: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Bench:
    """Plan of the bench. Raises Mistake."""
    scenario, source, folder = scenario_of(given)
    scenario = overridden(scenario, given)
    keys = keys_of(scenario, folder, environment)
    contenders = _contenders(given, environment)
    tls = tls_of(given.ca, insecure=given.insecure)
    models = dict.fromkeys(kind.model or scenario.workload.model for kind in scenario.workload.mix)
    flags = ("--max-model-len", str(given.max_model_len)) if given.max_model_len else ()
    fleet = given.engines and msgspec.structs.replace(given.engines, models=tuple(models), flags=flags)
    return Bench(
        scenario=scenario, source=source, folder=folder, keys=keys, contenders=contenders, fleet=fleet,
        tls=tls, repeat=given.repeat or 1, drain=_drain(scenario) if given.drain is None else given.drain,
        find_capacity=given.find_capacity, named_model=given.model is not None,
        out=given.out and Path(given.out), force=given.force,
    )  # fmt: skip


def _drain(scenario: Scenario) -> float:
    """Return the seconds to wait for the last answers, so that no answer within an SLO is cut off."""
    return max(DRAIN, *(slo.e2e or 0.0 for slo in scenario.slos), 0.0)


# -- where to ---------------------------------------------------------------------------------------------------------


def _contenders(given: argparse.Namespace, environment: Mapping[str, str]) -> list[Contender]:
    headers = key_header(given.key_env, environment)
    watched: dict[str, list[tuple[str, Address]]] = {}
    for name, address in given.metrics:
        watched.setdefault(name, []).append((address.name, address))
    found = [_fixed(name, address, headers, watched.pop(name, None)) for name, address in given.target]
    if watched:
        raise Mistake(f"--metrics {next(iter(watched))}: there is no target of this name")
    found += _ours(given)
    names = [contender.name for contender in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise Mistake(f"there are two targets called {twice}")
    if not found:
        raise Mistake("where to? Give --target URL, or --engines sim:2 to start simulated ones")
    return found


def _ours(given: argparse.Namespace) -> list[Contender]:
    """Engines that we start, behind a gateway with each policy and behind nothing."""
    if given.engines is None:
        for flag in ("policy", "compare", "max_model_len"):
            if getattr(given, flag):
                raise Mistake(f"--{flag.replace('_', '-')}: needs --engines, which it is measured on")
        return []
    if any(is_rival(name) for name in given.compare or ()) and (why := absent()):
        raise Mistake(f"--compare: {why}")
    policies = [Path(policy) for policy in given.policy]
    for policy in policies:
        if not policy.is_file():
            raise Mistake(f"--policy {policy}: there is no such file")
        try:
            text = policy_in(policy)
            engines = decode(text, str(policy)).fleet.engines if text.strip() else ()
        except InvalidFile as error:
            raise Mistake(str(error)) from error
        if engines:
            raise Mistake(f"--policy {policy}: its {engines[0].url} would get the load too: leave out fleet.engines")
    gateways = [Contender(name=policy.stem, policy=policy) for policy in policies] or [Contender(name="weir")]
    return gateways + [Contender(name=name, before=name, compared=True) for name in given.compare or ()]


def _fixed(
    name: str, address: Address, headers: Mapping[bytes, bytes], watched: Sequence[tuple[str, Address]] | None
) -> Contender:
    sources = watched if watched is not None else [(name, address)]
    return Contender(name=name, fixed=Target(name=name, addresses=[address], headers=headers, sources=sources))


# -- flags ------------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a load and those of GROUPS."""
    readers: dict[str, Callable[[str], Any]] = {
        "target": _target, "engines": parse_fleet, "metrics": _metrics, "drain": seconds,
        "repeat": whole(1, MOST_REPEATS), "compare": parse_compared, "max-model-len": whole(16, 10_000_000),
    }  # fmt: skip
    add_groups(parser, GROUPS, readers)


def _target(text: str) -> tuple[str, Address]:
    name, equals, url = text.partition("=")
    if not equals or "/" in name:
        address = parse_url(text)
        name = re.sub(r"[^a-z0-9_.-]", "-", (address.unix or address.name).lower()).strip("-.")
        return name, address
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a name of lower-case letters, digits, _ . and -")
    return name, parse_url(url)


def _metrics(text: str) -> tuple[str, Address]:
    name, equals, url = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r}: write NAME=URL, with the name of a target")
    return name, parse_url(url.removesuffix("/metrics"))
