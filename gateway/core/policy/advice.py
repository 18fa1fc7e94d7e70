"""Advice on legal but unwise policies: starved classes, doors that stand open, engines that are never used.

Each rule yields a place and a reason. Advice never keeps a policy from being used. The defaults need none.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

import msgspec

from gateway.core.admission.mode import bars
from gateway.core.engines.origin import parse_origin
from gateway.core.policy.advice_network import in_the_clear
from gateway.core.policy.advice_tenants import Found, tenant_rules
from gateway.core.policy.policy import EngineEntry, Policy
from gateway.core.policy.rules import bands_of, modes_of, share_models, signals_of
from gateway.shared.files.checked import Mark, Path, Value, listed, shown, spelled
from gateway.shared.files.units import COUNT, SHARE

LEAST_SHARE = 0.02
AGENT = 20_000  # tokens of the first prompt of a coding agent such as Claude Code
AGENTS = 4  # of their calls that one engine may run at once, at least


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """Advice on a setting. `mark`: place in the file; None: a default, or no file."""

    path: str
    text: str
    mark: Mark | None = None


def advise(policy: Policy, written: Value | None = None) -> list[Advice]:
    """Return unwise settings of a policy, in the order of its lines if `written`, the file's tree, is given."""
    rules = (
        *(_weights, _agents, tenant_rules, _shaping, _modes),
        *(_ports, _sidecars, in_the_clear, _transfers, _doors, _batches, _providers),
    )
    found = [
        Advice(path=spelled(path), text=text, mark=None if written is None else written.mark_of(path))
        for rule in rules
        for path, text in rule(policy)
    ]
    return sorted(found, key=lambda advice: 0 if advice.mark is None else advice.mark.line)


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
            yield (*path, "role"), f"{text} this engine answers no call"


def _any_reads(group: str, engines: Sequence[EngineEntry]) -> bool:
    """Whether an engine of the group could read a prompt that another one answers."""
    members = [engine for engine in engines if engine.transfer == group]
    return any(
        reader is not writer and reader.role != "decode" and writer.role != "prefill" and share_models(reader, writer)
        for reader in members
        for writer in members
    )
