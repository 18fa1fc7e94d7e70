"""Policy of model routes: a name that callers use, and the models that answer it."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from gateway.core.policy.types import Bounds, ModelName, Part, Times, Weight
from gateway.shared.files.units import Share


class Until(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a canary, which is taken out once it is worse than the members without `until`, by a sequential test
    over three minutes or more. A change of the route puts it back.

    `errors`: Share of its calls that fail, beyond the others' share; null: not judged.
    `ttft`: Time to first token, as a multiple of the others' median, that more than half of its calls exceed; null: not
    judged.
    """

    errors: Part | None = None
    ttft: Times | None = None


class RouteMember(msgspec.Struct, frozen=True, kw_only=True):
    """Model that shares a route's calls. A bare name such as llama-3-8b is one too.

    `model`: Model of an engine.
    `weight`: Its share of the route's calls. Of weights 95 and 5, the second gets five calls of a hundred.
    `until`: The member is a canary until its errors or its first tokens are worse than the others'. It gets no calls
    beyond its share; null: it stays.
    """

    shorthand: ClassVar[str] = "model"

    model: ModelName
    weight: Weight = 1.0
    until: Until | None = None


class Mirror(msgspec.Struct, frozen=True, kw_only=True):
    """Copies of a route's calls for another model, whose answers are thrown away. A copy is a call of class batch,
    which must have headroom. It starts at once or not at all, and is charged to nobody.

    `model`: Model that gets the copies.
    `share`: Share of the calls that are copied.
    """

    model: ModelName
    share: Annotated[Share, Bounds(ge=0.0001, le=1)]


class ModelRoute(msgspec.Struct, frozen=True, kw_only=True):
    """Models behind a name that callers use. A conversation stays with one member. The header x-weir-model names the
    model that answered; `model` in the answer is the name that was asked for.

    `members`: Models that share the calls by weight.
    `fallback`: Models for calls that no member can serve within their targets, in order. A caller refuses them with the
    header `x-weir-fallback: none`.
    `mirror`: Copies of calls for a model on trial; null: none.
    """

    members: tuple[RouteMember, ...]
    fallback: tuple[ModelName, ...] = ()
    mirror: Mirror | None = None

    @property
    def models(self) -> tuple[str, ...]:
        """Every model that may answer the route's calls, members first."""
        return (*(member.model for member in self.members), *self.fallback)

    @property
    def has_canaries(self) -> bool:
        return any(member.until is not None for member in self.members)
