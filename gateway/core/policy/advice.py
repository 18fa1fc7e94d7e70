"""Advice on legal but unwise policies: starved classes, doors that stand open, engines that are never used.

Each rule yields a place and a reason. Advice never keeps a policy from being used. The defaults need none.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Sequence

import msgspec

from gateway.core.admission.mode import bars
from gateway.core.engines.origin import parse_origin
from gateway.core.policy.policy import EngineEntry, Policy
from gateway.core.policy.rules import HINTS, bands_of, modes_of, share_models, signals_of
from gateway.core.policy.traffic import RateLimit
from gateway.core.policy.types import NameOf
from gateway.shared.addresses import is_loopback
from gateway.shared.files.checked import Path, listed, nearest, shown
from gateway.shared.files.marks import marked
from gateway.shared.files.units import COUNT, SHARE

LEAST_SHARE = 0.02
AGENT = 20_000  # tokens of the first prompt of a coding agent such as Claude Code
AGENTS = 4  # of their calls that one engine may run at once, at least
ANONYMOUS = "anonymous"
PLACEHOLDERS = ("tenant", "class", "model", "limit", "retry_after", "request_id")  # of a refusal's texts

Found = Iterator[tuple[Path, str]]


def advise(policy: Policy) -> Found:
    """Yield unwise settings of a policy, each by its path, and why."""
    for rule in (
        *(_weights, _agents, _tenants, _anonymous, _refusals, _models_of_nobody, _shaping, _modes),
        *(_ports, _sidecars, in_the_clear, _transfers, _doors, _batches, _providers),
    ):
        yield from rule(policy)


# -- classes ----------------------------------------------------------------------------------------------------------


def _weights(policy: Policy) -> Found:
    """Classes that others leave nothing."""
    bands = bands_of(policy)
    for index, band in enumerate(bands):
        total = sum(policy.classes[name].weight for name in band)
        for name in band:
            share = policy.classes[name].weight / total
            if share < LEAST_SHARE:
                text = (
                    f"{share:.1%} of the tokens while all classes have work; below {SHARE.show(LEAST_SHARE)} it starves"
                )
                yield ("classes", name, "weight"), text
        after = [name for later in bands[index + 1 :] for name in later]
        if after and policy.classes[band[-1]].max_concurrency is None:
            text = (
                f"its calls go before all of {listed(after)}, and nothing bounds how many of them run: "
                "without max_concurrency a flood of them starves the others"
            )
            yield ("classes", band[-1], "strict"), text


def _agents(policy: Policy) -> Found:
    """A class that takes coding agents' first calls, and runs few at once however many engines there are."""
    whens = {name: each.when for name, each in policy.classes.items() if each.when is not None}
    taken = [
        name
        for name, when in whens.items()
        if (when.prompt_tokens or 0) < AGENT and not when.models and (not when.routes or "chat" in when.routes)
    ]
    name = taken[0] if taken else "default"
    most, engines = policy.classes[name].max_concurrency, max(1, len(policy.fleet.engines))
    if most is not None and most < AGENTS * engines:
        text = (
            f"a coding agent's first call, of {COUNT.show(AGENT)} tokens, is of this class, and all engines together "
            f"run {most} of its calls: leave it out, and long prompts are bounded by the engines' room"
        )
        yield ("classes", name, "max_concurrency"), text


# -- shaping and modes ------------------------------------------------------------------------------------------------


def _shaping(policy: Policy) -> Found:
    """Tiers that cut answers of a fleet that is as full as it is meant to be."""
    target = policy.budget.kv_target
    for index, tier in enumerate(policy.shaping):
        if tier.kv_above < target:
            text = (
                f"{SHARE.show(tier.kv_above)} is below budget.kv_target, to which engines are filled on purpose "
                f"({SHARE.show(target)}): answers are cut whenever the fleet is busy"
            )
            yield ("shaping", index, "kv_above"), text


