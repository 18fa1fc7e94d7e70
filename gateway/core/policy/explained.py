"""Explanation of a policy for one tenant, class and model, as text for people: `gateway check --explain`.

It gives the policy's decisions and the rule behind each. Decisions of the moment, such as the engine and the wait, are
not here. The class may be asked for by name, by service tier, or not at all (NOTHING), when the policy chooses.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from gateway.core.admission.levels import KINDS, Counted, counted, levels_of
from gateway.core.admission.mode import bars
from gateway.core.admission.quotas import SPANS, quota_of
from gateway.core.admission.shaping import spared
from gateway.core.agent_hints import MOST_SECONDS
from gateway.core.policy.advice_tenants import ANONYMOUS
from gateway.core.policy.policy import Policy
from gateway.core.policy.rules import bands_of, modes_of, signals_of
from gateway.core.policy.traffic import ModeRule, Tenant, When
from gateway.core.request.classes import ClassRules
from gateway.shared.files.checked import listed, nearest, shown, spelled
from gateway.shared.files.units import COUNT, SECONDS, SHARE

NOTHING = "-"
CACHED_PROMPTS = "waited for at a full engine as long as reading them anew would take, never past targets"
LATE = {
    "refuse": "refused on arrival or dropped before it runs, unless an engine is idle",
    "drop": "dropped before it runs, unless an engine is idle",
    "run": "runs all the same",
}
WIDTH = 16  # columns of labels


def explain_call(policy: Policy, tenant: str, asked: str, model: str) -> str:
    """Describe the fate of such calls, in aligned lines. Raises ValueError for an unknown tenant or class."""
    if tenant not in policy.tenants:
        raise ValueError(_unknown("tenant", tenant, list(policy.tenants)))
    wanted = asked if asked in policy.classes else policy.service_tiers.get(asked, asked)
    if wanted not in policy.classes and wanted != NOTHING:
        raise ValueError(_unknown("class or service tier", asked, [*policy.classes, *policy.service_tiers]))
    name = class_of(policy, policy.tenants[tenant], wanted)
    sections = (
        ("tenant", _tenant(policy, tenant)),
        ("model", _model(policy, tenant, model)),
        ("class", _class(policy, tenant, asked, wanted, model)),
        ("time", _time(policy, name)),
        ("order", _order(policy, policy.tenants[tenant], name)),
        ("agent hints", _agent_hints(policy.tenants[tenant])),
        ("lengths", _lengths(policy)),
        ("cached prompts", (CACHED_PROMPTS,)),
        ("room", _room(policy, name)),
        ("limits", _limits(policy, tenant, name, model)),
        ("", ("requests of tenant and global are counted before a body is read; a 4xx gives none back",)),
        ("quota", _quota(policy, tenant)),
        ("over a limit", _refusal(policy.tenants[tenant])),
        ("shaping", _shaping(policy, name)),
        ("modes", _modes(policy, name)),
        ("engines", _engines(policy, model, name)),
        ("all down", _all_down(policy)),
    )
    return "".join(
        f"{label if not index else '':{WIDTH}}{line}\n" for label, lines in sections for index, line in enumerate(lines)
    )


def class_of(policy: Policy, tenant: Tenant, wanted: str) -> str:
    """The class a call gets that asks for `wanted` and is subject to no `when`, as `classes` decides."""
    rules = ClassRules(policy)
    name = (tenant.class_ or "default") if wanted == NOTHING else wanted
    return name if tenant.best_class is None else rules.clamped(name, rules.rank[tenant.best_class])


def _unknown(what: str, name: str, known: list[str]) -> str:
    near = nearest(name, known)
    hint = f" (did you mean {near}?)" if near else ""
    return f"no {what} {name!r}: there are {listed(dict.fromkeys(known)) or 'none'}{hint}"


def _tenant(policy: Policy, name: str) -> Iterator[str]:
    tenant = policy.tenants[name]
    ways = ["calls without a key"] if name == ANONYMOUS else []
    if tenant.keys:
        ways.append(f"{len(tenant.keys)} {'keys' if len(tenant.keys) > 1 else 'key'} in the policy")
    if policy.keys_file is not None:
        ways.append(f"keys in {policy.keys_file}")
    if policy.auth is not None and name != ANONYMOUS:
        ways.append(f"tokens of {policy.auth.issuer} whose claim {policy.auth.tenant_claim} names it")
    if policy.trusted_proxies:
        ways.append(f"x-tenant from {', '.join(policy.trusted_proxies)}")
    yield f"{name}: {'; '.join(ways) or 'nobody, it has no key'}"


def _model(policy: Policy, name: str, model: str) -> Iterator[str]:
    tenant, route = policy.tenants[name], policy.models.get(model)
    if tenant.models and model not in tenant.models:
        yield f"{model}: refused with 403, {name} may use only {', '.join(tenant.models)}"
    else:
        yield f"{model}: {'one of those it may use' if tenant.models else 'it may use all'}"
    if route is not None:
        weights = sum(member.weight for member in route.members)
        shares = [f"{member.model} {SHARE.show(round(member.weight / weights, 4))}" for member in route.members]
        fallback = ", ".join(route.fallback) or "nobody"
        yield f"a model route: {', '.join(shares)}; where none can serve in time: {fallback}"


def _class(policy: Policy, name: str, asked: str, wanted: str, model: str) -> Iterator[str]:
    tenant = policy.tenants[name]
    given = class_of(policy, tenant, wanted)
    if wanted == NOTHING:
        first = tenant.class_ or "default"
        why = f"the class of {name}" if tenant.class_ else "for calls that ask for none"
    else:
        first, why = wanted, "as asked for" if asked == wanted else f"asked for as service tier {asked}"
    down = f"clamped from {first} to the best_class of {name}" if given != first else why
    yield f"{given}: {down}"
    if wanted == NOTHING:
        for other, each in policy.classes.items():
            if each.when is not None and (not each.when.models or model in each.when.models):
                yield f"{class_of(policy, tenant, other)}: {_conditions(each.when)}"
    tiers = ", ".join(tier for tier, to in policy.service_tiers.items() if to == given)
    yield f"asked for with x-weir-class: {given}" + (f", or service_tier: {tiers}" if tiers else "")


def _conditions(when: When) -> str:
    words = []
    if when.prompt_tokens is not None:
        words.append(f"the prompt has more than {COUNT.show(when.prompt_tokens)} tokens")
    if when.routes:
        words.append(f"the route is {' or '.join(when.routes)}")
    if when.models:
        words.append("the model is this one")
    return f"where {' and '.join(words)}"


def _time(policy: Policy, name: str) -> Iterator[str]:
    each = policy.classes[name]
    first = f"first token within {SECONDS.show(each.ttft)}, " if each.ttft is not None else ""
    yield f"{first}last token within {SECONDS.show(each.deadline)} or what x-weir-deadline-ms says"
    yield f"what cannot make it: {LATE[policy.deadlines]}"
    yield f"what runs past it: {'finished' if policy.deadlines == 'run' else 'cancelled'}"


def _order(policy: Policy, tenant: Tenant, name: str) -> Iterator[str]:
    each = policy.classes[name]
    bands = bands_of(policy)
    place = next(index for index, band in enumerate(bands) if name in band)
    if place:
        yield f"after all calls of {', '.join(other for band in bands[:place] for other in band)}"
    band = bands[place]
    total = sum(policy.classes[other].weight for other in band)
    rest = ", ".join(other for other in band if other != name)
    share = f", {each.weight / total:.0%} of the tokens while {rest} have work too" if rest else ""
    yield f"weight {shown(each, 'weight')}{share}; among tenants weight {shown(tenant, 'weight')}"


def _agent_hints(tenant: Tenant) -> Iterator[str]:
    if tenant.agent_hints:
        yield "prefix_id is its session, osl its expected length"
        yield f"priority N: N s before its turn among its tenant's, {MOST_SECONDS:.0f} at most; negative: after it"
    else:
        yield "nvext.agent_hints of its calls are ignored"


def _lengths(policy: Policy) -> Iterator[str]:
    if policy.lengths == "learned":
        yield "learned of the tenant's own calls, by session, route, tools, format, stop, prompt and max_tokens"
        yield "its waiting calls of a class go by expected length, the shortest first, aged"
    elif policy.lengths == "by_model":
        yield "by model, class and max_tokens"
    else:
        yield f"{SHARE.show(policy.lengths)} of max_tokens"


def _room(policy: Policy, name: str) -> Iterator[str]:
    each = policy.classes[name]
    yield f"{COUNT.show(each.max_queue)} calls may wait for a model"
    if each.max_concurrency is not None:
        yield f"{COUNT.show(each.max_concurrency)} calls may run at once in the whole fleet"
    if each.reserve:
        yield f"{SHARE.show(each.reserve)} of each engine's budget is kept for it"
    if each.headroom:
        more = f"{SHARE.show(each.headroom)} more than they had"
        yield f"its calls start where all prompts are read, and leave others {more}"


def _limits(policy: Policy, tenant: str, name: str, model: str) -> Iterator[str]:
    names = ("tenant and model", "tenant and class", "tenant", "class", "model", "global")
    rows = [
        (level, *[_counted(counted(policy, kind, where)) for kind in KINDS])
        for level, where in zip(names, levels_of(tenant, name, model), strict=True)
    ]
    table = [("", *KINDS), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    for row in table:
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()


def _quota(policy: Policy, tenant: str) -> Iterator[str]:
    """Tokens per calendar window."""
    quota, own = quota_of(policy, tenant), policy.tenants[tenant].limits.quota
    for span in SPANS:
        amount = getattr(quota, span)
        default = " (limits.quota)" if getattr(own, span) is None else ""
        if isinstance(amount, int):
            yield f"{COUNT.show(amount)} tokens per {span} (UTC){default}"
    if not any(isinstance(getattr(quota, span), int) for span in SPANS):
        yield "none"


def _counted(limit: Counted) -> str:
    if limit.quota is None:
        return "-"
    burst = f", burst {COUNT.show(limit.quota.burst)}" if limit.quota.burst is not None else ""
    default = f" ({spelled(limit.path[:-1])})" if limit.default else ""
    return f"{limit.quota.rate}{burst}{default}"


def _refusal(tenant: Tenant) -> Iterator[str]:
    if tenant.refusal is None:
        yield "429 with OpenAI's error object"
    else:
        yield f"{tenant.refusal.status} with {msgspec.json.encode(tenant.refusal.body).decode()}"


def _shaping(policy: Policy, name: str) -> Iterator[str]:
    tiers = [tier for tier in policy.shaping if name not in spared(tier, tuple(policy.classes))]
    for tier in tiers:
        fuller = SHARE.show(tier.kv_above)
        yield f"max_tokens at most {COUNT.show(tier.max_tokens)} where the engine's KV cache is above {fuller}"
    if not tiers:
        yield "max_tokens as asked for, always"


def _modes(policy: Policy, name: str) -> Iterator[str]:
    """The rules of the milder modes hold too, as in gateway.core.admission.mode."""
    order = list(policy.classes)
    refused = False
    for mode, rule in modes_of(policy):
        refused = refused or bars(rule, name, order)
        yield f"{mode:9} {'refused' if refused else 'taken':8} {_entered(rule)}"


def _entered(rule: ModeRule) -> str:
    signals = [
        f"{name} {shown(rule.enter, name)}" for name, value in signals_of(rule.enter).items() if value is not None
    ]
    return f"from {' or '.join(signals)} on" if signals else "never entered"


def _engines(policy: Policy, model: str, name: str) -> Iterator[str]:
    engines = [engine for engine in policy.fleet.engines if not engine.models or model in engine.models]
    rank = list(policy.classes).index(name)
    for engine in engines:
        priority = f", with priority {rank} (0 goes first)" if engine.scheduling_policy == "priority" else ""
        yield f"{engine.url}{'' if engine.models else ', if it has the model'}{priority}"
    if not engines:
        none = "none of fleet.engines serves it" if policy.fleet.engines else "the policy names none"
        yield f"{none}; those of --engine are not known here"


def _all_down(policy: Policy) -> Iterator[str]:
    hold = policy.routing.hold_unserved
    if hold:
        yield f"calls wait for an engine to come back, for {SECONDS.show(hold)} in all, within their targets; then 503"
    else:
        yield "refused with 503 at once"
