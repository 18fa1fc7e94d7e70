"""What no single field of a policy can tell: names that must exist, and values that must agree.

Each rule looks at the finished Policy and yields what is wrong; lines of a file are found from paths afterwards.
What is legal but unwise is advice.py's business.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence

from gateway.core.checked import Fault, Path, listed, nearest, shown
from gateway.core.kv_events import address_fault
from gateway.core.policy import Policy
from gateway.core.policy_traffic import ModeRule, Threshold, When
from gateway.core.units import BYTES, SECONDS, SHARE

HINTS = 20  # names of a kind whose nearest is looked for: it takes a while among thousands


def faults(policy: Policy) -> Iterator[Fault]:
    """Everything that keeps a well-formed policy from being used."""
    if "default" not in policy.classes:
        yield Fault(("classes",), f"the classes {listed(policy.classes)}", "a class named default among them")
    expected = f"one of the classes {listed(policy.classes)}"
    unknown = [(path, name) for path, name in _class_names(policy) if name not in policy.classes]
    for index, (path, name) in enumerate(unknown):
        yield Fault(path, name, expected, nearest(name, policy.classes) if index < HINTS else None)
    yield from _classes(policy)
    yield from _tenants(policy)
    yield from _addresses(policy)
    yield from _shaping(policy)
    for name, mode in modes_of(policy):
        yield from _mode(("modes", name), mode)
    yield from _breaker(policy)
    yield from _engines(policy)
    yield from _memory(policy)


def bands_of(policy: Policy) -> list[list[str]]:
    """The classes in order; a strict class ends a band. A later band gets what earlier ones leave, and weights share
    what a band gets."""
    bands: list[list[str]] = [[]]
    for name, each in policy.classes.items():
        bands[-1].append(name)
        if each.strict:
            bands.append([])
    return [band for band in bands if band]


def modes_of(policy: Policy) -> list[tuple[str, ModeRule]]:
    """The modes by name, the mildest first."""
    return [(name, getattr(policy.modes, name)) for name in policy.modes.__struct_fields__]


def signals_of(threshold: Threshold) -> dict[str, float | None]:
    """What it says of each signal; None: nothing."""
    return {name: getattr(threshold, name) for name in threshold.__struct_fields__}


def _class_names(policy: Policy) -> Iterator[tuple[Path, str]]:
    """Every place that names a class."""
    for tier, name in policy.service_tiers.items():
        yield ("service_tiers", tier), name
    for tenant, rules in policy.tenants.items():
        for field, asked in (("class", rules.class_), ("best_class", rules.best_class)):
            if asked is not None:
                yield ("tenants", tenant, field), asked
        for name in rules.limits.classes:
            yield ("tenants", tenant, "limits", "classes", name), name
    for name in policy.limits.classes:
        yield ("limits", "classes", name), name
    for index, tier_ in enumerate(policy.shaping):
        for place, name in enumerate(tier_.except_ or ()):
            yield ("shaping", index, "except", place), name
    for mode, rule in modes_of(policy):
        for field, names in (("refuse", rule.refuse), ("only", rule.only)):
            for place, name in enumerate(names or ()):
                yield ("modes", mode, field, place), name


def _classes(policy: Policy) -> Iterator[Fault]:
    for name, each in policy.classes.items():
        for field, seconds in (("ttft", each.ttft), ("max_wait", each.max_wait)):
            if seconds is not None and seconds > each.deadline:
                limit = f"at most its deadline, {SECONDS.show(each.deadline)}"
                yield Fault(("classes", name, field), SECONDS.show(seconds), limit)
        if each.when == When():
            yield Fault(("classes", name, "when"), "no condition", "prompt_tokens, routes or models")
    reserved = sum(each.reserve for each in policy.classes.values())
    if reserved >= 1:
        found = f"reserves of {SHARE.show(round(reserved, 9))} together"
        yield Fault(("classes",), found, "less than 100%, or nothing is left for calls to share")


def _tenants(policy: Policy) -> Iterator[Fault]:
    order = list(policy.classes)
    owners: dict[str, str] = {}
    for name, tenant in policy.tenants.items():
        given, best = tenant.class_, tenant.best_class
        if given in order and best in order and order.index(given) < order.index(best):
            expected = f"{best} or a class after it in classes"
            yield Fault(("tenants", name, "class"), f"{given}, which is above its best_class {best}", expected)
        for index, key in enumerate(tenant.keys):
            owner = owners.setdefault(key, f"{name}.keys[{index}]")
            if owner != f"{name}.keys[{index}]":
                yield Fault(("tenants", name, "keys", index), f"the key of tenants.{owner} again", "each key once")


def _addresses(policy: Policy) -> Iterator[Fault]:
    """Of proxies and of sidecars' engines."""
    proxies = policy.trusted_proxies.addresses
    yield from _networks(("trusted_proxies", "addresses"), proxies, "an IP address, a CIDR block or unix")
    if policy.fleet.sidecars is not None:
        allow = policy.fleet.sidecars.allow
        yield from _networks(("fleet", "sidecars", "allow"), allow, "an IP address or a CIDR block")