def _modes(policy: Policy) -> Found:
    order = list(policy.classes)
    target = policy.budget.kv_target
    for name, rule in modes_of(policy):
        path: Path = ("modes", name)
        if rule.enter.kv is not None and rule.enter.kv <= target:
            text = (
                f"{SHARE.show(rule.enter.kv)} is not above budget.kv_target, to which engines are filled on purpose "
                f"({SHARE.show(target)}): a busy fleet is always in this mode"
            )
            yield (*path, "enter", "kv"), text
        for signal, enter in signals_of(rule.enter).items():
            if enter is not None and signals_of(rule.leave)[signal] is None:
                text = (
                    f"no {signal} in it: the mode may end as soon as {signal} is below the "
                    f"{shown(rule.enter, signal)} of enter, and begin again at once"
                )
                yield (*path, "leave"), text
        if all(bars(rule, each, order) for each in order):
            yield path, "it refuses every class"


# -- engines and strangers --------------------------------------------------------------------------------------------


def _sidecars(policy: Policy) -> Found:
    """Yield advice on the networks of sidecars' engines: none, or every address."""
    sidecars = policy.fleet.sidecars
    if sidecars is None:
        return
    if not sidecars.allow:
        yield ("fleet", "sidecars", "allow"), "it is empty: no engine of a sidecar is ever used"
    for index, block in enumerate(sidecars.allow):
        network = ipaddress.ip_network(block)
        if not network.prefixlen:
            text = f"{block} is everywhere: who knows the token has prompts sent to any address"
            yield ("fleet", "sidecars", "allow", index), text


def _ports(policy: Policy) -> Found:
    for index, engine in enumerate(policy.fleet.engines):
        if engine.url.startswith("http://") and parse_origin(engine.url).port == 80 and ":80" not in engine.url:
            yield (
                ("fleet", "engines", index, "url"),
                "no port, so 80; vLLM listens on 8000 where it is not told otherwise",
            )


def _doors(policy: Policy) -> Found:
    routing = policy.routing
    salted = len(policy.tenants) > 1 and routing.cache_isolation == "tenant"
    if salted and routing.gateways > 1 and routing.cache_secret_file is None:
        text = f"each of {routing.gateways} gateways draws its own: none finds what another has had cached"
        yield ("routing", "cache_secret_file"), text
    if policy.body.media == "any":
        yield ("body", "media"), "engines fetch whatever URL a client names, also from hosts that only they can reach"
    for index, address in enumerate(policy.trusted_proxies):
        if address.endswith("/0"):
            text = f"{address} is everybody: whoever reaches the data port is whatever tenant they say they are"
            yield ("trusted_proxies", index), text


def _batches(policy: Policy) -> Found:
    """Lines of batches that are in the way of calls whose first token is waited for."""
    name = None if policy.batches is None else policy.batches.class_
    waited_for = [other for other, each in policy.classes.items() if other != name and each.ttft is not None]
    if name is not None and waited_for and not policy.classes[name].headroom:
        text = (
            f"lines of batches fill engines, and first tokens of {listed(waited_for)} come late: give {name} headroom"
        )
        yield ("batches", "class"), text


def _providers(policy: Policy) -> Found:
    for name, provider in policy.providers.items():
        if not provider.tenants or not provider.classes:
            missing = " and ".join([field for field in ("tenants", "classes") if not getattr(provider, field)])
            yield ("providers", name), f"no call may leave the house: it names no {missing}"


def _transfers(policy: Policy) -> Found:
    """Transfer groups in which nobody reads for others, and engines that are kept for reading without much to read."""
    engines = policy.fleet.engines
    idle: set[str] = set()  # groups that were told
    for index, engine in enumerate(engines):
        path = ("fleet", "engines", index)
        group = engine.transfer
        if group is None:
            continue
        if group not in idle and not _any_reads(group, engines):
            idle.add(group)
            text = (
                f"no two engines of group {group} serve a model so that one reads (role prefill or both) and another "
            )
            yield (*path, "transfer"), f"{text}answers: prompts are always read where they are answered"
        if engine.role != "prefill":
            continue
        outside = [e.url for e in engines if e.role != "prefill" and e.transfer != group and share_models(e, engine)]
        if outside:
            text = f"{listed(outside)} may answer the same models and is not of group {group}: its prompts are never"
            yield (*path, "role"), f"{text} read here"
        if all(each.tpot is None for each in policy.classes.values()):
            text = "no class has a tpot, so prompts are read here only if that brings the first token sooner; meanwhile"
            yield (*path, "role"), f"{text} this engine answers only what others have no room for"


