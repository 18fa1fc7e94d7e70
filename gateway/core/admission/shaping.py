"""Shaping: shorter answers under pressure, before anybody is refused one.

The tiers of the policy cap `max_tokens` by the chosen engine's watermark. Shaping never asks for
more than the client did. It never raises: a body that was parsed can be shaped. The client is told by a header of the
answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
from msgspec import Raw

from gateway.core.policy.policy import Policy
from gateway.core.policy.traffic import ShapingTier

# Where each kind of route says how long an answer may be. vLLM takes the first that is not null; a client that says
# nothing gets the first set for it.
FIELDS: dict[str, tuple[str, ...]] = {
    "chat": ("max_completion_tokens", "max_tokens"),
    "completion": ("max_tokens",),
    "message": ("max_tokens",),
    "response": ("max_output_tokens",),
}
LEAST_THINKING = 1024  # tokens; Anthropic's API and vLLM take no smaller thinking.budget_tokens
NO_THINKING = Raw(b'{"type":"disabled"}')


class _Thinking(msgspec.Struct, gc=False):
    budget_tokens: int | None = None


_decode_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_number = msgspec.json.Decoder(int | None).decode
_decode_thinking = msgspec.json.Decoder(_Thinking | None).decode
_encode = msgspec.json.Encoder().encode


def cap(tiers: Sequence[ShapingTier], watermark: float, class_name: str, order: Sequence[str]) -> int | None:
    """The smallest `max_tokens` of the tiers that apply to a call, None: none does.

    `watermark` is the chosen engine's share of KV cache in use, `order` the classes, most important first.
    """
    caps = [tier.max_tokens for tier in tiers if watermark > tier.kv_above and class_name not in spared(tier, order)]
    return min(caps, default=None)


def spared(tier: ShapingTier, order: Sequence[str]) -> Sequence[str]:
    """The classes that a tier does not apply to. `order`: the classes, most important first."""
    return order[:1] if tier.except_ is None else tier.except_


class Shaping:
    """The tiers of one policy. `above`: the watermark above which any tier can apply."""

    def __init__(self, policy: Policy) -> None:
        self._tiers = policy.shaping
        self._order = tuple(policy.classes)
        self.above = min([tier.kv_above for tier in policy.shaping], default=math.inf)

    def given(self, asked: int, class_name: str, watermark: float) -> int:
        """The `max_tokens` of a call that asked for so many, on an engine with this watermark."""
        most = cap(self._tiers, watermark, class_name, self._order)
        return asked if most is None else min(asked, most)


def shape_body(body: bytes, kind: str, max_tokens: int) -> bytes:
    """`body`, which was parsed for a route of `kind` that generates, asking for `max_tokens` at most.

    What the engine would refuse beside the smaller number gives way too: a larger `min_tokens`, and in a message
    `thinking` whose budget is not below it. All other values keep their bytes; of equal keys the last one is kept,
    which is the one every reader takes.
    """
    fields = _decode_fields(body)
    changed: dict[str, Raw] = {}
    asked = [name for name in FIELDS[kind] if _number(fields, name) is not None]
    if not asked:
        changed[FIELDS[kind][0]] = Raw(b"%d" % max_tokens)
    for name in (*asked, "min_tokens"):
        value = _number(fields, name)
        if value is not None and value > max_tokens:
            changed[name] = Raw(b"%d" % max_tokens)
    if kind == "message" and "thinking" in fields:
        thinking = _less_thinking(fields["thinking"], max_tokens)
        if thinking is not None:
            changed["thinking"] = thinking
    return _encode(fields | changed) if changed else body


def _number(fields: dict[str, Raw], name: str) -> int | None:
    return _decode_number(fields[name]) if name in fields else None


def _less_thinking(raw: Raw, max_tokens: int) -> Raw | None:
    """Replacement of `thinking` for an answer of at most `max_tokens`, thoughts included; None if `thinking` can
    stay."""
    try:
        thinking = _decode_thinking(raw)
    except msgspec.ValidationError:
        return None  # the engine will say what is wrong with it
    if thinking is None or thinking.budget_tokens is None or thinking.budget_tokens < max_tokens:
        return None
    if max_tokens <= LEAST_THINKING:
        return NO_THINKING
    return Raw(_encode(_decode_fields(raw) | {"budget_tokens": Raw(b"%d" % (max_tokens - 1))}))


def shaped_header(max_tokens: int, asked: int) -> bytes:
    """The answer's line that tells the client its answer was capped, and what it had asked for."""
    return b"x-weir-max-tokens: %d; asked=%d\r\n" % (max_tokens, asked)
