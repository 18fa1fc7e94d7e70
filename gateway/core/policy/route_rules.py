"""Validation of model routes: names that have another meaning, members twice, models that no engine has."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sized

from gateway.core.policy.policy import Policy
from gateway.core.policy.routes import ModelRoute, Until
from gateway.shared.files.checked import Fault, Path, listed, nearest, readable

HEADROOM = "classes.batch.headroom too, such as 30%: room that copies leave for callers"
MOST = 16  # members of a route, and fallbacks: each is asked for every call


def model_routes(policy: Policy) -> Iterator[Fault]:
    """Yield the faults of every route."""
    known = _models_of_fleet(policy)
    outside = frozenset(model for provider in policy.providers.values() for model in provider.models)
    for name in policy.models:
        yield from readable(_route(policy, name, known, outside))


def _route(policy: Policy, name: str, known: Collection[str] | None, outside: Collection[str]) -> Iterator[Fault]:
    """Yield the faults of one route. `known`: all models of the fleet; None: nobody knows them beforehand. `outside`:
    models of providers."""
    route, path = policy.models[name], ("models", name)
    yield from readable(
        _name(name, path, known),
        _number(route.members, (*path, "members"), 1),
        _number(route.fallback, (*path, "fallback"), 0),
        _twice(route, path),
        _canaries(route, path),
        _mirror(policy, route, path),
        (fault for at, model in _models(route, path) for fault in _model(at, model, policy.models, known, outside)),
    )


def _models_of_fleet(policy: Policy) -> frozenset[str] | None:
    """All models of the fleet; None: engines of a sidecar, or engines that list no models, may have others."""
    if policy.fleet.sidecars is not None or not policy.fleet.engines:
        return None
    listed_models = [engine.models for engine in policy.fleet.engines]
    return frozenset(model for models in listed_models for model in models) if all(listed_models) else None


def _name(name: str, path: Path, known: Collection[str] | None) -> Iterator[Fault]:
    if known is not None and name in known:
        yield Fault(path, "the name of an engine's model", "a name of its own: calls for the model would go elsewhere")


def _number(models: Sized, path: Path, least: int) -> Iterator[Fault]:
    count = len(models)
    if not least <= count <= MOST:
        yield Fault(path, f"{count} models" if count else "no model", f"{least} to {MOST} models")


def _models(route: ModelRoute, path: Path) -> Iterator[tuple[Path, str]]:
    """Every model that the route names, with its place."""
    for index, member in enumerate(route.members):
        yield (*path, "members", index, "model"), member.model
    for index, model in enumerate(route.fallback):
        yield (*path, "fallback", index), model
    if route.mirror is not None:
        yield (*path, "mirror", "model"), route.mirror.model


def _model(
    path: Path, model: str, routes: Mapping[str, ModelRoute], known: Collection[str] | None, outside: Collection[str]
) -> Iterator[Fault]:
    if model in routes:
        found = "the route itself" if path[1] == model else f"the route {model}"
        yield Fault(path, found, "a model of an engine: a route leads to no route")
    elif model in outside:
        if path[2] != "fallback":
            yield Fault(path, f"{model}, a provider's model", "a model of the house: providers' are for fallback alone")
    elif known is not None and model not in known:
        expected = f"a model of fleet.engines: {listed(sorted(known))}"
        yield Fault(path, model, expected, nearest(model, sorted(known)))


def _canaries(route: ModelRoute, path: Path) -> Iterator[Fault]:
    if route.members and all(member.until is not None for member in route.members):
        yield Fault((*path, "members"), "until at every member", "a member without until, to compare canaries with")
    for index, member in enumerate(route.members):
        if member.until == Until():
            yield Fault((*path, "members", index, "until"), "neither errors nor ttft", "one of them, or both")


def _mirror(policy: Policy, route: ModelRoute, path: Path) -> Iterator[Fault]:
    if route.mirror is None:
        return
    if any(member.model == route.mirror.model for member in route.members):
        yield Fault((*path, "mirror", "model"), f"{route.mirror.model}, a member", "a model that is no member")
    batch = policy.classes.get("batch")
    if batch is None or not batch.headroom:
        yield Fault((*path, "mirror"), "a mirror, and no headroom of the class batch", HEADROOM)


def _twice(route: ModelRoute, path: Path) -> Iterator[Fault]:
    """A fallback that is a member could not serve what the member cannot."""
    members = [member.model for member in route.members]
    for index, member in enumerate(route.members):
        if member.model in members[:index]:
            yield Fault(
                (*path, "members", index, "model"), f"{member.model} again", "each member once, with its weight"
            )
    for index, model in enumerate(route.fallback):
        if model in members:
            yield Fault((*path, "fallback", index), f"{model}, a member", "a model that is no member of the route")
        elif model in route.fallback[:index]:
            yield Fault((*path, "fallback", index), f"{model} again", "each fallback once")