def _any_reads(group: str, engines: Sequence[EngineEntry]) -> bool:
    """Whether an engine of the group could read a prompt that another one answers."""
    members = [engine for engine in engines if engine.transfer == group]
    return any(
        reader is not writer and reader.role != "decode" and writer.role != "prefill" and share_models(reader, writer)
        for reader in members
        for writer in members
    )


# -- tenants, and the models they name -------------------------------------------------------------------------------


def _tenants(policy: Policy) -> Found:
    order = list(policy.classes)
    if not policy.tenants:
        yield ("tenants",), "there are none, so every call is refused with 401"
    nameless = policy.keys_file is None and policy.auth is None and not policy.trusted_proxies
    for name, tenant in policy.tenants.items():
        best = tenant.best_class
        if best is not None and tenant.class_ is None and order.index("default") < order.index(best):
            text = f"calls that ask for no class are of class default, which is above it: add class: {best}"
            yield ("tenants", name, "best_class"), text
        if name != ANONYMOUS and not tenant.keys and nameless:
            yield ("tenants", name), "nobody can be this tenant: no keys, no keys_file, no auth, no trusted proxy"


def _anonymous(policy: Policy) -> Found:
    tenant = policy.tenants.get(ANONYMOUS)
    if tenant is None or len(policy.tenants) == 1:
        return
    any_class = tenant.best_class in (None, next(iter(policy.classes)))
    own, usual = tenant.limits, policy.limits.per_tenant
    limits = (own.requests or usual.requests, own.tokens or usual.tokens)
    if any_class and not any(isinstance(limit, RateLimit) for limit in limits):
        text = "callers without a key may ask for any class and have no limit: give it best_class and limits"
        yield ("tenants", ANONYMOUS), text


def _refusals(policy: Policy) -> Found:
    for name, tenant in policy.tenants.items():
        text = msgspec.json.encode(tenant.refusal.body).decode() if tenant.refusal else ""
        for place in dict.fromkeys(re.findall(r"\{(\w+)\}", text)):
            if place not in PLACEHOLDERS:
                yield (
                    ("tenants", name, "refusal", "body"),
                    f"{{{place}}} stands for nothing and is sent as it is{_hint(nearest(place, PLACEHOLDERS))}",
                )


def _hint(word: str | None) -> str:
    return f" (did you mean {word}?)" if word else ""


def _models_of_nobody(policy: Policy) -> Found:
    """Models that no engine serves, where the policy says of all engines what they serve."""
    engines = policy.fleet.engines
    known = {model for engine in engines for model in engine.models}
    if not engines or not all(engine.models for engine in engines):
        return
    named = [(path, name) for path, name, mark in marked(policy, NameOf) if mark.field == "engines"]
    for index, (path, name) in enumerate([each for each in named if each[1] not in known]):
        yield path, f"no engine of fleet.engines serves {name}{_hint(nearest(name, known) if index < HINTS else None)}"


# -- secrets on the network -----------------------------------------------------------------------------------------


def in_the_clear(policy: Policy) -> Found:
    """Keys and tokens that the network between two machines would see, each with its field."""
    for index, engine in enumerate(policy.fleet.engines):
        origin = parse_origin(engine.url)
        if engine.api_key_file is not None and not (origin.tls or origin.unix or is_loopback(origin.host)):
            text = f"the key crosses the network to {engine.url} in the clear: https:// hides it"
            yield ("fleet", "engines", index, "api_key_file"), text
    sidecars = policy.fleet.sidecars
    elsewhere = [] if sidecars is None else list(_elsewhere(sidecars.allow))
    if sidecars is None or not elsewhere:
        return
    if sidecars.tls is None:
        text = f"sidecars in {elsewhere[0]} may be used at http://, where prompts and the order token are in the clear"
        yield ("fleet", "sidecars"), f"{text}: tls: {{}} or tls: {{ca_file: ...}} asks for https://"
    if sidecars.order_token_file is None:
        text = f"without an order_token_file each sidecar in {elsewhere[0]} knows the token that gives orders to all"
        yield ("fleet", "sidecars"), text


def _elsewhere(allow: tuple[str, ...]) -> Iterator[str]:
    """The networks that other machines may be in."""
    return (block for block in allow if not ipaddress.ip_network(block).is_loopback)
