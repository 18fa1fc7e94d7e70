"""Validation of a policy across its fields: names that must exist, and values that must agree.

Each rule reads the finished `Policy` and yields faults. The lines of the file are found from the faults' paths
afterwards. Settings that are legal but unwise belong to `advice.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gateway.core.engines.origin import engine_id, url_fault
from gateway.core.policy.auth import auth_faults
from gateway.core.policy.policy import EngineEntry, Policy
from gateway.core.policy.provider_rules import engines_price, providers
from gateway.core.policy.route_rules import model_routes
from gateway.core.policy.traffic import ModeRule, Tenant, Threshold, TokenQuota, TrafficClass, When
from gateway.core.policy.types import OF_NOTHING, NameOf
from gateway.core.request.body_memory import SHARE as SHARE_OF_OWNER
from gateway.shared.files.checked import UNREAD, Fault, Path, listed, nearest, readable, shown
from gateway.shared.files.kinds import Structs
from gateway.shared.files.marks import marked
from gateway.shared.files.units import BYTES, SECONDS, SHARE
from gateway.shared.vllm.kv_events import address_fault

HINTS = 20  # unknown names for which the nearest known name is searched: the search is slow among thousands


def faults(policy: Policy, structs: Structs) -> Iterator[Fault]:
    """All faults that keep a well-formed policy from being used. Of a policy with unreadable parts, the faults of the
    other parts. `structs`: those of whoever read it."""
    rules = (
        _default,
        _classes,
        _reserves,
        _tenants,
        _auth,
        _modes,
        _engines,
        _memory,
        _quotas,
        _batches,
        model_routes,
        providers,
        engines_price,
    )
    yield from readable(_unknown(policy, structs), *(rule(policy) for rule in rules))


def _batches(policy: Policy) -> Iterator[Fault]:
    if policy.batches is not None and policy.storage is None:
        yield Fault(("batches",), "batches without storage", "storage too, whose folder has the files and the results")
    if policy.batches is not None and policy.cluster is not None:
        yield Fault(("batches",), "batches in a cluster", "a gateway of one machine: no other has its folder")


def _default(policy: Policy) -> Iterator[Fault]:
    if "default" not in policy.classes:
        yield Fault(("classes",), f"the classes {listed(policy.classes)}", "a class named default among them")


def _unknown(policy: Policy, structs: Structs) -> Iterator[Fault]:
    """Names of classes and tenants that do not exist."""
    hints = 0
    for path, name, mark in marked(policy, NameOf, structs):
        known = UNREAD if mark.field == "engines" else getattr(policy, mark.field)
        if known is not UNREAD and name not in known:
            hints += 1
            expected = f"one of the {mark.field} {listed(known)}"
            yield Fault(path, name, expected, nearest(name, known) if hints <= HINTS else None)


def bands_of(policy: Policy) -> list[list[str]]:
    """The classes' names in bands, in order. A strict class ends its band.

    A later band gets the capacity that earlier ones leave. Within a band weights decide.
    """
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
    """Each signal's threshold; None: not given."""
    return {name: getattr(threshold, name) for name in threshold.__struct_fields__}


def _classes(policy: Policy) -> Iterator[Fault]:
    for name, each in policy.classes.items():
        yield from readable(_late(name, each), _when(name, each))


def _late(name: str, each: TrafficClass) -> Iterator[Fault]:
    if each.ttft is not None and each.ttft > each.deadline:
        limit = f"at most its deadline, {SECONDS.show(each.deadline)}"
        yield Fault(("classes", name, "ttft"), SECONDS.show(each.ttft), limit)


def _when(name: str, each: TrafficClass) -> Iterator[Fault]:
    if each.when == When():
        yield Fault(("classes", name, "when"), "no condition", "prompt_tokens, routes or models")


def _reserves(policy: Policy) -> Iterator[Fault]:
    reserved = sum(each.reserve for each in policy.classes.values())
    if reserved >= 1:
        found = f"reserves of {SHARE.show(round(reserved, 9))} together"
        yield Fault(("classes",), found, "less than 100%, or nothing is left for calls to share")


def _tenants(policy: Policy) -> Iterator[Fault]:
    owners: dict[str, str] = {}
    for name, tenant in policy.tenants.items():
        yield from readable(_best(policy, name, tenant), _keys(name, tenant, owners))


def _best(policy: Policy, name: str, tenant: Tenant) -> Iterator[Fault]:
    order = list(policy.classes)
    given, best = tenant.class_, tenant.best_class
    if given in order and best in order and order.index(given) < order.index(best):
        expected = f"{best} or a class after it in classes"
        yield Fault(("tenants", name, "class"), f"{given}, which is above its best_class {best}", expected)


def _keys(name: str, tenant: Tenant, owners: dict[str, str]) -> Iterator[Fault]:
    for index, key in enumerate(tenant.keys):
        if key is not UNREAD:
            if key == OF_NOTHING:
                found = "the SHA-256 of an empty key: callers without a key would be this tenant"
                yield Fault(("tenants", name, "keys", index), found, "the SHA-256 of a key")
            owner = owners.setdefault(key, f"{name}.keys[{index}]")
            if owner != f"{name}.keys[{index}]":
                yield Fault(("tenants", name, "keys", index), f"the key of tenants.{owner} again", "each key once")