def _networks(where: Path, addresses: Sequence[str], expected: str) -> Iterator[Fault]:
    for index, address in enumerate(addresses):
        path: Path = (*where, index)
        if address == "unix":
            continue
        try:
            network = ipaddress.ip_network(address, strict=False)
        except ValueError:
            yield Fault(path, repr(address), expected)
            continue
        if "/" in address and str(network.network_address) != address.split("/")[0]:
            # More than was meant would be trusted: 10.1.2.3/8 is sixteen million hosts.
            yield Fault(path, repr(address), "a block without bits set beyond its prefix", str(network))


def _shaping(policy: Policy) -> Iterator[Fault]:
    for index, tier in enumerate(policy.shaping):
        if tier.kv_above is None and tier.mode is None:
            yield Fault(("shaping", index), "neither kv_above nor mode", "one of them: it says when the tier applies")


def _mode(path: Path, rule: ModeRule) -> Iterator[Fault]:
    """Entering and leaving at one value, or by different signals, is a mode that flaps."""
    enters = signals_of(rule.enter)
    for signal, leave in signals_of(rule.leave).items():
        if leave is None:
            continue
        enter = enters[signal]
        text = shown(rule.leave, signal)
        if enter is None:
            yield Fault((*path, "leave", signal), f"{text}, but no {signal} in enter", "only signals that enter has")
        elif leave >= enter:
            yield Fault((*path, "leave", signal), text, f"less than enter has, {shown(rule.enter, signal)}")


def _breaker(policy: Policy) -> Iterator[Fault]:
    first, longest = policy.breaker.open_for, policy.breaker.open_for_at_most
    if first > longest:
        expected = f"at most open_for_at_most, {SECONDS.show(longest)}"
        yield Fault(("breaker", "open_for"), SECONDS.show(first), expected)


def _engines(policy: Policy) -> Iterator[Fault]:
    first: dict[str, int] = {}
    for index, engine in enumerate(policy.fleet.engines):
        if first.setdefault(engine.url, index) != index:
            found = f"{engine.url} again (as in fleet.engines[{first[engine.url]}])"
            yield Fault(("fleet", "engines", index, "url"), found, "each engine once")
        expected = address_fault(engine.kv_events or "")
        if expected is not None:
            yield Fault(("fleet", "engines", index, "kv_events"), str(engine.kv_events), expected)


def _memory(policy: Policy) -> Iterator[Fault]:
    """A body that is larger than its sender's part of the memory could never come in."""
    body = policy.body
    largest = max(body.max, body.max_media)
    if body.memory * body.share < largest:
        found = f"{shown(body, 'memory')}, of which {shown(body, 'share')} for one tenant"
        expected = f"room for one body, {BYTES.show(largest)} (body.max, body.max_media)"
        yield Fault(("body", "memory"), found, expected)