def _auth(policy: Policy) -> Iterator[Fault]:
    yield from auth_faults(policy.auth, policy.tenants)


def _modes(policy: Policy) -> Iterator[Fault]:
    for name, mode in modes_of(policy):
        yield from readable(_mode(("modes", name), mode))


def _mode(path: Path, rule: ModeRule) -> Iterator[Fault]:
    """Hysteresis: a mode flaps if it is left at the value at which it is entered, or by another signal."""
    for signal in rule.leave.__struct_fields__:
        yield from readable(_signal(path, rule, signal))


def _signal(path: Path, rule: ModeRule, signal: str) -> Iterator[Fault]:
    leave, enter = getattr(rule.leave, signal), getattr(rule.enter, signal)
    if leave is None:
        return
    if enter is None:
        text = shown(rule.leave, signal)
        yield Fault((*path, "leave", signal), f"{text}, but no {signal} in enter", "only signals that enter has")
    elif leave >= enter:
        expected = f"less than enter has, {shown(rule.enter, signal)}"
        yield Fault((*path, "leave", signal), shown(rule.leave, signal), expected)


def _engines(policy: Policy) -> Iterator[Fault]:
    first: dict[str, int] = {}
    names: dict[str, int] = {}
    for index, engine in enumerate(policy.fleet.engines):
        yield from readable(
            _url(index, engine, first),
            _name(index, engine, names),
            _events(index, engine),
            _role(index, engine, policy.fleet.engines),
        )


def _name(index: int, engine: EngineEntry, first: dict[str, int]) -> Iterator[Fault]:
    """Metrics and logs tell engines apart by their names."""
    name = engine.name
    if name is not None and first.setdefault(name, index) != index:
        yield Fault(
            ("fleet", "engines", index, "name"),
            f"{name} again (as in fleet.engines[{first[name]}])",
            "each name once",
        )


def _url(index: int, engine: EngineEntry, first: dict[str, int]) -> Iterator[Fault]:
    path = ("fleet", "engines", index, "url")
    wrong = url_fault(engine.url)
    if wrong is not None:
        yield Fault(path, repr(engine.url), f"an engine's URL: {wrong}")
    elif first.setdefault(engine_id(engine.url), index) != index:
        found = f"{engine.url} again (as in fleet.engines[{first[engine_id(engine.url)]}])"
        yield Fault(path, found, "each engine once")


def _events(index: int, engine: EngineEntry) -> Iterator[Fault]:
    expected = address_fault(engine.kv_events or "")
    if expected is not None:
        yield Fault(("fleet", "engines", index, "kv_events"), str(engine.kv_events), expected)


def _role(index: int, engine: EngineEntry, engines: Sequence[EngineEntry]) -> Iterator[Fault]:
    """A role is of an engine that exchanges KV caches, and what it reads another one must answer."""
    path = ("fleet", "engines", index, "role")
    if engine.role != "both" and engine.transfer is None:
        yield Fault(path, engine.role, "transfer too: the name of the engines that exchange KV caches")
    elif engine.role == "prefill" and not any(_answers_for(each, engine) for each in engines):
        expected = f"an engine of transfer group {engine.transfer} that answers its models' calls (role decode or both)"
        yield Fault(path, "prefill", expected)


def _answers_for(other: EngineEntry, engine: EngineEntry) -> bool:
    """Whether the other engine may answer calls whose prompts this one reads."""
    return other.role != "prefill" and other.transfer == engine.transfer and share_models(other, engine)


def share_models(one: EngineEntry, other: EngineEntry) -> bool:
    """Whether two engines may serve the same model. An engine without `models` serves all that it has."""
    return not one.models or not other.models or bool({*one.models} & {*other.models})


def quotas_of(policy: Policy) -> Iterator[tuple[Path, TokenQuota]]:
    """Every token quota that the policy may say."""
    yield ("limits", "quota"), policy.limits.quota
    for name, tenant in policy.tenants.items():
        yield ("tenants", name, "limits", "quota"), tenant.limits.quota


def _quotas(policy: Policy) -> Iterator[Fault]:
    """Counts of a day or month must outlast the gateway."""
    for path, quota in quotas_of(policy) if policy.storage is None else ():
        if isinstance(quota.day, int) or isinstance(quota.month, int):
            yield Fault(path, "a quota, and no storage", "storage: FOLDER too, where what is used is kept")


def _memory(policy: Policy) -> Iterator[Fault]:
    """A body larger than its sender's share of the memory could never be received."""
    body = policy.body
    largest = max(body.max, body.max_media)
    if body.memory * SHARE_OF_OWNER < largest:
        found = f"{shown(body, 'memory')}, of which {SHARE.show(SHARE_OF_OWNER)} for one tenant"
        expected = f"room for one body, {BYTES.show(largest)} (body.max, body.max_media)"
        yield Fault(("body", "memory"), found, expected)
